"""Memory and sessions that outlive the daemon's process, and their adoption by the next daemon.

The service manager (systemd with ``FileDescriptorStoreMax=``, or ``kvtierd --supervise``) keeps descriptors by name:

==============================  ==================================================================================
``arena/<cache>/<segment>``     the cache's ``control``, ``host`` and ``device``, or ``cuda`` for a device tier on a GPU
``arena/<cache>/about``         a sealed JSON file in memory: the definition of a cache that is not on disk
``sessions``                    the roll: which sessions were ever given a cache's memory
==============================  ==================================================================================

The daemon may die at any moment, and a process may still be copying to or from slots that its session held. The slots
stay out of circulation until the process says that it is done (``forget`` on its new attach connection; the client
library does), or has ended. The roll is a sealed segment of 65,536 records of 64 bytes, little-endian::

     0   16  token
    16  u64  session id
    24  u64  start time of the process (/proc/<pid>/stat, field 22), which detects a reused pid
    32  u32  pid
    36  u32  uid
    40  u32  crc                CRC-32 (zlib) of the 40 bytes before
    44  20   (zero)

A record is written before the memory is given, and struck when the session has ended. So the process of a torn record
has no memory. Without a roll no memory is adopted.

A slot of adopted memory counts if its generation is even, its record is whole and names this generation, and (in a
full-attention group) its block's ancestors count as well. Every other slot's generation turns odd, so that a process
that still reads the slot notices.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.abi import attach
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import DAEMON, GroupId, Key, SessionId, SlotId, Tier
from kvtierd.core.leases import LeftLease
from kvtierd.core.policy import GroupShape
from kvtierd.core.recovery import RecoveredBlock, reachable
from kvtierd.notify import Notifier, PassedFd
from kvtierd.rights import User
from kvtierd.service.budgets import Slots
from kvtierd.service.cache import CacheSettings
from kvtierd.service.peer import PeerProcess, command_of
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import NotAdoptable
from kvtierd.tiers.memfd import Memfd

SESSIONS: Final = "sessions"
_ARENA: Final = "arena"
_ABOUT: Final = "about"
_MAX_ABOUT_BYTES: Final = 1 << 20
_SEALED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
RECORDS: Final = 65536
RECORD_BYTES: Final = 64
_BODY: Final = struct.Struct("<16sQQII")
_CRC: Final = struct.Struct("<I")
_NAME: Final = "kvtier:sessions"

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class About:
    """The definition of a cache. ``cuda``: the GPU and size of its GPU segment, which the descriptor does not tell."""

    spec: CacheSpec
    slots: Slots
    options: CacheSettings
    cuda: attach.CudaHandle | None = None

    def to_json(self) -> bytes:
        slots = {str(tier): counts for tier, counts in self.slots.items()}
        fields = {"spec": self.spec.to_dict(), "slots": slots, "options": self.options.to_stored()}
        return json.dumps(fields | ({} if self.cuda is None else {"cuda": asdict(self.cuda)})).encode()

    @classmethod
    def from_json(cls, text: bytes) -> About:
        """Reads the text of :meth:`to_json`. Raises ValueError, KeyError, TypeError, AttributeError for other text."""
        fields: dict[str, Any] = json.loads(text)
        slots = {Tier[tier.upper()]: tuple(map(int, counts)) for tier, counts in fields["slots"].items()}
        cuda = attach.CudaHandle(str(of["uuid"]), int(of["nbytes"])) if (of := fields.get("cuda")) else None
        return cls(CacheSpec.from_dict(fields["spec"]), slots, CacheSettings.from_stored(fields["options"]), cuda)


@dataclass(slots=True, frozen=True)
class KeptArena:
    """A kept arena. ``fds``: by segment name; the owner of this object closes them. ``cuda``: of the GPU segment, if
    known."""

    fds: dict[str, int]
    cuda: attach.CudaHandle | None

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class Keeper:
    """The descriptors at the service manager. For the loop thread, and one other thread at a time. ``passed``:
    descriptors of the life before, owned by the keeper from now on."""

    def __init__(self, notifier: Notifier, passed: Sequence[PassedFd]) -> None:
        self._notifier: Final = notifier
        self._caches: dict[str, dict[str, int]] = {}
        self._stored: dict[str, tuple[str, ...]] = {}
        self._gpus: dict[str, str] = {}
        """The uuid of the GPU of each cache with GPU memory."""
        self.sessions_fd: int | None = None
        for name, fd in ((one.name, one.fd) for one in passed):
            if not self._accept(name, fd):
                _log.warning("a kept descriptor is nothing we know or stands twice: let go name=%r", name)
                os.close(fd)
                notifier.forget(name)

    def _accept(self, name: str, fd: int) -> bool:
        if name == SESSIONS and self.sessions_fd is None:
            self.sessions_fd = fd
            return True
        kind, _, rest = name.partition("/")
        cache, _, segment = rest.rpartition("/")
        if kind != _ARENA or not cache or segment not in (*attach.SEGMENTS, _ABOUT):
            return False
        return self._caches.setdefault(cache, {}).setdefault(segment, fd) == fd

    @property
    def keeps(self) -> bool:
        """Whether there is a service manager that keeps descriptors."""
        return self._notifier.listens

    def abouts(self) -> dict[str, About]:
        """The readable ``about`` of each cache with a kept arena, by name. Blocks."""
        found = {cache: _about(cache, fds) for cache, fds in self._caches.items()}
        return {cache: about for cache, about in found.items() if about is not None}

    def take(self, cache: str) -> KeptArena | None:
        """The cache's kept arena, which the caller then owns; None if there is none."""
        fds = self._caches.pop(cache, None)
        if fds is None:
            return None
        self._stored[cache] = tuple(fds)
        about = _about(cache, fds) if attach.CUDA in fds else None
        if _ABOUT in fds:
            os.close(fds.pop(_ABOUT))
        cuda = about.cuda if about is not None else None
        if cuda is not None:
            self._gpus[cache] = cuda.uuid
        return KeptArena(fds, cuda)

    def store(self, cache: str, arena: Arena, about: About) -> None:
        """Has the manager keep a new arena, in place of an earlier arena of the cache."""
        if not self.keeps:
            return
        self.forget(cache)
        described = _sealed(f"kvtier:{cache}:{_ABOUT}", about.to_json())
        try:
            fds = arena.kept_fds | {_ABOUT: described}
            for segment, fd in fds.items():
                self._notifier.store(f"{_ARENA}/{cache}/{segment}", fd)
        finally:
            os.close(described)
        self._stored[cache] = tuple(fds)
        if about.cuda is not None:
            self._gpus[cache] = about.cuda.uuid

    def store_sessions(self, fd: int) -> None:
        """Has the manager keep the roll, in place of an earlier roll."""
        self._notifier.forget(SESSIONS)
        self._notifier.store(SESSIONS, fd)

    def forget(self, cache: str, only: str | None = None) -> None:
        """Has the manager let go of the cache's arena. ``only``: of this segment alone."""
        stored = self._stored.pop(cache, ())
        for segment in stored:
            if only in (None, segment):
                self._notifier.forget(f"{_ARENA}/{cache}/{segment}")
        if only is not None:
            self._stored[cache] = tuple(segment for segment in stored if segment != only)

    def forget_gpu(self, uuid: str) -> None:
        """Has the manager let go of all memory of a GPU (its uuid, 32 hex digits): the next daemon allocates anew."""
        for cache in [cache for cache in self._stored if self._gpus.get(cache) == uuid]:
            self.forget(cache, attach.CUDA)

    def kept_on_gpu(self, uuid: str) -> int:
        """Bytes of the GPU (its uuid, 32 hex digits) that only the manager still holds."""
        kept = (about.cuda for cache, about in self.abouts().items() if attach.CUDA in self._caches[cache])
        return sum(cuda.nbytes for cuda in kept if cuda is not None and cuda.uuid == uuid)

    def close(self) -> None:
        """Lets go of the arenas that no cache took, here and at the manager."""
        for cache in list(self._caches):
            _log.warning("a kept arena is let go: it is nobody's any more name=%s", cache)
            if (kept := self.take(cache)) is not None:
                kept.close()
            self.forget(cache)


def _about(cache: str, fds: Mapping[str, int]) -> About | None:
    try:
        return About.from_json(_read_sealed(fds[_ABOUT]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("a kept arena does not say what it is name=%s error=%r", cache, error)
        return None


def _sealed(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o400)
        os.write(fd, content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALED)
    except OSError:
        os.close(fd)
        raise
    return fd


def _read_sealed(fd: int) -> bytes:
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _SEALED or (size := os.fstat(fd).st_size) > _MAX_ABOUT_BYTES:
        raise ValueError("not sealed, or too large")
    return os.pread(fd, size, 0)


@dataclass(slots=True, frozen=True)
class RollEntry:
    """A session in the roll. ``start_time``: of its process, in clock ticks since the boot of the machine."""

    token: str
    session: SessionId
    start_time: int
    pid: int
    uid: int

    def pack(self) -> bytes:
        body = _BODY.pack(bytes.fromhex(self.token), self.session, self.start_time, self.pid, self.uid)
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: memoryview) -> RollEntry | None:
        body = data[: _BODY.size]
        if _CRC.unpack_from(data, _BODY.size)[0] != zlib.crc32(body):
            return None
        token, session, start_time, pid, uid = _BODY.unpack(body)
        return cls(token.hex(), SessionId(session), start_time, pid, uid)

    def peer(self) -> PeerProcess | None:
        """The process, if it still lives."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return None
        peer = PeerProcess(self.pid, User(self.uid, frozenset()), pidfd, command_of(self.pid))
        if start_time_of(self.pid) == self.start_time and not peer.is_gone():
            return peer
        peer.close()
        return None


class Roll:
    """The sessions that a restarted daemon waits for. Loop thread only."""

    def __init__(self, segment: Memfd, places: dict[SessionId, int]) -> None:
        self._segment: Final = segment
        self._rows: Final = segment.array.data
        self._places: Final = places
        self._free: Final = sorted(set(range(RECORDS)).difference(places.values()), reverse=True)

    @classmethod
    def create(cls) -> Roll:
        """Makes an empty roll. Raises TierConfigError if memory is short."""
        return cls(Memfd.create(_NAME, RECORDS * RECORD_BYTES), {})

    @classmethod
    def adopt(cls, fd: int) -> tuple[Roll, list[RollEntry]]:
        """The roll of an earlier life and its entries. Raises NotAdoptable; ``fd`` then stays the caller's."""
        segment = Memfd.adopt(_NAME, fd, RECORDS * RECORD_BYTES)
        rows = segment.array.data
        entries: list[RollEntry] = []
        places: dict[SessionId, int] = {}
        for place in np.flatnonzero(segment.array.reshape(RECORDS, RECORD_BYTES).any(axis=1)).tolist():
            entry = RollEntry.unpack(rows[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
            if entry is not None:
                entries.append(entry)
                places[entry.session] = place
        return cls(segment, places), entries

    @property
    def fd(self) -> int:
        return self._segment.fd

    def enter(self, token: str, session: SessionId, peer: PeerProcess) -> None:
        start_time = start_time_of(peer.pid)
        if start_time is None or not self._free:
            return  # the process is gone, or the roll is full
        place = self._free.pop()
        self._places[session] = place
        self._write(place, RollEntry(token, session, start_time, peer.pid, peer.uid).pack())

    def strike(self, session: SessionId) -> None:
        place = self._places.pop(session, None)
        if place is not None:
            self._write(place, bytes(_BODY.size + _CRC.size))
            self._free.append(place)

    def close(self) -> None:
        self._rows.release()
        self._segment.close()

    def _write(self, place: int, data: bytes) -> None:
        start = place * RECORD_BYTES
        self._rows[start : start + len(data)] = data


def start_time_of(pid: int) -> int | None:
    """Start time of a process, in clock ticks since boot; None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the command, in brackets, may hold any text


def open_roll(keeper: Keeper) -> tuple[Roll | None, list[RollEntry]]:
    """The roll of sessions, kept or new, and the entries of the life before. Blocks. Without a sound roll, the keeper
    lets go of all arenas. Without a service manager, the roll is None. Raises TierConfigError if memory is short."""
    if keeper.sessions_fd is not None:
        try:
            return Roll.adopt(keeper.sessions_fd)
        except NotAdoptable as error:
            _log.warning("the kept roll of sessions is not adopted why=%r", str(error))
            os.close(keeper.sessions_fd)
    keeper.close()
    if not keeper.keeps:
        return None, []
    roll = Roll.create()
    keeper.store_sessions(roll.fd)
    return roll, []


@dataclass(slots=True, frozen=True)
class OldLife:
    """Sessions of the life before. ``live``: their processes live; ``dead``: their processes have ended.

    ``keeper``: a session that holds every block that a live session may read, until all live sessions have ended: the
    owner table names only the last of several readers. An earlier life's keeper is neither live nor dead.
    """

    live: frozenset[SessionId]
    dead: frozenset[SessionId]
    keeper: SessionId


@dataclass(slots=True, frozen=True)
class Adopted:
    """The blocks and leases of adopted memory. ``recovered``: for ``BlockManager.fill``."""

    recovered: dict[GroupId, list[RecoveredBlock]] = field(default_factory=dict)
    left: list[LeftLease] = field(default_factory=list)

    @property
    def in_memory(self) -> int:
        return sum(one.host is not None or one.device is not None for all in self.recovered.values() for one in all)


def adopt(
    arena: Arena, shapes: Sequence[GroupShape], on_disk: Mapping[GroupId, Sequence[RecoveredBlock]], old: OldLife
) -> Adopted:
    """Merges the blocks in memory and on disk, and voids all other slots of the arena.

    A slot in the answer keeps its old owner, or gets the keeper as owner, until its lease is granted again: if this
    daemon dies before, the next daemon still finds the owner.
    """
    adopted = Adopted()
    for shape in shapes:
        group = shape.group
        merged = _merged(_in_memory(arena, group), on_disk.get(group, ()))
        if shape.attention.chained:
            order = reachable([one.key for one in merged], [one.parent for one in merged])
            merged = [merged[place] for place in order]
        adopted.recovered[group] = merged
        for tier in arena.tiers:
            kept = _kept(merged, tier)
            adopted.left.extend(_left(arena, tier, group, kept, old))
            arena.begin_writes(tier, group, set(arena.ready_slots(tier, group)).difference(kept))
    return adopted


def _in_memory(arena: Arena, group: GroupId) -> dict[Key, RecoveredBlock]:
    """Blocks in memory, least recently noted first. If two copies have different parents, the newer copy counts."""
    rows: list[tuple[int, RecoveredBlock]] = []
    for tier in arena.tiers:
        found = arena.contents(tier, group)
        none = repeat(None)
        on_device, on_host = (found.slots, none) if tier is Tier.DEVICE else (none, found.slots)
        blocks = map(RecoveredBlock, none, found.keys, found.parents, found.traits, on_device, on_host)
        rows.extend(zip(found.orders, blocks, strict=True))
    rows.sort(key=itemgetter(0))
    newest: dict[Key, RecoveredBlock] = {}
    for _, one in rows:
        other = newest.pop(one.key, None)
        if other is not None and other.parent == one.parent:  # the same block in two tiers
            device = one.device if one.device is not None else other.device
            one = one._replace(device=device, host=one.host if one.host is not None else other.host)
        newest[one.key] = one
    return newest


def _merged(in_memory: dict[Key, RecoveredBlock], disk: Sequence[RecoveredBlock]) -> list[RecoveredBlock]:
    """All blocks, least recently used first: blocks on disk alone, then blocks in memory."""
    alone = []
    for one in disk:
        copies = in_memory.get(one.key)
        if copies is None:
            alone.append(one)
        elif copies.parent == one.parent:
            # The disk learns of a new retention later than memory, but has the whole label.
            in_memory[one.key] = copies._replace(slot=one.slot, traits=copies.traits._replace(label=one.traits.label))
        else:
            del in_memory[one.key]
            alone.append(one)
    return [*alone, *in_memory.values()]


def _kept(merged: Sequence[RecoveredBlock], tier: Tier) -> dict[SlotId, Key]:
    if tier is Tier.DEVICE:
        return {one.device: one.key for one in merged if one.device is not None}
    return {one.host: one.key for one in merged if one.host is not None}


def _left(arena: Arena, tier: Tier, group: GroupId, kept: Mapping[SlotId, Key], old: OldLife) -> list[LeftLease]:
    """Leases over every slot that a live process may still touch; other slots lose their owner. A blank slot goes to
    its writer, every other slot to the keeper."""
    blank: dict[SessionId, list[SlotId]] = {}
    read: list[Key] = []
    for slot, owner in arena.owned(tier, group).items():
        if not old.live:
            arena.set_owners(tier, group, {slot: None})
        elif slot in kept:
            read.append(kept[slot])
        elif arena.generation(tier, group, slot) % 2 == 0:
            # Several processes may read the slot, and voiding it will make it look like a single writer's.
            arena.set_owners(tier, group, {slot: old.keeper})
            blank.setdefault(old.keeper, []).append(slot)
        elif owner in old.dead or owner == DAEMON:
            arena.set_owners(tier, group, {slot: None})
        else:
            blank.setdefault(owner if owner in old.live else old.keeper, []).append(slot)
    leases = [LeftLease(session, group, tier, blank=tuple(slots)) for session, slots in blank.items()]
    return [*leases, LeftLease(old.keeper, group, tier, keys=tuple(read))] if read else leases


NOBODY: Final = OldLife(frozenset(), frozenset(), SessionId(0))
