"""Sessions over TCP: ``kvtier.v1.Sessions``.

A TCP client has no process that the daemon could watch, so its stream keeps the session alive. When the stream breaks,
the session is orphaned; it ends after a grace period, unless the same client resumes it. Heartbeats in both directions
turn a vanished host into a broken stream.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import grpc
import grpc.aio

from kvtier.v1 import session_pb2
from kvtierd.rights import Identity
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.calls import Access, OpenCalls, caller_of
from kvtierd.service.errors import Translator, bad_argument, parser, refused, shutting_down
from kvtierd.service.peer import AttachRefused, RemotePeer, hear_hello
from kvtierd.service.sessions import GOODBYE, ClientSession, SessionRegistry, this_task
from kvtierd.service.unauthenticated import UnauthenticatedCalls, abort, write

SILENT_BEATS: Final = 3
"""Heartbeats missed before the other side counts as gone."""

_SERVICE: Final = session_pb2.DESCRIPTOR.services_by_name["Sessions"]
_METHOD: Final = _SERVICE.methods_by_name["Session"]

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, eq=False)
class RemoteSessions:
    """The servicer. A task per stream runs its conversation; the task is the session's connection. ``_grace_s``:
    seconds that a session outlives its stream. Heartbeats are a tenth of it apart, five seconds at most."""

    name: ClassVar[str] = _SERVICE.full_name

    _sessions: SessionRegistry
    _access: Access
    _identity: DaemonIdentity
    _grace_s: float
    _translate: Translator
    _unauthenticated: UnauthenticatedCalls
    _conversations: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    @property
    def _heartbeat_s(self) -> float:
        return min(5.0, max(0.01, self._grace_s / 10))

    def handler(self, open_calls: OpenCalls) -> grpc.GenericRpcHandler:
        method: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            open_calls.counted(self._serve), response_serializer=session_pb2.SessionReply.SerializeToString
        )
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, {_METHOD.name: method})

    def close(self) -> None:
        """Ends all streams. Their sessions end with the daemon's stop."""
        self._closed = True
        for conversation in self._conversations:
            conversation.cancel()

    async def _serve(self, _: object, context: _Context) -> None:
        conversation = asyncio.create_task(self._converse(context), name="session-stream")
        self._conversations.add(conversation)
        conversation.add_done_callback(self._conversations.discard)
        try:
            await asyncio.wait([conversation])
        finally:
            conversation.cancel()  # if the call itself was cancelled
        try:
            if not conversation.cancelled():
                return conversation.result()
            if self._closed:
                raise shutting_down()
            raise refused(grpc.StatusCode.ABORTED, "SESSION_ENDED", "the session ended, or another stream has it")
        except AttachRefused as error:
            _log.warning("session refused peer=%s reason=%s why=%r", context.peer(), error.reason, error.message)
            refusal = refused(_CODES[error.reason], error.reason, error.message)
        except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
            refusal = self._translate(error)
        await abort(context, refusal)

    async def _converse(self, context: _Context) -> None:
        who = self._named(context)
        async with self._unauthenticated.admitted():
            token = (await hear_hello(_next(context))).token
        session = self._admit(context, who, token)
        times_ns = {"heartbeat_ns": int(self._heartbeat_s * 1e9), "grace_ns": int(self._grace_s * 1e9)}
        try:
            welcome = self._identity.welcome(session, resumed=bool(token), **times_ns)
            await write(context, session_pb2.SessionReply(welcome=welcome))
            beating = asyncio.create_task(self._beat(context), name="session-heartbeat")
            try:
                if await self._listen(context):
                    self._sessions.end(session, GOODBYE)
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)  # a write to a broken stream fails
        finally:
            self._sessions.connection_lost(session, this_task())

    def _named(self, context: _Context) -> Identity:
        """The caller's identity. Raises :class:`AttachRefused` for a local client or if no rule names the caller."""
        who = caller_of(context)
        if who is None:
            raise AttachRefused("LOCAL_CLIENT", "over this socket sessions begin at attach.sock")
        if not self._access.admits(who):
            raise AttachRefused("PERMISSION_DENIED", f"no [[allow]] rule of the daemon names {who}")
        return who

    def _admit(self, context: _Context, who: Identity, token: str) -> ClientSession:
        peer = RemotePeer(who, context.peer(), self._grace_s)
        if token:
            return self._sessions.resume(token, peer, this_task())
        return self._sessions.begin(peer, this_task())

    async def _beat(self, context: _Context) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await context.write(session_pb2.SessionReply(heartbeat=session_pb2.Heartbeat()))

    async def _listen(self, context: _Context) -> bool:
        """Listens until the stream ends. Returns whether a goodbye came. Raises ABORTED if heartbeats stop."""
        patience_s = SILENT_BEATS * self._heartbeat_s
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    request = await _next(context)
            except TimeoutError:
                says = f"no heartbeat for {patience_s:g} s; open Sessions.Session with this token"
                raise refused(grpc.StatusCode.ABORTED, "NO_HEARTBEAT", says) from None
            if request is None:
                return False
            match request.WhichOneof("message"):
                case "heartbeat":
                    continue
                case "bye":
                    return True
                case other:
                    raise bad_argument("message", other, "a heartbeat or a bye: this stream has said hello already")


_parse: Final = parser(_METHOD)


async def _next(context: _Context) -> session_pb2.SessionRequest | None:
    """The next message; None at the end. Raises INVALID_ARGUMENT for bytes that are not a message."""
    raw = await context.read()
    message: session_pb2.SessionRequest | None = None if raw is grpc.aio.EOF else _parse(raw)
    return message


_CODES: Final = {
    "NO_HELLO": grpc.StatusCode.INVALID_ARGUMENT,
    "BAD_VERSION": grpc.StatusCode.INVALID_ARGUMENT,
    "LOCAL_CLIENT": grpc.StatusCode.FAILED_PRECONDITION,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "UNKNOWN_SESSION": grpc.StatusCode.NOT_FOUND,
    "TOO_MANY_SESSIONS": grpc.StatusCode.UNAVAILABLE,
    "TOO_MANY_OF_IDENTITY": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
