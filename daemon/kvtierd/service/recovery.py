"""What outlives this process: descriptors that its service manager keeps, by name.

==============================  ==================================================================================
``arena/<cache>/<segment>``     the cache's ``control``, ``host`` and ``device``, or ``cuda`` for a device tier on a GPU
``arena/<cache>/about``         a sealed JSON file in memory: what the cache is, for one that no disk remembers
``sessions``                    see ``service/remnants.py``
==============================  ==================================================================================

The manager is systemd (``FileDescriptorStoreMax=``) or ``kvtierd --supervise``. Without one nothing is kept.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvtier.abi import attach
from kvtier.abi.slot_records import SlotContents
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import GroupId, Key, Label, SessionId, SlotId, Tier, Traits
from kvtierd.core.leases import LeftLease
from kvtierd.core.policy import GroupShape
from kvtierd.core.recovery import Recovered, reachable
from kvtierd.notify import Notifier, PassedFd
from kvtierd.rights import User
from kvtierd.service.budgets import Slots
from kvtierd.service.cache import CacheOptions
from kvtierd.service.peer import Peer, command_of
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import NotAdoptable
from kvtierd.tiers.memfd import Memfd

SESSIONS: Final = "sessions"
_ARENA: Final = "arena"
_ABOUT: Final = "about"
_MAX_ABOUT_BYTES: Final = 1 << 20
_SEALED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class About:
    """What a cache is. ``cuda``: what its segment of that name is, which cannot be told from the descriptor."""

    spec: CacheSpec
    slots: Slots
    options: CacheOptions
    cuda: attach.CudaMemory | None = None

    def to_json(self) -> bytes:
        slots = {str(tier): counts for tier, counts in self.slots.items()}
        fields = {"spec": self.spec.to_dict(), "slots": slots, "options": self.options.to_stored()}
        return json.dumps(fields | ({} if self.cuda is None else {"cuda": asdict(self.cuda)})).encode()

    @classmethod
    def from_json(cls, text: bytes) -> About:
        """Raises ValueError, KeyError, TypeError or AttributeError for what :meth:`to_json` did not write."""
        fields: dict[str, Any] = json.loads(text)
        slots = {Tier[tier.upper()]: tuple(map(int, counts)) for tier, counts in fields["slots"].items()}
        cuda = attach.CudaMemory(str(of["uuid"]), int(of["nbytes"])) if (of := fields.get("cuda")) else None
        return cls(CacheSpec.from_dict(fields["spec"]), slots, CacheOptions.from_stored(fields["options"]), cuda)


@dataclass(slots=True, frozen=True)
class KeptArena:
    """``fds``: by segment name, the holder's to close. ``cuda``: of the one of that name, if that is known."""

    fds: dict[str, int]
    cuda: attach.CudaMemory | None

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class Keeper:
    """Loop thread, and one thread at a time besides. ``passed``: what was kept for us; the keeper's from now on."""

    def __init__(self, notifier: Notifier, passed: Sequence[PassedFd]) -> None:
        self._notifier: Final = notifier
        self._caches: dict[str, dict[str, int]] = {}
        self._stored: dict[str, tuple[str, ...]] = {}
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
        """Whether anybody keeps anything for us."""
        return self._notifier.listens

    @property
    def has_memory(self) -> bool:
        """Whether a cache's memory was kept that nobody has taken yet."""
        return bool(self._caches)

    def abouts(self) -> dict[str, About]:
        """The caches whose arenas were kept and that say what they are."""
        found = {}
        for cache, fds in self._caches.items():
            about = _about(cache, fds)
            if about is not None:
                found[cache] = about
        return found

    def take(self, cache: str) -> KeptArena | None:
        """A kept arena: the caller's from now on. None: there is none."""
        fds = self._caches.pop(cache, None)
        if fds is None:
            return None
        self._stored[cache] = tuple(fds)
        about = _about(cache, fds) if attach.CUDA in fds else None
        if _ABOUT in fds:
            os.close(fds.pop(_ABOUT))
        return KeptArena(fds, about.cuda if about is not None else None)

    def store(self, cache: str, arena: Arena, about: About) -> None:
        """Has a new arena kept, instead of any that was kept under the name."""
        if not self.keeps:
            return
        self.forget(cache)
        described = _sealed(f"kvtier:{cache}:{_ABOUT}", about.to_json())
        try:
            fds = arena.kept_fds | {_ABOUT: described}
            for segment, fd in fds.items():
                self._notifier.store(_name(cache, segment), [fd])
        finally:
            os.close(described)
        self._stored[cache] = tuple(fds)

    def store_sessions(self, fd: int) -> None:
        """Instead of any that was kept."""
        self._notifier.forget(SESSIONS)
        self._notifier.store(SESSIONS, [fd])

    def forget(self, cache: str, only: str | None = None) -> None:
        """The cache's arena, if it is kept, or ``only`` one segment of it, is kept no longer than its own
        descriptors."""
        stored = self._stored.pop(cache, ())
        gone = [segment for segment in stored if only in (None, segment)]
        for segment in gone:
            self._notifier.forget(_name(cache, segment))
        if rest := tuple(segment for segment in stored if segment not in gone):
            self._stored[cache] = rest

    def forget_gpu(self) -> None:
        """No GPU memory is kept any longer: a successor makes it anew."""
        for cache in list(self._stored):
            self.forget(cache, attach.CUDA)

    def kept_on_gpu(self, uuid: str) -> int:
        """Bytes of that GPU (its uuid, 32 hex digits) that nobody has but those who kept them for us."""
        kept = (about.cuda for cache, about in self.abouts().items() if attach.CUDA in self._caches[cache])
        return sum(cuda.nbytes for cuda in kept if cuda is not None and cuda.uuid == uuid)

    def close(self) -> None:
        """Lets go of what nobody took, here and at the manager."""
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


def _name(cache: str, segment: str) -> str:
    return f"{_ARENA}/{cache}/{segment}"


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
class OldLife:
    """``live``: sessions of it whose processes live; ``dead``: those whose processes are known to have ended.
    ``keeper``: under whose name is held what any of them may read: the owner table names only the last of several
    readers, so all of it is, until none of them is left. An earlier life's keeper is neither live nor dead."""

    live: frozenset[SessionId]
    dead: frozenset[SessionId]
    keeper: SessionId


class KeptMemory(Protocol):
    """What is asked of an arena; see :class:`kvtierd.tiers.arena.Arena`."""

    @property
    def tiers(self) -> tuple[Tier, ...]: ...

    def contents(self, tier: Tier, group: GroupId) -> SlotContents: ...

    def ready_slots(self, tier: Tier, group: GroupId) -> list[SlotId]: ...

    def generation(self, tier: Tier, group: GroupId, slot: SlotId) -> int: ...

    def owned(self, tier: Tier, group: GroupId) -> dict[SlotId, SessionId]: ...

    def set_owners(self, tier: Tier, group: GroupId, owners: Mapping[SlotId, SessionId | None]) -> None: ...

    def begin_writes(self, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> object: ...


@dataclass(slots=True, frozen=True)
class Adopted:
    """``recovered``: as ``BlockManager.open`` wants it."""

    recovered: dict[GroupId, list[Recovered]] = field(default_factory=dict)
    left: list[LeftLease] = field(default_factory=list)

    @property
    def in_memory(self) -> int:
        return sum(one.host is not None or one.device is not None for all in self.recovered.values() for one in all)


def adopt(
    arena: KeptMemory, shapes: Sequence[GroupShape], on_disk: Mapping[GroupId, Sequence[Recovered]], old: OldLife
) -> Adopted:
    """Changes the arena so that what is not in the answer is void, and nobody's. What is keeps its old owner, or gets
    the keeper, until the lease is granted again: a daemon that dies before that must not have forgotten it."""
    adopted = Adopted()
    for shape in shapes:
        group = shape.group
        merged = _merged(_in_memory(arena, group), on_disk.get(group, ()))
        if not shape.sliding:
            order = reachable([one.key for one in merged], [one.parent for one in merged])
            merged = [merged[place] for place in order]
        adopted.recovered[group] = merged
        for tier in arena.tiers:
            kept = _kept(merged, tier)
            adopted.left.extend(_left(arena, tier, group, kept, old))
            _void_the_rest(arena, tier, group, kept)
    return adopted


def _in_memory(arena: KeptMemory, group: GroupId) -> dict[Key, Recovered]:
    """What memory holds, least recently noted first. Of two copies that do not agree on the parent the newer counts."""
    rows: list[tuple[int, Recovered]] = []
    for tier in arena.tiers:
        found = arena.contents(tier, group)
        keys, parents = map(Key, found.keys), (None if parent is None else Key(parent) for parent in found.parents)
        slots, none = map(SlotId, found.slots), repeat(None)
        on_device, on_host = (slots, none) if tier is Tier.DEVICE else (none, slots)
        blocks = map(Recovered, none, keys, parents, _traits(found), on_device, on_host)
        rows.extend(zip(found.orders, blocks, strict=True))
    rows.sort(key=itemgetter(0))
    newest: dict[Key, Recovered] = {}
    for _, one in rows:
        other = newest.pop(one.key, None)
        newest[one.key] = one if other is None or other.parent != one.parent else _both(one, other)
    return newest


def _both(one: Recovered, other: Recovered) -> Recovered:
    """The same block in two tiers."""
    device = one.device if one.device is not None else other.device
    return one._replace(device=device, host=one.host if one.host is not None else other.host)


def _traits(found: SlotContents) -> Iterator[Traits]:
    labels = (Label(event_hash) if event_hash else None for event_hash in found.event_hashes)
    return map(Traits, found.priorities, found.durations_ms, found.deadlines_ns, labels)


def _merged(in_memory: dict[Key, Recovered], disk: Sequence[Recovered]) -> list[Recovered]:
    """Least recently used first: what stands on disk alone was used before what stands in memory."""
    alone = []
    for one in disk:
        copies = in_memory.get(one.key)
        if copies is None:
            alone.append(one)
        elif copies.parent == one.parent:
            # The disk learns of a new retention later than memory, and has all of the label.
            in_memory[one.key] = copies._replace(slot=one.slot, traits=copies.traits._replace(label=one.traits.label))
        else:
            del in_memory[one.key]
            alone.append(one)
    return [*alone, *in_memory.values()]


def _kept(merged: Sequence[Recovered], tier: Tier) -> dict[SlotId, Key]:
    if tier is Tier.DEVICE:
        return {one.device: one.key for one in merged if one.device is not None}
    return {one.host: one.key for one in merged if one.host is not None}


def _left(arena: KeptMemory, tier: Tier, group: GroupId, kept: Mapping[SlotId, Key], old: OldLife) -> list[LeftLease]:
    """Leases over everything that a live process may still touch: blank slots are their one writer's, the rest the
    keeper's. Of the other slots nobody is the owner any more."""
    blank: dict[SessionId, list[SlotId]] = {}
    read: list[Key] = []
    for slot, owner in arena.owned(tier, group).items():
        if not old.live:
            arena.set_owners(tier, group, {slot: None})
        elif slot in kept:
            read.append(kept[slot])
        elif arena.generation(tier, group, slot) % 2 == 0:
            # Several may read it, and its generation is about to be that of one writer's slot.
            arena.set_owners(tier, group, {slot: old.keeper})
            blank.setdefault(old.keeper, []).append(slot)
        elif owner in old.dead:
            arena.set_owners(tier, group, {slot: None})
        else:
            blank.setdefault(owner if owner in old.live else old.keeper, []).append(slot)
    leases = [LeftLease(session, group, tier, blank=tuple(slots)) for session, slots in blank.items()]
    return [*leases, LeftLease(old.keeper, group, tier, keys=tuple(read))] if read else leases


def _void_the_rest(arena: KeptMemory, tier: Tier, group: GroupId, kept: Collection[SlotId]) -> None:
    arena.begin_writes(tier, group, set(arena.ready_slots(tier, group)).difference(kept))


NOBODY: Final = OldLife(frozenset(), frozenset(), SessionId(0))


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
