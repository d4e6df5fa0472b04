"""The connection of a client on the daemon's host: its session, mapped memory, and calls."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Self, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from kvtier import errors
from kvtier.abi import attach as protocol
from kvtier.v1 import session_pb2

_MAX_FDS: Final = len(protocol.SEGMENTS)
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_WRONG: Final = "the daemon's answer is not part of the protocol"


@dataclass(slots=True)
class _Reply:
    message: session_pb2.SessionReply
    fds: list[int]


@dataclass(slots=True, frozen=True)
class SegmentFds:
    """Descriptors by name, to close after mapping, and the daemon's description of them."""

    fds: Mapping[str, int]
    told: session_pb2.MappedCache

    def close(self) -> None:
        _close_all(list(self.fds.values()))


def attach_socket() -> socket.socket:
    """A socket of the daemon's kind, non-blocking and not connected."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    return sock


_MOST_UNDER_WAY: Final = 128 << 10
"""Most bytes of unanswered calls: the socket's buffer is larger, so there is always room for another message."""
_STATUS: Final = {code.value[0]: code for code in grpc.StatusCode}


class AttachConnection:
    """A connection to the attach socket. Requests are answered in order, calls are not. :attr:`closed` is set when
    either side hangs up."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[_Reply]] = deque()
        self._calls: dict[int, asyncio.Future[session_pb2.CallAnswer]] = {}
        self._under_way = 0
        self._numbers = count()
        self.closed = asyncio.Event()
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connects. Raises :class:`DaemonUnavailable` if no daemon listens, :class:`PermissionDenied`."""
        try:
            path = protocol.socket_path(address, protocol.ATTACH_SOCKET)
        except protocol.AddressError as error:
            raise errors.InvalidArgument("address", address, str(error)) from error
        try:
            sock = attach_socket()
        except OSError as error:  # this process has no descriptor left, or the host no memory: both may pass
            raise errors.DaemonUnavailable(f"no socket for {path}: {error.strerror}", reason="NO_SOCKET") from error
        try:
            sock.connect(path)  # connect at once or fail: asyncio would take a full backlog for a pending connection
        except BlockingIOError as error:
            sock.close()
            message = f"too many clients wait for the daemon at {path}"
            raise errors.DaemonUnavailable(message, reason="TOO_MANY_SESSIONS") from error
        except PermissionError as error:
            sock.close()
            message = f"{path}: {error.strerror}: it is for members of the daemon's group, usually kvtier"
            raise errors.PermissionDenied(message, reason="PERMISSION_DENIED") from error
        except OSError as error:
            sock.close()
            message = f"no daemon answers at {path}: {error.strerror}"
            raise errors.DaemonUnavailable(message, reason="NO_DAEMON") from error
        return cls(sock)

    async def hello(self, token: str | None) -> session_pb2.Welcome:
        """Introduces this process; ``token`` resumes its earlier session."""
        hello = session_pb2.Hello(version=protocol.VERSION, token=token or "")
        reply = await self._ask(session_pb2.SessionRequest(hello=hello), "welcome")
        _close_all(reply.fds)
        return reply.message.welcome

    async def map(self, cache_id: int, *, write: bool) -> SegmentFds:
        """The cache's segments. The caller owns the descriptors."""
        request = session_pb2.MapCache(cache_id=cache_id, write=write)
        reply = await self._ask(session_pb2.SessionRequest(map=request), "mapped")
        mapped = reply.message.mapped
        if not _are_segments(mapped, len(reply.fds)):
            _close_all(reply.fds)
            raise errors.DaemonError(f"{_WRONG}: {len(reply.fds)} descriptors came for {mapped}", reason="BAD_ANSWER")
        return SegmentFds(dict(zip(mapped.fds, reply.fds, strict=True)), mapped)

    def forget(self, token: str) -> None:
        """Notes that the memory of this token's session is no longer touched."""
        self._tell(forget=session_pb2.ForgetSession(token=token))

    async def say_bye(self) -> None:
        """Ends the session and gives back all its leases, instead of leaving the session for this process to resume."""
        self._tell(bye=session_pb2.Bye())

    async def call(self, path: str, request: bytes, trace: str = "") -> bytes | None:
        """The reply of a unary method; None if the caller must use gRPC instead. ``trace``: as in the metadata. Raises
        :class:`grpc.aio.AioRpcError` like gRPC, :class:`DaemonUnavailable`."""
        number = next(self._numbers)
        call = session_pb2.UnaryCall(number=number, path=path, request=request, trace=trace)
        packet = session_pb2.SessionRequest(call=call).SerializeToString()
        too_long = len(packet) > min(protocol.MAX_MESSAGE, _MOST_UNDER_WAY - self._under_way)
        if too_long or self.closed.is_set():
            return None
        self._send(packet)
        waiter: asyncio.Future[session_pb2.CallAnswer] = self._loop.create_future()
        self._calls[number] = waiter
        self._under_way += len(packet)
        try:
            answer = await waiter
        except asyncio.CancelledError:
            self._tell(give_up=session_pb2.GiveUp(number=number))
            raise
        finally:
            del self._calls[number]
            self._under_way -= len(packet)
        if answer.too_long:
            return None
        if answer.status:
            status = status_pb2.Status.FromString(answer.body)
            details = grpc.aio.Metadata((errors.DETAILS_KEY, answer.body))
            raise grpc.aio.AioRpcError(_STATUS[answer.status], grpc.aio.Metadata(), details, status.message)
        return answer.body

    def close(self) -> None:
        """Hangs up. Callers that wait for an answer get :class:`DaemonUnavailable`. Closing twice is allowed."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        waiters: list[asyncio.Future[Any]] = [*self._waiting, *self._calls.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(errors.DaemonUnavailable("the daemon hung up", reason="HUNG_UP"))
        self._waiting.clear()

    async def _ask(self, request: session_pb2.SessionRequest, wanted: str) -> _Reply:
        """The reply with the message ``wanted``. Raises the error of a failure."""
        if self.closed.is_set():
            raise errors.DaemonUnavailable("the daemon hung up", reason="HUNG_UP")
        waiter: asyncio.Future[_Reply] = self._loop.create_future()
        # From here on the request must be sent or the connection closed, as answers go by order.
        self._waiting.append(waiter)
        try:
            self._send(request.SerializeToString())
        except errors.DaemonUnavailable:
            waiter.exception()
            raise
        try:
            reply = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                _close_all(waiter.result().fds)
            raise
        came = reply.message.WhichOneof("message")
        if came == wanted:
            return reply
        _close_all(reply.fds)
        if came == "failure":
            failure = reply.message.failure
            raise errors.KINDS.get(failure.reason, errors.CallerError)(failure.message, reason=failure.reason)
        raise errors.DaemonError(f"{_WRONG}: {came} came for {wanted}", reason="BAD_ANSWER")

    def _tell(self, **message: Any) -> None:
        """Sends a message that has no answer. A daemon that has hung up need not know it."""
        if not self.closed.is_set():
            with suppress(OSError):
                self._sock.send(session_pb2.SessionRequest(**message).SerializeToString())

    def _send(self, packet: bytes) -> None:
        try:
            # The packet fits the socket's buffer beside the pending calls, unless the peer has stopped reading.
            self._sock.send(packet)
        except OSError as error:
            self.close()
            raise errors.DaemonUnavailable(f"the daemon hung up: {error.strerror}", reason="HUNG_UP") from error

    def _on_readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                protocol.MAX_MESSAGE + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        fds = _received_fds(ancillary)
        message = session_pb2.SessionReply()
        with suppress(DecodeError):  # then the message is empty, which answers nothing
            message = session_pb2.SessionReply.FromString(data)
        is_answer = message.HasField("answer")
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not (is_answer or self._waiting):
            _close_all(fds)
            self.close()
            return
        if is_answer:
            _close_all(fds)
            call = self._calls.get(message.answer.number)
            if call is not None and not call.done():  # else the caller has given up
                call.set_result(message.answer)
            return
        waiter = self._waiting.popleft()
        if waiter.done():
            # The caller was cancelled; its answer still had to leave the queue.
            _close_all(fds)
        else:
            waiter.set_result(_Reply(message, fds))


class LocalChannel:
    """The channel for stubs: unary calls use the attach socket, streams and long messages gRPC."""

    def __init__(self, channel: grpc.aio.Channel, connection: AttachConnection) -> None:
        self._channel = channel
        self._connection = connection
        self.unary_stream = channel.unary_stream
        self.stream_unary = channel.stream_unary
        self.stream_stream = channel.stream_stream

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Message], bytes],
        response_deserializer: Callable[[bytes], Message],
        **options: Any,
    ) -> Callable[..., Awaitable[Message]]:
        """Like a gRPC channel's, but the result can only be awaited."""
        over_grpc: Any = self._channel.unary_unary(method, request_serializer, response_deserializer, **options)

        async def call(request: Message, metadata: Sequence[tuple[str, str]]) -> Message:
            trace = dict(metadata).get(protocol.TRACE_METADATA_KEY, "")
            reply = await self._connection.call(method, request_serializer(request), trace)
            if reply is None:
                return cast("Message", await over_grpc(request, metadata=metadata))
            return response_deserializer(reply)

        return call


def _are_segments(mapped: session_pb2.MappedCache, count: int) -> bool:
    """Whether the message fits ``count`` descriptors, names each segment at most once, and tells of the others."""
    names = list(mapped.fds)
    if len(names) != count or names[:1] != [protocol.CONTROL] or names != [s for s in protocol.SEGMENTS if s in names]:
        return False
    came = {protocol.DEVICE if name == protocol.CUDA else name for name in names}
    told_of_cuda = mapped.HasField("cuda") == (protocol.CUDA in names)
    return told_of_cuda and len(came) == count and mapped.unmapped.keys() <= set(protocol.DATA_TIERS) - came


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
