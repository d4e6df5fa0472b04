"""Unary calls over the attach socket: the same messages as over gRPC, in less time.

Besides JSON messages the socket carries calls, any number at a time, one packet each, little-endian::

    -> 1, number (u32), length of the method's path (u8), path, request     a call of the session
    -> 2, number (u32)                                                      the caller has given up
    -> 3, number (u32), length of the path (u8), path, traceparent, request as 1, with 55 bytes of W3C Trace Context
    <- 1, number (u32), status (u8), reply                                  status 0
    <- 1, number (u32), status (u8), google.rpc.Status                      gRPC's number of the status
    <- 1, number (u32), 255                                                 the reply is too long for a packet

A call that is too long for a packet goes over gRPC. A call whose reply was too long is repeated over gRPC: its sequence
number prevents a second execution.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvtier.abi.attach import MAX_MESSAGE, AttachProtocolError

_CALL: Final = 1
_GIVE_UP: Final = 2
_TRACED_CALL: Final = 3
_TRACE_BYTES: Final = 55
TOO_LONG: Final = 255
_HEAD: Final = struct.Struct("<BIB")
_SHORT_HEAD: Final = struct.Struct("<BI")


@dataclass(slots=True, frozen=True)
class CallPacket:
    """``path``: of the method, like ``/kvtier.v1.Blocks/Match``. ``trace``: traceparent of the client, or empty."""

    number: int
    path: bytes
    request: bytes
    trace: bytes = b""


@dataclass(slots=True, frozen=True)
class GiveUpPacket:
    number: int


@dataclass(slots=True, frozen=True)
class AnswerPacket:
    """``body``: a reply if ``status`` is 0, else a google.rpc.Status."""

    number: int
    status: int
    body: bytes


def is_call(packet: bytes) -> bool:
    """Returns whether a packet is of a call, not a JSON message."""
    return packet[0] in (_CALL, _GIVE_UP, _TRACED_CALL)


def encode_call(number: int, path: bytes, request: bytes, trace: bytes = b"") -> bytes | None:
    """Returns the packet of a call, or None if it would be too long."""
    packet = _HEAD.pack(_TRACED_CALL if trace else _CALL, number, len(path)) + path + trace + request
    return packet if len(packet) <= MAX_MESSAGE else None


def encode_give_up(number: int) -> bytes:
    return _SHORT_HEAD.pack(_GIVE_UP, number)


def encode_answer(number: int, status: int, body: bytes) -> bytes:
    """Returns the packet of an answer, with status TOO_LONG instead of a body that does not fit."""
    packet = _HEAD.pack(_CALL, number, status) + body
    return packet if len(packet) <= MAX_MESSAGE else _HEAD.pack(_CALL, number, TOO_LONG)


def decode_request(packet: bytes) -> CallPacket | GiveUpPacket:
    """Decodes a client's packet, for the daemon. Raises :class:`AttachProtocolError`, reason BAD_MESSAGE."""
    try:
        if packet[0] == _GIVE_UP:
            return GiveUpPacket(_SHORT_HEAD.unpack(packet)[1])
        kind, number, length = _HEAD.unpack_from(packet)
    except struct.error as error:
        raise AttachProtocolError("BAD_MESSAGE", f"a call of {len(packet)} bytes: {error}") from None
    end = _HEAD.size + length
    start = end + _TRACE_BYTES if kind == _TRACED_CALL else end
    return CallPacket(number, packet[_HEAD.size : end], packet[start:], packet[end:start])


def decode_answer(packet: bytes) -> AnswerPacket:
    """Decodes the daemon's packet, for the client. Raises :class:`AttachProtocolError`, reason BAD_MESSAGE."""
    try:
        _, number, status = _HEAD.unpack_from(packet)
    except struct.error as error:
        raise AttachProtocolError("BAD_MESSAGE", f"an answer of {len(packet)} bytes: {error}") from None
    return AnswerPacket(number, status, packet[_HEAD.size :])
