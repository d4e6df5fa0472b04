"""The way of every ``kvtier.v1`` call: its session, its right, its remembered reply, its refusal.

A verb is a coroutine from a session and a request to a reply. A verb refuses by raising. A request with a ``seq`` field
may be repeated: the session remembers the reply. A method that is not in :data:`NEEDS` cannot be served.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import xxhash
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from kvtier.abi.attach import TRACE_METADATA_KEY
from kvtier.abi.stream import GO_AHEAD_KEY
from kvtier.v1 import session_pb2, transfer_pb2
from kvtierd.core.ids import CacheId
from kvtierd.rights import Anonymous, Certificate, Identity, Right, Rights
from kvtierd.service.call_counts import CallCounts, CountedCall, Metadata
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused, Translator, bad_argument, parser, refused, shown, shutting_down
from kvtierd.service.sessions import ClientSession, SessionRegistry, account, require_attached, session_ended
from kvtierd.service.turns import Turns
from kvtierd.service.unauthenticated import abort, read

Verb = Callable[[ClientSession, Any], Awaitable[Message]]
StreamVerb = Callable[[ClientSession, Any], AsyncGenerator[bytes, None]]

UploadVerb = Callable[
    [ClientSession, transfer_pb2.PutHeader, AsyncIterator[transfer_pb2.BlockBytes]], Awaitable[Message]
]
"""Takes a header and the chunks that follow it."""

MAX_CALLS: Final = 4096
"""Open calls at a time, watches included. An identity may have half of them, a process a quarter."""

MAX_DRAINED: Final = 128
"""Messages of a refused upload that the daemon reads before it sends the refusal."""

DRAIN_S: Final = 0.25
"""A refused sender that is quiet for this long has no message under way."""

_CAPITAL: Final = re.compile("(?<!^)[A-Z]")

_Context = grpc.aio.ServicerContext[Any, Any]


class Over(Enum):
    """The caches that a right must cover."""

    ID = "the cache of the request's cache_id"
    NAME = "the cache of the request's name"
    SOME = "at least one cache; the verb answers for those where the caller has the right"
    EVERY = "every cache"


@dataclass(slots=True, frozen=True)
class Needs:
    """The right that a method needs.

    Args:
        right: None if the method needs no right.
        forced: Replaces ``right`` if the request has ``force``.
        within: Part of the request that has the ``cache_id``; None = the request itself.
        instead: For ``Over.SOME``: a second right that is enough.
    """

    right: Right | None
    over: Over = Over.ID
    forced: Right | None = None
    within: str | None = None
    instead: Right | None = None


NEEDS: Final[Mapping[str, Needs]] = {
    "kvtier.v1.Caches.Open": Needs(Right.READ, Over.NAME),  # and WRITE to create: see CachesService.open
    "kvtier.v1.Caches.Close": Needs(None),
    "kvtier.v1.Caches.List": Needs(Right.READ, Over.SOME),
    "kvtier.v1.Caches.Remove": Needs(Right.ADMIN, Over.NAME),
    "kvtier.v1.Caches.Resize": Needs(Right.ADMIN, Over.NAME),
    "kvtier.v1.Blocks.Match": Needs(Right.READ),
    "kvtier.v1.Blocks.Locate": Needs(Right.READ),
    "kvtier.v1.Blocks.Checksums": Needs(Right.READ),
    "kvtier.v1.Blocks.Touch": Needs(Right.READ),
    "kvtier.v1.Blocks.Reserve": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Commit": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Acquire": Needs(Right.READ),
    "kvtier.v1.Blocks.Join": Needs(Right.READ),  # and WRITE while slots are blank: see BlocksService.join
    "kvtier.v1.Blocks.Release": Needs(None),
    "kvtier.v1.Blocks.Move": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Drop": Needs(Right.WRITE),
    "kvtier.v1.Blocks.SetRetention": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Pin": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Reset": Needs(Right.WRITE, forced=Right.ADMIN),
    "kvtier.v1.Blocks.List": Needs(Right.READ),
    "kvtier.v1.Transfer.Put": Needs(Right.WRITE, within="commit"),  # in its header
    "kvtier.v1.Transfer.Get": Needs(Right.READ, within="acquire"),
    "kvtier.v1.Events.Watch": Needs(Right.WATCH, Over.SOME),
    "kvtier.v1.Admin.Stats": Needs(Right.ADMIN, Over.SOME),
    "kvtier.v1.Admin.Leases": Needs(Right.ADMIN, Over.EVERY),
    "kvtier.v1.Admin.Kick": Needs(Right.ADMIN, Over.EVERY),
    "kvtier.v1.Admin.Explain": Needs(Right.READ, Over.SOME, instead=Right.WATCH),
    "kvtier.v1.Admin.Holdings": Needs(Right.READ, Over.SOME, instead=Right.WATCH),
    "kvtier.v1.Admin.RemoteGc": Needs(Right.ADMIN, Over.SOME),  # on the named caches, or on all: see the verb
}


class Access:
    """Checks the rights of sessions."""

    def __init__(self, rights: Rights, catalog: Catalog) -> None:
        self.rights = rights
        """A reload of the configuration replaces it; every call reads it."""
        self._catalog: Final = catalog

    def admits(self, who: Identity) -> bool:
        return bool(self.rights.somewhere(who))

    def may(self, session: ClientSession, right: Right, cache: str) -> bool:
        return right in self.rights.on(session.peer.identity, cache)

    def may_everywhere(self, session: ClientSession, right: Right) -> bool:
        """Whether the session has the right on every present and future cache."""
        return right in self.rights.everywhere(session.peer.identity)

    def require(self, session: ClientSession, needs: Needs, request: Any) -> None:
        """Checks the right that a request needs. Raises PERMISSION_DENIED."""
        right = needs.forced if needs.forced is not None and request.force else needs.right
        if right is None:
            return
        match needs.over:
            case Over.SOME:
                if {right, needs.instead}.isdisjoint(self.rights.somewhere(session.peer.identity)):
                    raise denied(right, "any cache", session.peer.identity)
            case Over.EVERY:
                if not self.may_everywhere(session, right):
                    raise denied(right, "every cache", session.peer.identity)
            case Over.NAME:
                self.require_on(session, right, request.name)
            case Over.ID:
                part = getattr(request, needs.within) if needs.within is not None else request
                cache = self._catalog.get(CacheId(part.cache_id))
                if cache is None:
                    return  # the verb refuses an unknown cache
                if right not in self.rights.on(session.peer.identity, cache.name):
                    # A caller that guesses ids does not learn names.
                    shown_as = cache.name if cache.id in session.caches else f"number {cache.id}"
                    raise denied(right, shown_as, session.peer.identity)

    def require_on(self, session: ClientSession, right: Right, cache: str) -> None:
        """Raises PERMISSION_DENIED."""
        if not self.may(session, right, cache):
            raise denied(right, cache, session.peer.identity)


def denied(right: Right, cache: str, who: Identity) -> CallRefused:
    """PERMISSION_DENIED that names the right, the cache and the identity."""
    where = cache if cache in ("any cache", "every cache") else f"cache {shown(cache)}"
    message = f"the right to {right} on {where} is missing: {who} needs an [[allow]] rule that gives it"
    about = {"field": right, "value": shown(cache), "limit": shown(str(who))}
    return refused(grpc.StatusCode.PERMISSION_DENIED, "NO_RIGHT", message, **about)


@dataclass(slots=True, frozen=True)
class Pace:
    """The least speed of a peer for which slots are held. An uploading peer sends ``least_bytes`` in any ``idle_s``
    seconds, or ends its stream. A downloading peer takes each message, of up to 1 MiB, in ``idle_s`` seconds."""

    idle_s: float
    least_bytes: int = 64 << 10

    @asynccontextmanager
    async def patience(self, seconds: float) -> AsyncGenerator[None, None]:
        """Raises DEADLINE_EXCEEDED if the block takes longer than ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            says = f"fewer than {self.least_bytes} bytes, and no end, came within {self.idle_s:g} seconds"
            raise _stalled(says) from error


class OpenCalls:
    """Counts unanswered calls. Loop thread only.

    The daemon stops gRPC's server after the last answer. gRPC closes each connection behind its last answer, and a
    client that writes at that moment loses the answers that it has not read.
    """

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts a call until it has written its answer."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    def counted(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
        """The same handler, counted until it returns a reply or has written a refusal."""

        async def handler(request: Any, context: Any) -> Any:
            with self.counting():
                return await call(request, context)

        return handler

    async def answered(self, within_s: float) -> None:
        """Returns when no call is open, or after ``within_s`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._count:
                    self._none.clear()
                    await self._none.wait()


_Perform = Callable[[CountedCall, ClientSession, bytes], Coroutine[Any, Any, Message]]
"""Performs the request of a session. Raises exceptions for :class:`Translator`."""


@dataclass(slots=True, eq=False)
class Dispatcher:
    """Makes gRPC handlers of verbs. ``_kept``: whether a reply names a live lease, and must stay remembered."""

    _sessions: SessionRegistry
    _access: Access
    _translate: Translator
    _open: OpenCalls
    _kept: Callable[[Message], bool]
    call_counts: CallCounts
    turns: Turns
    _stopping: bool = field(default=False, init=False)
    _of: Counter[tuple[Identity, int | str | None]] = field(default_factory=Counter, init=False)
    """Open calls of each identity, and of its processes."""
    _unary_methods: dict[str, _Perform] = field(default_factory=dict, init=False)
    """The methods of local calls, by path."""

    def stop(self) -> None:
        """Refuses every unary call and upload from now on: the verbs lose the engine."""
        self._stopping = True

    def handler(self, service: str, servicer: object, pace: Pace | None = None) -> grpc.GenericRpcHandler:
        """All methods of a service. Each calls the servicer's method of the same name in snake case.

        Args:
            service: Full name of the service.
            pace: The least speed of a stream's peer; None = the peer may take its time.

        Raises:
            AttributeError: The servicer lacks a method.
            KeyError: No right is known for a method.
            ValueError: The service has an upload, and there is no pace.
        """
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, method in descriptor_pool.Default().FindServiceByName(service).methods_by_name.items():
            verb = getattr(servicer, _CAPITAL.sub(r"_\g<0>", name).lower())
            serialise = message_factory.GetMessageClass(method.output_type).SerializeToString
            if method.client_streaming:
                if pace is None:
                    raise ValueError(f"{method.full_name}: an upload needs a pace")
                call = self._open.counted(self._upload(method, verb, pace))
                handlers[name] = grpc.stream_unary_rpc_method_handler(call, response_serializer=serialise)
            elif method.server_streaming:
                call = self._open.counted(self._stream(method, verb, pace))
                handlers[name] = grpc.stream_stream_rpc_method_handler(call)
            else:
                perform = self._performing(method, verb)
                self._unary_methods[f"/{service}/{name}"] = perform
                call = self._open.counted(self._unary(method.full_name, perform))
                # The handler reads its message itself: after the session is known, and within a time limit.
                handlers[name] = grpc.stream_unary_rpc_method_handler(call, response_serializer=serialise)
        return grpc.method_handlers_generic_handler(service, handlers)

    def _caller(self, context: _Context, metadata: Metadata) -> ClientSession:
        """The session of a call. Raises UNAVAILABLE, UNAUTHENTICATED or PERMISSION_DENIED."""
        if self._stopping:
            raise shutting_down()
        return self._sessions.authenticate(metadata, caller_of(context))

    @contextmanager
    def _counting(self, counted_call: CountedCall, session: ClientSession) -> Iterator[None]:
        """Raises RESOURCE_EXHAUSTED if the session's client has too many calls open."""
        counted_call.session = session
        peer, who = session.peer, account(session.peer.identity)
        process = (who, peer.pid or peer.address)
        for counted, most, kind in ((process, MAX_CALLS // 4, "process"), ((who, None), MAX_CALLS // 2, "identity")):
            if self._of[counted] >= most:
                says = f"{peer.identity} has {most} calls open; one {kind} may have {most}"
                raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS", says)
        self._of.update((process, (who, None)))
        try:
            yield
        finally:
            for counted in (process, (who, None)):
                self._of[counted] -= 1
                if not self._of[counted]:
                    del self._of[counted]

    def _performing(self, method: MethodDescriptor, verb: Verb) -> _Perform:
        parse = parser(method)
        mutates = "seq" in method.input_type.fields_by_name
        needs = NEEDS[method.full_name]
        name = method.full_name.encode()

        async def perform(counted_call: CountedCall, session: ClientSession, raw: bytes) -> Message:
            counted_call.request = request = parse(raw)
            self._access.require(session, needs, request)
            if not mutates or not request.seq:
                return await verb(session, request)
            digest, run = xxhash.xxh3_128_digest(name + raw), partial(_run, verb, session, request)
            return await session.replies.answer(request.seq, digest, run, self._kept)

        return perform

    def _unary(self, name: str, perform: _Perform) -> Callable[[object, _Context], Awaitable[Message]]:
        async def call(_: object, context: _Context) -> Message:
            session: ClientSession | None = None
            metadata = context.invocation_metadata()
            with self.call_counts.call(name, metadata) as counted_call:
                try:
                    session = self._caller(context, metadata)
                    with self._counting(counted_call, session):
                        raw = await _only(session, context)
                        await self.turns.begin(session)
                        return counted_call.answered(
                            await self.turns.measured(session, perform(counted_call, session, raw))
                        )
                except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                    refusal = counted_call.refused(self._refusal(error, session))
            await abort(context, refusal)

        return call

    def _refusal(self, error: Exception, session: ClientSession | None) -> CallRefused:
        """The refusal for an error. A call that outlives its session has no other answer: its cache may be gone."""
        return self._translate(error if session is None or not session.ended else session_ended())

    async def local(
        self,
        session: ClientSession,
        call: session_pb2.UnaryCall,
        send: Callable[[session_pb2.CallAnswer], Awaitable[None]],
    ) -> None:
        """Answers a call over the attach socket."""
        with self._open.counting():
            # A client that reads no answer fills its own socket, but not its user's number of open calls.
            await send(await self.turns.measured(session, self._local_answer(session, call)))

    async def _local_answer(self, session: ClientSession, call: session_pb2.UnaryCall) -> session_pb2.CallAnswer:
        perform = self._unary_methods.get(call.path)
        method = "unknown" if perform is None else call.path[1:].replace("/", ".")
        metadata = ((TRACE_METADATA_KEY, call.trace),) if call.trace else ()
        with self.call_counts.call(method, metadata) as counted_call:
            try:
                if self._stopping:
                    raise shutting_down()
                require_attached(session)
                with self._counting(counted_call, session):
                    if perform is None:
                        raise refused(grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD", f"no method {shown(call.path)}")
                    reply = counted_call.answered(await perform(counted_call, session, call.request))
                    return session_pb2.CallAnswer(number=call.number, body=reply.SerializeToString())
            except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                refusal = counted_call.refused(self._refusal(error, session))
                return session_pb2.CallAnswer(number=call.number, status=refusal.code.value[0], body=refusal.status())

    def _stream(
        self, method: MethodDescriptor, verb: StreamVerb, pace: Pace | None
    ) -> Callable[[object, _Context], Awaitable[None]]:
        parse = parser(method)
        needs = NEEDS[method.full_name]

        async def call(_: object, context: _Context) -> None:
            session: ClientSession | None = None
            metadata = context.invocation_metadata()
            with self.call_counts.call(method.full_name, metadata, timed=False) as counted_call:
                try:
                    session = self._sessions.authenticate(metadata, caller_of(context))
                    with self._counting(counted_call, session):
                        counted_call.request = request = parse(await _only(session, context))
                        self._access.require(session, needs, request)
                        idle_s = None if pace is None else pace.idle_s
                        async with session.streaming(), aclosing(verb(session, request)) as replies:
                            async for reply in replies:
                                await _write(session, context, reply, idle_s, replies.aclose)
                    counted_call.code = "OK"
                    return
                except asyncio.CancelledError:
                    if session is None or not session.ended or context.cancelled():
                        raise  # the client cancelled the call
                    refusal = counted_call.refused(session_ended())
                except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                    refusal = counted_call.refused(self._refusal(error, session))
            await abort(context, refusal)

        return call

    def _upload(
        self, method: MethodDescriptor, verb: UploadVerb, pace: Pace
    ) -> Callable[[AsyncIterator[bytes], _Context], Awaitable[Message]]:
        needs = NEEDS[method.full_name]
        name = method.full_name.encode()

        async def call(messages: AsyncIterator[bytes], context: _Context) -> Message:
            upload = _Upload(messages, parser(method), context, pace)
            session: ClientSession | None = None
            metadata = context.invocation_metadata()
            with self.call_counts.call(method.full_name, metadata) as counted_call:
                try:
                    session = self._caller(context, metadata)
                    with self._counting(counted_call, session):
                        raw, header = await upload.header()
                        counted_call.request = header
                        self._access.require(session, needs, header)
                        if not (seq := header.commit.seq):
                            return counted_call.answered(await verb(session, header, upload.chunks()))
                        # The checksums in the header stand for the bytes after it.
                        run = partial(_run, verb, session, header, upload.chunks())
                        reply = await session.replies.answer(seq, xxhash.xxh3_128_digest(name + raw), run)
                        return counted_call.answered(reply)
                except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                    error = shutting_down() if self._stopping else error
                    refusal = counted_call.refused(self._refusal(error, session))
            await upload.drain()
            await abort(context, refusal)

        return call


async def _only(session: ClientSession, context: _Context) -> bytes:
    """The message of a call. The semaphore keeps a client from sending many large messages at a time."""
    async with session.receiving:
        return await read(context) or b""


async def _write(
    session: ClientSession,
    context: _Context,
    reply: bytes,
    idle_s: float | None,
    give_back: Callable[[], Awaitable[None]],
) -> None:
    """Writes a reply. A refusal waits for the end of the write: gRPC cannot end a call during a write.

    Args:
        give_back: Releases the slots of the stream, before the wait.

    Raises:
        CallRefused: DEADLINE_EXCEEDED if the peer does not take the reply in ``idle_s`` seconds, UNAUTHENTICATED if the
            session ends.
    """
    writing = asyncio.ensure_future(context.write(reply))
    try:
        await asyncio.wait([writing], timeout=idle_s)
        if not writing.done():
            await give_back()
            await writing
            raise _stalled(f"no message was taken for {idle_s:g} seconds")
        writing.result()
    except asyncio.CancelledError:
        if not session.ended or context.cancelled():
            raise  # the client cancelled the call
        await give_back()
        await asyncio.wait([writing])
        raise session_ended() from None
    finally:
        writing.cancel()


@dataclass(slots=True)
class _Upload:
    """The messages of an upload: a header, then chunks."""

    _messages: AsyncIterator[bytes]
    _parse: Callable[[bytes], Any]
    _context: _Context
    _pace: Pace
    _expected: bool = field(default=False, init=False)

    async def header(self) -> tuple[bytes, transfer_pb2.PutHeader]:
        """The first message, as bytes and parsed."""
        async with self._pace.patience(self._pace.idle_s):
            raw = await self._next()
        message = self._parse(raw or b"")
        if message.WhichOneof("part") != "header":
            raise bad_argument("part", message.WhichOneof("part") or "nothing", "header, in the first message")
        return raw or b"", message.header

    async def chunks(self) -> AsyncGenerator[transfer_pb2.BlockBytes, None]:
        """The chunks up to the end of the stream. Raises DEADLINE_EXCEEDED for a slow sender, CANCELLED for a broken
        stream."""
        self._expected = True
        await self._context.send_initial_metadata(((GO_AHEAD_KEY, "1"),))
        clock = asyncio.get_running_loop().time
        brought, end = 0, clock() + self._pace.idle_s
        while True:
            async with self._pace.patience(end - clock()):
                raw = await self._next()
            if raw is None:
                return
            message = self._parse(raw)
            if message.WhichOneof("part") != "bytes":
                raise bad_argument("part", message.WhichOneof("part") or "nothing", "bytes, after the header")
            yield message.bytes
            brought += len(message.bytes.data)
            if brought >= self._pace.least_bytes:
                brought, end = 0, clock() + self._pace.idle_s

    async def drain(self) -> None:
        """Reads the messages that a refused sender has under way. A gRPC client that is refused during a message shows
        an internal error instead of the refusal."""
        with suppress(CallRefused, TimeoutError):  # the upload is refused already
            for _ in range(MAX_DRAINED if self._expected else 0):
                async with asyncio.timeout(DRAIN_S):
                    if await self._next() is None:
                        return

    async def _next(self) -> bytes | None:
        # gRPC logs an error for an iterator that is never awaited, so a call refused before its first read makes none.
        raw = await anext(aiter(self._messages), None)
        if raw is None and self._context.cancelled():
            # Not a wrong argument: a repeat of the call waits for this call, then runs anew.
            raise refused(grpc.StatusCode.CANCELLED, "STREAM_BROKEN", "the stream broke before its end")
        return raw


def _stalled(says: str) -> CallRefused:
    return refused(grpc.StatusCode.DEADLINE_EXCEEDED, "STALLED", says)


async def _run(verb: Callable[..., Awaitable[Message]], session: ClientSession, *request: Any) -> Message:
    # The task starts a turn of the loop after the call: a session that ended meanwhile must get no lease.
    require_attached(session)
    return await verb(session, *request)


def caller_of(context: _Context) -> Identity | None:
    """The identity that the transport proves; None over the unix socket, which proves none."""
    if context.peer().startswith("unix:"):
        return None
    proof = context.auth_context()
    if b"ssl" not in proof.get("transport_security_type", ()):
        return Anonymous()
    names = [*proof.get("x509_common_name", ()), *proof.get("x509_subject_alternative_name", ())]
    return Certificate(frozenset(name.decode(errors="replace") for name in names if name))
