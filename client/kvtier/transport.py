"""gRPC's channels of this process, and what a fork leaves of them.

One thread of ``grpc.aio`` brings the answers of all channels, and a forked child has none of its parent's threads. As
long as a channel of the parent's is there, gRPC takes that thread for running: a call on a new one would wait for ever,
whatever its timeout. And where the last of them is freed, the child waits for the thread's end, or crashes.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio

from kvtier.abi import attach as protocol
from kvtier.errors import (
    CallerError,
    DaemonError,
    DaemonUnavailable,
    InvalidArgument,
    KvtierError,
    NotFound,
    PermissionDenied,
    RetryableError,
    error_of,
    fault_of,
)
from kvtier.v1 import session_pb2, session_pb2_grpc

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Two clients of one process are two sessions: they must not share a connection, nor each other's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_own: Final[WeakSet[grpc.aio.Channel]] = WeakSet()
_inherited: Final[list[grpc.aio.Channel]] = []


def open_channel(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """The caller closes it. ``credentials``: None = neither TLS nor anything else."""
    require_grpc()
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
    _own.add(channel)
    return channel


def require_grpc() -> None:
    """Raises :class:`CallerError` in a child that was forked while its parent had a channel, open or not yet freed."""
    if _inherited:
        message = "this process was forked from one that had a client, and gRPC does not work in it: start it with exec"
        raise CallerError(f"{message}, as multiprocessing's spawn does, or before there is a client", reason="FORKED")


def _in_child() -> None:
    for channel in _own:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))  # not even the end of the interpreter frees it
        _inherited.append(channel)
    _own.clear()


os.register_at_fork(after_in_child=_in_child)


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
class Segments:
    """Descriptors by name, to be closed when they are mapped, and what the daemon said of them."""

    fds: Mapping[str, int]
    told: protocol.Mapped

    def close(self) -> None:
        _close_all(list(self.fds.values()))


def attach_socket() -> socket.socket:
    """Of the kind of the daemon's, non-blocking and not connected."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    return sock


class AttachConnection:
    """One connection. Requests are answered in order. :attr:`closed` is set when either side hangs up."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[_Answer]] = deque()
        self.closed = asyncio.Event()
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connects. Raises :class:`DaemonUnavailable` where nobody listens, :class:`PermissionDenied`."""
        try:
            path = protocol.socket_path(address, protocol.ATTACH_SOCKET)
        except protocol.AddressError as error:
            raise InvalidArgument("address", address, str(error)) from error
        try:
            sock = attach_socket()
        except OSError as error:  # this process has no descriptor left, or the host no memory: for now
            raise DaemonUnavailable(f"no socket for {path}: {error.strerror}", reason="NO_SOCKET") from error
        try:
            sock.connect(path)  # at once, or never: asyncio would take a full backlog for a connection under way
        except BlockingIOError as error:
            sock.close()
            message = f"too many clients wait for the daemon at {path}"
            raise DaemonUnavailable(message, reason="TOO_MANY_SESSIONS") from error
        except PermissionError as error:
            sock.close()
            raise PermissionDenied(f"{path}: {error.strerror}", reason="PERMISSION_DENIED") from error
        except OSError as error:
            sock.close()
            raise DaemonUnavailable(f"no daemon answers at {path}: {error.strerror}", reason="NO_DAEMON") from error
        return cls(sock)

    async def hello(self, token: str | None) -> protocol.Welcome:
        """Introduces this process; ``token`` resumes an earlier session of it."""
        answer = await self._ask(protocol.Hello(token=token))
        _close_all(answer.fds)
        return _accepted(_decoded(protocol.decode_welcome, answer.data))

    async def map(self, cache_id: int, *, write: bool) -> Segments:
        """The cache's segments, whose descriptors are the caller's then."""
        answer = await self._ask(protocol.Map(cache_id=cache_id, write=write))
        try:
            mapped = _accepted(_decoded(protocol.decode_mapped, answer.data))
            if len(mapped.fds) != len(answer.fds):
                raise DaemonError(f"{len(answer.fds)} descriptors came for {mapped.fds}", reason="BAD_ANSWER")
        except KvtierError:
            _close_all(answer.fds)
            raise
        return Segments(dict(zip(mapped.fds, answer.fds, strict=True)), mapped)

    def forget(self, token: str) -> None:
        """Nothing that the session of this token had is touched any more: see :class:`kvtier.abi.attach.Forget`."""
        if not self.closed.is_set():
            with suppress(OSError):  # the next daemon is told again
                self._sock.send(protocol.encode(protocol.Forget(token)))

    async def say_bye(self) -> None:
        """Ends the session, and gives back all that it holds, instead of leaving it for this process to resume."""
        if not self.closed.is_set():
            with suppress(OSError):  # without a daemon there is no session to end
                self._sock.send(protocol.encode(protocol.Bye()))

    def close(self) -> None:
        """Hangs up. Whoever still waits for an answer gets :class:`DaemonUnavailable`. Closing twice is allowed."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(DaemonUnavailable("the daemon hung up", reason="HUNG_UP"))
        self._waiting.clear()

    async def _ask(self, request: protocol.Request) -> _Answer:
        if self.closed.is_set():
            raise DaemonUnavailable("the daemon hung up", reason="HUNG_UP")
        packet = protocol.encode(request)
        waiter: asyncio.Future[_Answer] = self._loop.create_future()
        self._waiting.append(
            waiter
        )  # from here on the request is sent, or the connection closed: answers have no names
        try:
            # A packet this small either fits the socket's buffer whole or the peer has stopped reading.
            self._sock.send(packet)
        except OSError as error:
            self.close()
            waiter.exception()
            raise DaemonUnavailable(f"the daemon hung up: {error.strerror}", reason="HUNG_UP") from error
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                _close_all(waiter.result().fds)
            raise

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
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not self._waiting:
            _close_all(fds)
            self.close()
            return
        waiter = self._waiting.popleft()
        if waiter.done():
            # Its caller was cancelled; the answer still had to be taken off the queue.
            _close_all(fds)
        else:
            waiter.set_result(_Answer(data, fds))


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


SILENT_BEATS: Final = 3
"""Heartbeats missed before the daemon counts as gone."""

_BYE_S: Final = 2.0

_BROKEN: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""What gRPC raises on a stream that has ended."""


class StreamConnection:
    """Sends heartbeats, and hears the daemon's; see :class:`kvtier.transport.Connection`."""

    def __init__(self, call: Any, heartbeat_s: float) -> None:
        self._call = call
        self._heartbeat_s = heartbeat_s
        self.closed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._listen())]

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, token: str | None) -> tuple[Self, protocol.Welcome]:
        """Says hello and hears the welcome. Raises :class:`kvtier.errors.KvtierError`."""
        stub: Any = session_pb2_grpc.SessionsStub(channel)
        call = stub.Session()
        hello = session_pb2.Hello(version=protocol.VERSION, token=token or "")
        try:
            await call.write(session_pb2.SessionRequest(hello=hello))
            reply = await call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(fault_of(error)) from error
        except BaseException:
            call.cancel()
            raise
        if reply is grpc.aio.EOF or reply.WhichOneof("message") != "welcome":
            call.cancel()
            raise DaemonError("the daemon's answer to a hello is no welcome", reason="BAD_ANSWER")
        said = reply.welcome
        welcome = protocol.Welcome(
            said.token, said.session_id, said.resumed, said.epoch, said.boot, said.pid, said.history
        )
        return cls(call, said.heartbeat_ns / 1e9), welcome

    async def map(self, cache_id: int, *, write: bool) -> Segments:
        raise CallerError(f"cache {cache_id}: memory cannot be mapped over TCP", reason="CANNOT_MAP")

    def forget(self, token: str) -> None:
        """Nothing: over TCP no memory is lent."""

    async def say_bye(self) -> None:
        if self.closed.is_set():
            return
        with suppress(TimeoutError, *_BROKEN):  # without a daemon there is no session to end
            async with asyncio.timeout(_BYE_S):
                await self._call.write(session_pb2.SessionRequest(bye=session_pb2.Bye()))
                await self.closed.wait()

    def close(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        for task in self._tasks:
            task.cancel()
        self._call.cancel()

    async def _beat(self) -> None:
        with suppress(*_BROKEN):
            while True:
                await asyncio.sleep(self._heartbeat_s)
                await self._call.write(session_pb2.SessionRequest(heartbeat=session_pb2.Heartbeat()))

    async def _listen(self) -> None:
        """Until the stream ends, or says nothing for too long."""
        try:
            while True:
                async with asyncio.timeout(SILENT_BEATS * self._heartbeat_s):
                    if await self._call.read() is grpc.aio.EOF:
                        return
        except (TimeoutError, *_BROKEN):
            return
        finally:
            self.close()


TCP_SCHEME: Final = "tcp://"
MAX_PORT: Final = 65535

_HOST_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")


@dataclass(slots=True, frozen=True)
class TlsFiles:
    """PEM files: this client's certificate chain and key, and the authorities that vouch for daemons."""

    cert: Path
    key: Path
    ca: Path


class Connection(Protocol):
    """A session's own connection. ``closed`` is set when either side hangs up."""

    closed: asyncio.Event

    async def map(self, cache_id: int, *, write: bool) -> Segments:
        """A cache's segments, whose descriptors are the caller's then."""
        ...

    def forget(self, token: str) -> None:
        """What an earlier life of the daemon lent to the session of this token is not touched any more."""
        ...

    async def say_bye(self) -> None:
        """Ends the session with all that it holds."""
        ...

    def close(self) -> None:
        """Hangs up. Closing twice is allowed."""
        ...


@dataclass(slots=True, frozen=True)
class Attached:
    """A connection that was welcomed, and the channel that goes with it."""

    connection: Connection
    welcome: protocol.Welcome
    channel: grpc.aio.Channel


class Transport(Protocol):
    """``can_map``: whether the daemon's memory can be mapped."""

    @property
    def can_map(self) -> bool: ...

    async def attach(self, token: str | None, channel: grpc.aio.Channel | None) -> Attached:
        """A connection that says hello, with the token of an earlier session where there is one.

        ``channel``: that session's, which may be used on. Raises :class:`kvtier.errors.KvtierError`; of a token that
        the daemon does not know with the reason UNKNOWN_SESSION.
        """
        ...


class LocalTransport:
    """Over the sockets in a runtime directory."""

    can_map: Final = True

    def __init__(self, address: str) -> None:
        self._address = address

    async def attach(self, token: str | None, channel: grpc.aio.Channel | None) -> Attached:
        require_grpc()  # before the daemon knows of anybody
        connection = await AttachConnection.open(self._address)
        try:
            welcome = await connection.hello(token)
        except BaseException:
            connection.close()
            raise
        if channel is None or not welcome.resumed:
            path = protocol.socket_path(self._address, protocol.RPC_SOCKET)
            channel = open_channel(f"unix:{path}")
        return Attached(connection, welcome, channel)


class TcpTransport:
    """Over TCP, where a stream is the session's connection."""

    can_map: Final = False

    def __init__(self, target: str, tls: TlsFiles | None) -> None:
        self._target = target
        self._tls = tls
        self._looked = False

    async def attach(self, token: str | None, channel: grpc.aio.Channel | None) -> Attached:
        """Always with a channel of its own: one that broke may sleep longer than the daemon is away."""
        channel = self._channel()
        try:
            connection, welcome = await StreamConnection.open(channel, token)
        except BaseException as error:
            await channel.close()
            if isinstance(error, DaemonUnavailable) and self._tls is not None:
                message = f"{error}; a daemon that does not accept {self._tls.cert} hangs up in the same way"
                raise DaemonUnavailable(message, reason=error.reason) from error
            raise
        return Attached(connection, welcome, channel)

    def _channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return open_channel(self._target)
        credentials = grpc.ssl_channel_credentials(
            _read("tls.ca", self._tls.ca), _read("tls.key", self._tls.key), _read("tls.cert", self._tls.cert)
        )
        if not self._looked:  # later they may be under way to others, and a link is tried again until it holds
            _require_use(self._tls)
            self._looked = True
        return open_channel(self._target, credentials)


def is_tcp(address: str) -> bool:
    """Whether it says so, or looks like it: a runtime directory does not end in a colon and a number."""
    return address.startswith(TCP_SCHEME) or _HOST_PORT.fullmatch(address) is not None


def transport_to(address: str, tls: TlsFiles | None, *, insecure: bool) -> Transport:
    """``host:port``, with or without ``tcp://`` before it, is TCP; anything else a runtime directory.

    Raises :class:`InvalidArgument` for TCP without TLS, unless it is to this host and asked for, and for an empty
    address, which would be the working directory.
    """
    if not address:
        raise InvalidArgument("address", address, "a runtime directory or host:port")
    found = _HOST_PORT.fullmatch(address.removeprefix(TCP_SCHEME))
    if found is not None and int(found[3]) > MAX_PORT:  # gRPC would take what 16 bits leave of it
        raise InvalidArgument("address", address, f"host:port with a port of at most {MAX_PORT}")
    if found is None:
        if address.startswith(TCP_SCHEME):
            raise InvalidArgument("address", address, "tcp://host:port, or tcp://[host]:port for IPv6")
        if tls is not None or insecure:
            raise InvalidArgument("address", address, "host:port for tls or insecure: sockets need neither")
        return LocalTransport(address)
    host, target = found[1] or found[2], found[0]
    if tls is None and not insecure:
        raise InvalidArgument("tls", None, "given for TCP; or insecure=True for a daemon on this host")
    if tls is not None and insecure:
        raise InvalidArgument("insecure", insecure, "False where tls is given")
    if tls is None and not _is_loopback(host):
        raise InvalidArgument("address", address, "a loopback address where there is no TLS")
    return TcpTransport(target, tls)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(field: str, path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except TypeError as error:
        raise InvalidArgument(field, path, "a path") from error
    except OSError as error:
        raise InvalidArgument(field, str(path), f"a file that can be read: {error.strerror}") from error


def _require_use(files: TlsFiles) -> None:
    """Raises :class:`InvalidArgument` for files that can be read and are of no use: gRPC would try them for as long as
    the caller waits, and say of none of them that it is at fault."""
    if not all(Path(path).is_file() for path in (files.cert, files.key, files.ca)):
        return  # pipes, which have been read: a shell's <(…)
    import ssl  # for clients of TCP alone

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise InvalidArgument("tls.ca", str(files.ca), f"certificates of authorities, PEM: {error}") from error
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")  # never asked for on a terminal
    except (ssl.SSLError, ValueError) as error:
        limit = f"a certificate, PEM, with its key in {files.key}: {error}"
        raise InvalidArgument("tls.cert", str(files.cert), limit) from error
