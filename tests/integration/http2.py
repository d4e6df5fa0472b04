"""HTTP/2 by hand, for calls that no gRPC client makes: a message that is announced and never sent whole."""

import socket
import struct
from collections.abc import Iterable
from contextlib import closing

from kvtier.abi import attach
from tests.integration.waiting import PATIENCE_S

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4


def connected(address: str) -> closing[socket.socket]:
    """A connection to the daemon's gRPC socket, on which HTTP/2 is agreed."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    try:
        sock.connect(attach.socket_path(address, attach.RPC_SOCKET))
    except OSError:
        sock.close()
        raise
    sock.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    return closing(sock)


def begin(sock: socket.socket, stream: int, method: str, token: str = "", announced: int = 1 << 20) -> None:
    """Begins a call, whose message has so many bytes, and sends ten of them. ``stream``: odd, rising."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost")]
    headers += [("content-type", "application/grpc"), ("te", "trailers")]
    headers += [(attach.SESSION_METADATA_KEY, token)] if token else []
    message = struct.pack(">BI", 0, announced) + bytes(10)
    sock.sendall(_frame(_HEADERS, _END_HEADERS, stream, _packed(headers)) + _frame(_DATA, 0, stream, message))


def ended(sock: socket.socket, streams: Iterable[int]) -> None:
    """Reads until the daemon has ended these streams."""
    left = set(streams)
    with sock.makefile("rb") as reading:
        while left:
            head = reading.read(9)
            assert len(head) == 9, f"the daemon hung up with {sorted(left)} open"
            high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
            reading.read(high << 16 | low)
            if kind == _RESET or (kind == _HEADERS and flags & _END_STREAM):
                left.discard(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _packed(headers: Iterable[tuple[str, str]]) -> bytes:
    """Each literally, not indexed, as RFC 7541 has it."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers
    )
