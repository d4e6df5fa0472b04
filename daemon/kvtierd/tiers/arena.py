"""Arenas: the shared memory of one cache, as the daemon holds it.

A segment is a sealed memfd, never a named file: nobody can shrink or grow it under the daemon (SIGBUS), its pages exist
before it is used (a sparse one dies of SIGBUS when memory is short), and no other uid can re-open it writable through
/proc.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from typing import Final, Self

import numpy as np

from kvtier.abi import attach
from kvtier.abi.errors import AbiError
from kvtier.abi.layout import ArenaIdentity, ArenaLayout, ArenaState, first_generation, is_ready, write_state
from kvtier.abi.records import INDEX_SEED_BYTES
from kvtier.abi.slot_records import SLOT_RECORD_BYTES, SlotContents, SlotRecord, order_of
from kvtierd.core.ids import GroupId, SessionId, SlotId, Tier
from kvtierd.core.manager import Recovered
from kvtierd.core.outcome import Content
from kvtierd.tiers.base import Bytes, NotAdoptable, TierConfigError
from kvtierd.tiers.index_rebuild import Many
from kvtierd.tiers.key_index import KeyIndex
from kvtierd.tiers.memory import require_memory

SEGMENT_NAMES: Final = {Tier.HOST: attach.HOST, Tier.DEVICE: attach.DEVICE}

# SEAL besides the two that protect the daemon: a client holding a writable descriptor could otherwise add FUTURE_WRITE
# and lock a restarted daemon out of its own memory.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# One call allocates this much at most: a signal makes the kernel undo the call and Python repeat it.
_ALLOCATION_STEP: Final = 256 << 20
_PREFAULT_STEP: Final = 64 << 20


class Memfd:
    """One sealed, allocated, mapped segment.

    The mapping lives as long as any array over it: :meth:`close` cannot pull it from under a thread that copies.
    """

    def __init__(self, fd: int, read_only_fd: int, array: Bytes) -> None:
        self.fd = fd
        self.read_only_fd = read_only_fd
        self.array = array

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """A zeroed segment of ``size`` bytes. ``name`` is what operators see in /proc/<pid>/maps.

        Blocks for about 0.1 s per GiB. Raises :class:`TierConfigError` naming ``name`` where memory is short.
        """
        require_memory(name, size)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for start in range(0, size, _ALLOCATION_STEP):
                os.posix_fallocate(fd, start, min(_ALLOCATION_STEP, size - start))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            # Before any descriptor leaves: with the mode of birth, another uid could re-open a read-only one writable.
            os.fchmod(fd, 0o400)
            array = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
            read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(fd)
            raise TierConfigError(name, size, f"cannot allocate shared memory: {error.strerror}") from error
        return cls(fd, read_only_fd, array)

    @classmethod
    def adopt(cls, name: str, fd: int, size: int) -> Self:
        """A segment that an earlier process of ours made as :meth:`create` does; ``fd`` is the segment's from now on.

        Raises :class:`NotAdoptable`, ``fd`` then stays the caller's.
        """
        status = os.fstat(fd)
        facts = {
            "is a regular file": (stat.S_ISREG(status.st_mode), True),
            "owner": (status.st_uid, os.geteuid()),
            "mode": (oct(stat.S_IMODE(status.st_mode)), oct(0o400)),
            "size": (status.st_size, size),
            "open for writing": (fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR, True),
        }
        for fact, (is_, wanted) in facts.items():
            if is_ != wanted:
                raise NotAdoptable(f"{name}: {fact}: {is_}, not {wanted}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise NotAdoptable(f"{name}: not a memfd: {error.strerror}") from error
        if seals != _SEALS:
            raise NotAdoptable(f"{name}: seals {seals:#x}, not {_SEALS:#x}")
        try:
            array = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
            read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotAdoptable(f"{name}: cannot be mapped: {error.strerror}") from error
        return cls(fd, read_only_fd, array)

    def prefault(self) -> None:
        """Maps every page, so that no copy pays for it later. Call from a thread; the segment may be in use meanwhile.

        Reading one byte a page suffices, also for later writes, and cannot undo one. numpy lets go of the GIL in each
        of the bounded pieces; madvise(MADV_POPULATE_WRITE) and MAP_POPULATE hold it (314 and 351 ms for 512 MiB).
        """
        array = self.array
        for start in range(0, len(array), _PREFAULT_STEP):
            array[start : start + _PREFAULT_STEP : mmap.PAGESIZE].max()

    def close(self) -> None:
        """Closes both descriptors and lets go of the mapping."""
        os.close(self.fd)
        os.close(self.read_only_fd)
        self.array = np.empty(0, dtype=np.uint8)


class Arena:
    """Control and data segments of one cache.

    All but :meth:`create` and :meth:`prefault` is cheap, and for the loop thread: there is one writer of generations.
    """

    def __init__(self, layout: ArenaLayout, control: Memfd, data: dict[Tier, Memfd], epoch: int) -> None:
        """``epoch``: of the events of this life."""
        self.layout = layout
        self.keeps_records = False
        """Whether a restarted daemon may find the segments again, so that it is worth saying what slots hold."""
        self.index = KeyIndex(layout, control.array, epoch) if layout.index_bytes else None
        self._order = 0
        self._control = control
        self._data = data
        slots = [(tier, GroupId(group)) for tier in data for group in range(len(layout.groups))]
        self._generations = {place: layout.generations(control.array, *place) for place in slots}
        self._owners = {place: layout.owners(control.array, *place) for place in slots}
        # The same as words: one is read or written in a tenth of the time that an element of an array takes.
        self._generation_words = {place: words.data for place, words in self._generations.items()}
        self._owner_words = {place: words.data for place, words in self._owners.items()}
        self._records = {place: layout.slot_records(control.array, *place).reshape(-1).data for place in slots}

    @classmethod
    def create(cls, name: str, layout: ArenaLayout, identity: ArenaIdentity) -> Self:
        """Fresh segments for cache ``name``: state OPENING, nothing ready, nobody's. Blocks; call from a thread.

        Raises :class:`TierConfigError` where memory is short; nothing is left behind then.
        """
        sizes = {SEGMENT_NAMES[tier]: layout.data_bytes(tier) for tier in SEGMENT_NAMES}
        require_memory(f"arena of {name}", layout.control_bytes + sum(sizes.values()))
        made: list[Memfd] = []
        try:
            control = Memfd.create(f"kvtier:{name}:{attach.CONTROL}", layout.control_bytes)
            made.append(control)
            data: dict[Tier, Memfd] = {}
            for tier, segment in SEGMENT_NAMES.items():
                if sizes[segment]:
                    data[tier] = Memfd.create(f"kvtier:{name}:{segment}", sizes[segment])
                    made.append(data[tier])
        except TierConfigError:
            for memfd in made:
                memfd.close()
            raise
        layout.initialise(control.array, identity, secrets.token_bytes(INDEX_SEED_BYTES))
        return cls(layout, control, data, identity.epoch)

    @classmethod
    def adopt(cls, name: str, layout: ArenaLayout, identity: ArenaIdentity, fds: Mapping[str, int]) -> Self:
        """The segments that an earlier daemon made for cache ``name``, as that one left them. ``fds``, by segment name,
        are the arena's from now on. ``identity``: what a new one would get.

        Raises :class:`NotAdoptable` where anything about them is not as :meth:`create` makes them; ``fds`` then stay
        the caller's.
        """
        sizes = {SEGMENT_NAMES[tier]: layout.data_bytes(tier) for tier in SEGMENT_NAMES}
        wanted = {attach.CONTROL: layout.control_bytes} | {segment: size for segment, size in sizes.items() if size}
        if set(fds) != set(wanted):
            raise NotAdoptable(f"segments {', '.join(sorted(fds))}, not {', '.join(sorted(wanted))}")
        adopted: dict[str, Memfd] = {}
        try:
            for segment, size in wanted.items():
                adopted[segment] = Memfd.adopt(f"kvtier:{name}:{segment}", fds[segment], size)
            _check_control(adopted[attach.CONTROL].array, layout, identity)
        except NotAdoptable:
            for memfd in adopted.values():
                os.close(memfd.read_only_fd)
            raise
        data = {tier: adopted[segment] for tier, segment in SEGMENT_NAMES.items() if segment in adopted}
        return cls(layout, adopted[attach.CONTROL], data, identity.epoch)

    @property
    def kept_fds(self) -> dict[str, int]:
        """What :meth:`adopt` wants, by segment name: writable descriptors, the arena's own."""
        segments = {SEGMENT_NAMES[tier]: memfd.fd for tier, memfd in self._data.items()}
        return {attach.CONTROL: self._control.fd} | segments

    @property
    def control(self) -> Bytes:
        """The whole control segment, writable."""
        return self._control.array

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Memory tiers that the cache has, the fastest first."""
        return tuple(sorted(self._data))

    def data(self, tier: Tier) -> Bytes:
        """A tier's whole data segment, writable."""
        return self._data[tier].array

    def generation(self, tier: Tier, group: GroupId, slot: SlotId) -> int:
        """Odd unless the slot's bytes are READY."""
        generation: int = self._generation_words[tier, group][slot]
        return generation

    def generations(self, tier: Tier, group: GroupId) -> memoryview:
        """Of all slots of a group in a memory tier, as words: to be read, for :meth:`begin_write` and :meth:`end_write`
        change them."""
        return self._generation_words[tier, group]

    def begin_write(self, tier: Tier, group: GroupId, slot: SlotId) -> bool:
        """Before a slot is granted to a writer or a copy into it is issued. False: one was open already, and nothing
        has changed."""
        generations = self._generation_words[tier, group]
        value: int = generations[slot]
        if not is_ready(value):
            return False
        generations[slot] = value + 1
        return True

    def end_write(self, tier: Tier, group: GroupId, slot: SlotId) -> None:
        """The slot's bytes are READY. Raises AssertionError where they already were: somebody wrote unannounced."""
        generations = self._generation_words[tier, group]
        value: int = generations[slot]
        if is_ready(value):
            raise AssertionError(f"end_write without begin_write: {tier} group {group} slot {slot}, generation {value}")
        generations[slot] = value + 1

    def note(self, content: Content) -> None:
        """What the slot holds from its next generation on, or that it holds nothing to be found again."""
        (group, tier, slot), key, _, _ = content
        if key is None:
            start = slot * SLOT_RECORD_BYTES
            self._records[tier, group][start : start + SLOT_RECORD_BYTES] = bytes(SLOT_RECORD_BYTES)
            return
        self._order += 1
        self._record(content, key, self._generation_words[tier, group][slot] + 1, self._order)

    def restate(self, content: Content) -> None:
        """What a READY slot holds has other traits. Its generation and its place in the order of use stay.

        Raises AssertionError where the slot is not READY, or its block is not said.
        """
        (group, tier, slot), key, _, _ = content
        generation: int = self._generation_words[tier, group][slot]
        if key is None or not is_ready(generation):
            raise AssertionError(f"restated: {tier} group {group} slot {slot}, generation {generation}, is no block's")
        self._record(content, key, generation, order_of(self._records[tier, group], slot))

    def _record(self, content: Content, key: bytes, generation: int, order: int) -> None:
        (group, tier, slot), _, parent, traits = content
        packed = SlotRecord(
            key=key,
            parent=parent,
            priority=traits.priority,
            duration_ms=traits.duration_ms,
            deadline_ns=traits.deadline_ns,
            event_hash=traits.label.event_hash if traits.label is not None else b"",
            generation=generation,
            order=order,
        ).pack()
        start = slot * SLOT_RECORD_BYTES
        self._records[tier, group][start : start + len(packed)] = packed

    def contents(self, tier: Tier, group: GroupId) -> SlotContents:
        """Of an adopted arena: READY slots whose record is whole and of this generation. What is noted from now on
        comes later in order than all of these."""
        rows = self.layout.slot_records(self._control.array, tier, group)
        found = SlotContents.read(rows, self._generations[tier, group])
        self._order = max(self._order, max(found.orders, default=0))
        return found

    def ready_slots(self, tier: Tier, group: GroupId) -> list[SlotId]:
        """Those whose generation is even."""
        return [SlotId(slot) for slot in np.flatnonzero(self._generations[tier, group] % 2 == 0).tolist()]

    def owned(self, tier: Tier, group: GroupId) -> dict[SlotId, SessionId]:
        """Slots that somebody leases, and who; of several readers of a block the last."""
        owners = self._owners[tier, group]
        return {SlotId(slot): SessionId(int(owners[slot])) for slot in np.flatnonzero(owners).tolist()}

    def set_owner(self, tier: Tier, group: GroupId, slot: SlotId, session: SessionId | None) -> None:
        """Who leases the slot to write; None = nobody."""
        self._owner_words[tier, group][slot] = session or 0

    def rebuild_index(self, recovered: Mapping[GroupId, Sequence[Recovered]]) -> None:
        """These are all the blocks there are. Takes about a second for a million; for any one thread."""
        if self.index is not None:
            self.index.rebuild(Many.of(recovered, self._generations))

    def set_state(self, state: ArenaState) -> None:
        write_state(self._control.array, state)

    def fds(self, *, write: bool) -> dict[str, int]:
        """Descriptors by segment name, in the order of the attach protocol. They stay the arena's: dup, never close.

        ``control`` is read-only always, the data segments unless ``write``.
        """
        named = {attach.CONTROL: self._control.read_only_fd}
        for tier, segment in SEGMENT_NAMES.items():
            if tier in self._data:
                memfd = self._data[tier]
                named[segment] = memfd.fd if write else memfd.read_only_fd
        return named

    def prefault(self) -> None:
        """See :meth:`Memfd.prefault`; control first."""
        for memfd in (self._control, *self._data.values()):
            memfd.prefault()

    def close(self, *, for_successor: bool = False) -> None:
        """The daemon's own mappings end with the last array over them. Those who still map it see state CLOSED; if it
        is kept for a successor they can go on reading."""
        if not for_successor:
            self.set_state(ArenaState.CLOSED)
        self.index = None
        self._generation_words.clear()
        self._owner_words.clear()
        self._generations.clear()
        self._owners.clear()
        self._records.clear()
        for memfd in (self._control, *self._data.values()):
            memfd.close()


def _check_control(control: Bytes, layout: ArenaLayout, ours: ArenaIdentity) -> None:
    try:
        found, identity = ArenaLayout.read(control), ArenaIdentity.read(control)
    except AbiError as error:
        raise NotAdoptable(str(error)) from error
    if identity.fingerprint != ours.fingerprint:
        raise NotAdoptable("the fingerprint is another specification's")
    if identity.boot >= ours.boot:
        raise NotAdoptable(f"it was made in boot {identity.boot}, and this is {ours.boot}: another state directory's")
    if found != layout:
        raise NotAdoptable("the layout is not that of the cache's budgets")
    for tier in SEGMENT_NAMES:
        for group in range(len(layout.groups)):
            generations = layout.generations(control, tier, group)
            if len(generations) and not first_generation(identity.boot) <= int(generations.min()):
                raise NotAdoptable(f"a generation of {tier} group {group} is below the segment's first")
