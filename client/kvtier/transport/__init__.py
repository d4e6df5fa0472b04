"""Transports to a daemon: the sockets in a runtime directory, or TCP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import grpc
import grpc.aio

from kvtier.abi import attach as protocol
from kvtier.errors import DaemonUnavailable, InvalidArgument, require_kind
from kvtier.transport.attached import AttachConnection, LocalChannel
from kvtier.transport.channels import open_channel, require_grpc
from kvtier.transport.stream import StreamConnection
from kvtier.v1 import admin_pb2_grpc, blocks_pb2_grpc, caches_pb2_grpc, events_pb2_grpc, session_pb2, transfer_pb2_grpc

TCP_SCHEME: Final = "tcp://"

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(slots=True, frozen=True)
class TlsFiles:
    """PEM files for TLS: this client's certificate chain and key, and the certificates of the daemons' authorities."""

    cert: Path
    key: Path
    ca: Path


Connection = AttachConnection | StreamConnection
"""A session's own connection."""


@dataclass(slots=True, frozen=True)
class Stubs:
    """The daemon's services over one channel."""

    admin: admin_pb2_grpc.AdminAsyncStub
    blocks: blocks_pb2_grpc.BlocksAsyncStub
    caches: caches_pb2_grpc.CachesAsyncStub
    events: events_pb2_grpc.EventsAsyncStub
    transfer: transfer_pb2_grpc.TransferAsyncStub

    @classmethod
    def over(cls, channel: Any) -> Self:
        return cls(
            admin=cast("admin_pb2_grpc.AdminAsyncStub", admin_pb2_grpc.AdminStub(channel)),
            blocks=cast("blocks_pb2_grpc.BlocksAsyncStub", blocks_pb2_grpc.BlocksStub(channel)),
            caches=cast("caches_pb2_grpc.CachesAsyncStub", caches_pb2_grpc.CachesStub(channel)),
            events=cast("events_pb2_grpc.EventsAsyncStub", events_pb2_grpc.EventsStub(channel)),
            transfer=cast("transfer_pb2_grpc.TransferAsyncStub", transfer_pb2_grpc.TransferStub(channel)),
        )


@dataclass(slots=True, frozen=True)
class Link:
    """An attached session and its channel. ``session`` rises when the daemon has forgotten the last session."""

    session: int
    welcome: session_pb2.Welcome
    attach: Connection
    channel: grpc.aio.Channel
    stubs: Stubs

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((protocol.SESSION_METADATA_KEY, self.welcome.token), *_trace())


def _trace() -> tuple[tuple[str, str], ...]:
    """The caller's OpenTelemetry span. A caller with a span has imported the library, so this module need not."""
    current = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current is None or not (span := current().get_span_context()).is_valid:
        return ()
    return ((protocol.TRACE_METADATA_KEY, f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"),)


async def send(
    link: Link, method: Callable[[Stubs], grpc.aio.UnaryUnaryMultiCallable[Request, Response]], request: Request
) -> Response:
    """Makes one RPC with the session's token."""
    return await method(link.stubs)(request, metadata=link.metadata)


class LocalTransport:
    """Transport over the sockets in a runtime directory. ``can_map``: whether the daemon's memory can be mapped."""

    can_map: Final = True

    def __init__(self, address: str) -> None:
        self._address = address

    async def attach(self, token: str | None, channel: grpc.aio.Channel | None) -> Link:
        """Connects and says hello, with the token of an earlier session if given. The session's number is not set yet.

        ``channel``: the earlier session's channel, for reuse. Raises :class:`kvtier.errors.KvtierError`, with the
        reason UNKNOWN_SESSION for a token that the daemon does not know.
        """
        require_grpc()  # before the daemon creates a session
        connection = await AttachConnection.open(self._address)
        try:
            welcome = await connection.hello(token)
            if channel is None or not welcome.resumed:
                path = protocol.socket_path(self._address, protocol.RPC_SOCKET)
                channel = open_channel(f"unix:{path}")
            return Link(0, welcome, connection, channel, Stubs.over(LocalChannel(channel, connection)))
        except BaseException:
            connection.close()
            raise


class TcpTransport:
    """Transport over TCP. A stream is the session's connection."""

    can_map: Final = False

    def __init__(self, target: str, tls: TlsFiles | None) -> None:
        self._target = target
        self._tls = tls
        self._looked = False

    async def attach(self, token: str | None, channel: grpc.aio.Channel | None) -> Link:
        """See :meth:`LocalTransport.attach`. Always opens a new channel: a broken channel may back off for longer than
        the daemon is away."""
        channel = await self._channel()
        try:
            connection, welcome = await StreamConnection.open(channel, token)
            return Link(0, welcome, connection, channel, Stubs.over(channel))
        except BaseException as error:
            await channel.close()
            if isinstance(error, DaemonUnavailable) and self._tls is not None:
                message = f"{error}; a daemon that does not accept {self._tls.cert} hangs up in the same way"
                raise DaemonUnavailable(message, reason=error.reason) from error
            raise

    async def _channel(self) -> grpc.aio.Channel:
        """Reads the files of TLS for each channel, since they are renewed while a client lives."""
        if self._tls is None:
            return open_channel(self._target)
        files = {"tls.ca": self._tls.ca, "tls.key": self._tls.key, "tls.cert": self._tls.cert}
        credentials = grpc.ssl_channel_credentials(*[await _read(field, path) for field, path in files.items()])
        if not self._looked:  # later they may be under way to others, and a link is tried again until it holds
            await asyncio.to_thread(_require_use, self._tls)
            self._looked = True
        return open_channel(self._target, credentials)


Transport = LocalTransport | TcpTransport


def is_tcp(address: str) -> bool:
    """Whether the address is TCP by scheme or form: a runtime directory does not end in a colon and a number."""
    return address.startswith(TCP_SCHEME) or protocol.HOST_PORT.fullmatch(address) is not None


def transport_to(address: str, tls: TlsFiles | None, *, insecure: bool) -> Transport:
    """The transport to an address: TCP for ``host:port``, with or without ``tcp://``, else a runtime directory.

    Raises :class:`InvalidArgument` for TCP without TLS, unless ``insecure`` and to this host, and for an empty address,
    which would mean the working directory.
    """
    if not address:
        raise InvalidArgument("address", address, "a runtime directory or host:port")
    found = protocol.HOST_PORT.fullmatch(address.removeprefix(TCP_SCHEME))
    if found is not None and int(found[3]) > protocol.MAX_PORT:  # gRPC would truncate the port to 16 bits
        raise InvalidArgument("address", address, f"host:port with a port of at most {protocol.MAX_PORT}")
    if found is None:
        if "://" in address:
            raise InvalidArgument("address", address, "tcp://host:port, or tcp://[host]:port for IPv6")
        if tls is not None or insecure:
            raise InvalidArgument("address", address, "host:port for tls or insecure: sockets need neither")
        return LocalTransport(address)
    host, target = found[1] or found[2], found[0]
    if tls is None and not insecure:
        raise InvalidArgument("tls", None, "given for TCP; or insecure=True for a daemon on this host")
    require_kind("tls", tls, TlsFiles, type(None))
    if tls is not None and insecure:
        raise InvalidArgument("insecure", insecure, "False where tls is given")
    if tls is None and not protocol.is_loopback(host):
        raise InvalidArgument("address", address, "a loopback address where there is no TLS")
    return TcpTransport(target, tls)


async def _read(field: str, path: Path) -> bytes:
    try:
        return await asyncio.to_thread(Path(path).read_bytes)
    except TypeError as error:
        raise InvalidArgument(field, path, "a path") from error
    except OSError as error:
        raise InvalidArgument(field, str(path), f"a file that can be read: {error.strerror}") from error


def _require_use(files: TlsFiles) -> None:
    """Raises :class:`InvalidArgument` for readable but unusable files: gRPC would retry with them for the whole wait,
    and name none of them as the cause."""
    if not all(Path(path).is_file() for path in (files.cert, files.key, files.ca)):
        return  # pipes can be read only once: a shell's <(…)
    import ssl  # needed only for TCP

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise InvalidArgument("tls.ca", str(files.ca), f"certificates of authorities, PEM: {error}") from error
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")  # no prompt on the terminal
    except (ssl.SSLError, ValueError) as error:
        limit = f"a certificate, PEM, with its key in {files.key}: {error}"
        raise InvalidArgument("tls.cert", str(files.cert), limit) from error
