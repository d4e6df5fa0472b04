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
from typing import Any, Final, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from kvtier.abi import attach as protocol
from kvtier.abi import calls
from kvtier.errors import (
    DETAILS_KEY,
    CallerError,
    DaemonError,
    DaemonUnavailable,
    InvalidArgument,
    KvtierError,
    NotFound,
    PermissionDenied,
    RetryableError,
)

_MAX_FDS: Final = len(protocol.SEGMENTS)
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_REFUSALS: Final[Mapping[str, type[KvtierError]]] = {
    "PERMISSION_DENIED": PermissionDenied,
    "TOO_MANY_SESSIONS": RetryableError,
    "TOO_MANY_OF_IDENTITY": RetryableError,
    "TOO_MANY_DESCRIPTORS": RetryableError,
    "UNKNOWN_CACHE": NotFound,
    "INTERNAL": DaemonError,
}

T = TypeVar("T")


@dataclass(slots=True)
class _Answer:
    data: bytes
    fds: list[int]


@dataclass(slots=True, frozen=True)
class SegmentFds:
    """Descriptors by name, to close after mapping, and the daemon's description of them."""

    fds: Mapping[str, int]
    told: protocol.MapReply

    def close(self) -> None:
        _close_all(list(self.fds.values()))


def attach_socket() -> socket.socket:
    """A socket of the daemon's kind, non-blocking and not connected."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    return sock


_MOST_UNDER_WAY: Final = 128 << 10
"""Most bytes of unanswered calls: the socket's buffer is larger, so there is always room for another message."""
_MAX_U32: Final = 2**32 - 1
_STATUS: Final = {code.value[0]: code for code in grpc.StatusCode}


class AttachConnection:
    """A connection to the attach socket. Requests are answered in order, calls are not. :attr:`closed` is set when
    either side hangs up."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[_Answer]] = deque()
        self._calls: dict[int, asyncio.Future[calls.AnswerPacket]] = {}
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
            raise InvalidArgument("address", address, str(error)) from error
        try:
            sock = attach_socket()
        except OSError as error:  # this process has no descriptor left, or the host no memory: both may pass
            raise DaemonUnavailable(f"no socket for {path}: {error.strerror}", reason="NO_SOCKET") from error
        try:
            sock.connect(path)  # connect at once or fail: asyncio would take a full backlog for a pending connection
        except BlockingIOError as error:
            sock.close()
            message = f"too many clients wait for the daemon at {path}"
            raise DaemonUnavailable(message, reason="TOO_MANY_SESSIONS") from error
        except PermissionError as error:
            sock.close()
            message = f"{path}: {error.strerror}: it is for members of the daemon's group, usually kvtier"
            raise PermissionDenied(message, reason="PERMISSION_DENIED") from error
        except OSError as error:
            sock.close()
            raise DaemonUnavailable(f"no daemon answers at {path}: {error.strerror}", reason="NO_DAEMON") from error
        return cls(sock)

    async def hello(self, token: str | None) -> protocol.Welcome:
        """Introduces this process; ``token`` resumes its earlier session."""
        answer = await self._ask(protocol.Hello(token=token))
        _close_all(answer.fds)
        return _accepted(_decoded(protocol.decode_welcome, answer.data))

    async def map(self, cache_id: int, *, write: bool) -> SegmentFds:
        """The cache's segments. The caller owns the descriptors."""
        answer = await self._ask(protocol.Map(cache_id=cache_id, write=write))
        try:
            mapped = _accepted(_decoded(protocol.decode_mapped, answer.data))
            if len(mapped.fds) != len(answer.fds):
                raise DaemonError(f"{len(answer.fds)} descriptors came for {mapped.fds}", reason="BAD_ANSWER")
        except KvtierError:
            _close_all(answer.fds)
            raise
        return SegmentFds(dict(zip(mapped.fds, answer.fds, strict=True)), mapped)

    def forget(self, token: str) -> None:
        """Notes that the memory of this token's session is no longer touched: see :class:`kvtier.abi.attach.Forget`."""
        if not self.closed.is_set():
            with suppress(OSError):  # the session tells the next daemon again
                self._sock.send(protocol.encode(protocol.Forget(token)))

    async def say_bye(self) -> None:
        """Ends the session and gives back all its leases, instead of leaving the session for this process to resume."""
        if not self.closed.is_set():
            with suppress(OSError):  # without a daemon there is no session to end
                self._sock.send(protocol.encode(protocol.Bye()))

    async def call(self, path: bytes, request: bytes, trace: str = "") -> bytes | None:
        """The reply of a unary method; None if the caller must use gRPC instead. ``trace``: as in the metadata.

        Raises :class:`grpc.aio.AioRpcError` like gRPC, :class:`DaemonUnavailable`.
        """
        number = next(self._numbers) & _MAX_U32
        packet = calls.encode_call(number, path, request, trace.encode())
        if packet is None or self.closed.is_set() or self._under_way + len(packet) > _MOST_UNDER_WAY:
            return None
        self._send(packet)
        waiter: asyncio.Future[calls.AnswerPacket] = self._loop.create_future()
        self._calls[number] = waiter
        self._under_way += len(packet)
        try:
            answer = await waiter
        except asyncio.CancelledError:
            with suppress(OSError):  # the daemon has hung up, or its answer finds no waiter
                self._sock.send(calls.encode_give_up(number))
            raise
        finally:
            del self._calls[number]
            self._under_way -= len(packet)
        if answer.status == calls.TOO_LONG:
            return None
        if answer.status:
            status = status_pb2.Status.FromString(answer.body)
            details = grpc.aio.Metadata((DETAILS_KEY, answer.body))
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
                waiter.set_exception(DaemonUnavailable("the daemon hung up", reason="HUNG_UP"))
        self._waiting.clear()

    async def _ask(self, request: protocol.Request) -> _Answer:
        if self.closed.is_set():
            raise DaemonUnavailable("the daemon hung up", reason="HUNG_UP")
        packet = protocol.encode(request)
        waiter: asyncio.Future[_Answer] = self._loop.create_future()
        # From here on the request must be sent or the connection closed, as answers go by order.
        self._waiting.append(waiter)
        try:
            self._send(packet)
        except DaemonUnavailable:
            waiter.exception()
            raise
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                _close_all(waiter.result().fds)
            raise

    def _send(self, packet: bytes) -> None:
        try:
            # The packet fits the socket's buffer beside the pending calls, unless the peer has stopped reading.
            self._sock.send(packet)
        except OSError as error:
            self.close()
            raise DaemonUnavailable(f"the daemon hung up: {error.strerror}", reason="HUNG_UP") from error

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
        if data and calls.is_call(data) and not flags & socket.MSG_TRUNC:
            _close_all(fds)
            self._answered(data)
            return
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not self._waiting:
            _close_all(fds)
            self.close()
            return
        waiter = self._waiting.popleft()
        if waiter.done():
            # The caller was cancelled; its answer still had to leave the queue.
            _close_all(fds)
        else:
            waiter.set_result(_Answer(data, fds))

    def _answered(self, packet: bytes) -> None:
        try:
            answer = calls.decode_answer(packet)
        except protocol.AttachProtocolError:
            self.close()
            return
        waiter = self._calls.get(answer.number)
        if waiter is not None and not waiter.done():  # else the caller has given up
            waiter.set_result(answer)


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
        path = method.encode()
        over_grpc: Any = self._channel.unary_unary(method, request_serializer, response_deserializer, **options)

        async def call(request: Message, metadata: Sequence[tuple[str, str]]) -> Message:
            trace = dict(metadata).get(protocol.TRACE_METADATA_KEY, "")
            reply = await self._connection.call(path, request_serializer(request), trace)
            if reply is None:
                return cast("Message", await over_grpc(request, metadata=metadata))
            return response_deserializer(reply)

        return call


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except protocol.AttachProtocolError as error:
        raise DaemonError(f"the daemon's answer is not part of the protocol: {error}", reason="BAD_ANSWER") from error


def _accepted(reply: T | protocol.Failure) -> T:
    if isinstance(reply, protocol.Failure):
        raise _REFUSALS.get(reply.reason, CallerError)(reply.message, reason=reply.reason)
    return reply


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
