"""Sessions of an earlier life whose processes still live.

Their leases were lost with the daemon, but a process may still be copying to or from slots that they held. So those
slots stay out of circulation until the process says that it has done with them (``forget`` on its new attach
connection; the client library does), or has ended.

Who they are, i.e. which sessions were ever given a cache's memory, stands in the roll: a sealed segment that the
service manager keeps, because the daemon may die at any moment. It has 65,536 records of 64 bytes, little-endian::

     0   16  token
    16  u64  session id
    24  u64  start time of the process (/proc/<pid>/stat, field 22), which tells it from a later one of its pid
    32  u32  pid
    36  u32  uid
    40  u32  crc                CRC-32 (zlib) of the 40 bytes before
    44  20   (zero)

A record is written before the memory is given, and struck when the session has ended: one that was torn meanwhile is of
nobody who could touch anything. Without a roll nobody knows whom to wait for, and no memory is adopted.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtierd.core.ids import SessionId
from kvtierd.rights import User
from kvtierd.service.keeping import Keeper
from kvtierd.service.peer import Peer, command_of
from kvtierd.tiers.base import NotAdoptable
from kvtierd.tiers.memfd import Memfd

RECORDS: Final = 65536
RECORD_BYTES: Final = 64
_BODY: Final = struct.Struct("<16sQQII")
_CRC: Final = struct.Struct("<I")
_NAME: Final = "kvtier:sessions"

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Entry:
    """``start_time`` in clock ticks since the machine's start."""

    token: str
    session: SessionId
    start_time: int
    pid: int
    uid: int

    def pack(self) -> bytes:
        body = _BODY.pack(bytes.fromhex(self.token), self.session, self.start_time, self.pid, self.uid)
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: memoryview) -> Entry | None:
        body = data[: _BODY.size]
        if _CRC.unpack_from(data, _BODY.size)[0] != zlib.crc32(body):
            return None
        token, session, start_time, pid, uid = _BODY.unpack(body)
        return cls(token.hex(), SessionId(session), start_time, pid, uid)

    def peer(self) -> Peer | None:
        """The process, if it is still the one that the entry names."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return None
        peer = Peer(self.pid, User(self.uid, frozenset()), pidfd, command_of(self.pid))
        if start_time_of(self.pid) == self.start_time and not peer.is_gone():
            return peer
        peer.close()
        return None


class Roll:
    """Who has a session, for a restarted daemon. Loop thread only."""

    def __init__(self, segment: Memfd, entries: dict[SessionId, int]) -> None:
        self._segment: Final = segment
        self._rows: Final = segment.array.data
        self._place_of: Final = entries
        used = set(entries.values())
        self._free: Final = [place for place in range(RECORDS - 1, -1, -1) if place not in used]

    @classmethod
    def create(cls) -> Roll:
        """Raises TierConfigError where memory is short."""
        return cls(Memfd.create(_NAME, RECORDS * RECORD_BYTES), {})

    @classmethod
    def adopt(cls, fd: int) -> tuple[Roll, list[Entry]]:
        """That of an earlier life and who stands in it. Raises NotAdoptable; ``fd`` then stays the caller's."""
        segment = Memfd.adopt(_NAME, fd, RECORDS * RECORD_BYTES)
        found = dict(_entries(segment))
        return cls(segment, {entry.session: place for place, entry in found.items()}), list(found.values())

    @property
    def fd(self) -> int:
        return self._segment.fd

    def enter(self, token: str, session: SessionId, peer: Peer) -> None:
        start_time = start_time_of(peer.pid)
        if start_time is None or not self._free:
            return  # gone already, or more than there can be
        place = self._free.pop()
        self._place_of[session] = place
        self._write(place, Entry(token, session, start_time, peer.pid, peer.uid).pack())

    def strike(self, session: SessionId) -> None:
        place = self._place_of.pop(session, None)
        if place is not None:
            self._write(place, bytes(_BODY.size + _CRC.size))
            self._free.append(place)

    def close(self) -> None:
        self._rows.release()
        self._segment.close()

    def _write(self, place: int, data: bytes) -> None:
        start = place * RECORD_BYTES
        self._rows[start : start + len(data)] = data


def _entries(segment: Memfd) -> Iterator[tuple[int, Entry]]:
    rows = segment.array.data
    used = segment.array.reshape(RECORDS, RECORD_BYTES).any(axis=1)
    for place in np.flatnonzero(used).tolist():
        entry = Entry.unpack(rows[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
        if entry is not None:
            yield place, entry


def start_time_of(pid: int) -> int | None:
    """None for a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the command, in brackets, may hold anything


def _adopted_roll(keeper: Keeper) -> tuple[Roll, list[Entry]] | None:
    if keeper.sessions_fd is None:
        return None
    try:
        return Roll.adopt(keeper.sessions_fd)
    except NotAdoptable as error:
        _log.warning("the kept roll of sessions is not adopted why=%r", str(error))
        os.close(keeper.sessions_fd)
        return None


@dataclass(slots=True, frozen=True)
class Kept:
    """What a daemon has from its earlier lives, and for its later ones. ``roll``: None where nobody keeps anything."""

    keeper: Keeper
    roll: Roll | None
    entries: tuple[Entry, ...]

    @classmethod
    def open(cls, keeper: Keeper) -> Kept:
        """Blocks. Where there is no sound roll, all that the keeper has is let go.

        Raises TierConfigError where memory is short.
        """
        adopted = _adopted_roll(keeper)
        if adopted is not None:
            roll, entries = adopted
            return cls(keeper, roll, tuple(entries))
        keeper.close()
        if not keeper.keeps:
            return cls(keeper, None, ())
        roll = Roll.create()
        keeper.store_sessions(roll.fd)
        return cls(keeper, roll, ())

    def close(self) -> None:
        if self.roll is not None:
            self.roll.close()
