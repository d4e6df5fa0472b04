"""Arenas: the shared memory of one cache, as the daemon holds it.

A segment is a sealed memfd, never a named file: nobody can shrink or grow it under the daemon (SIGBUS), its pages exist
before it is used (a sparse one dies of SIGBUS when memory is short), and no other uid can re-open it writable through
/proc.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final, Self

import numpy as np

from kvtier.abi import attach
from kvtier.abi.layout import ArenaIdentity, ArenaLayout, ArenaState, is_ready, write_state
from kvtierd.core.ids import GroupId, SessionId, SlotId, Tier
from kvtierd.tiers.base import Bytes, TierConfigError
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

    def __init__(self, layout: ArenaLayout, control: Memfd, data: dict[Tier, Memfd]) -> None:
        self.layout = layout
        self._control = control
        self._data = data
        slots = [(tier, GroupId(group)) for tier in data for group in range(len(layout.groups))]
        self._generations = {place: layout.generations(control.array, *place) for place in slots}
        self._owners = {place: layout.owners(control.array, *place) for place in slots}

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
        layout.initialise(control.array, identity)
        return cls(layout, control, data)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Memory tiers that the cache has, the fastest first."""
        return tuple(sorted(self._data))

    def data(self, tier: Tier) -> Bytes:
        """A tier's whole data segment, writable."""
        return self._data[tier].array

    def generation(self, tier: Tier, group: GroupId, slot: SlotId) -> int:
        """Odd unless the slot's bytes are READY."""
        return int(self._generations[tier, group][slot])

    def begin_write(self, tier: Tier, group: GroupId, slot: SlotId) -> None:
        """Before a slot is granted to a writer or a copy into it is issued. Does nothing while one is already open."""
        generations = self._generations[tier, group]
        value = int(generations[slot])
        if is_ready(value):
            generations[slot] = value + 1

    def end_write(self, tier: Tier, group: GroupId, slot: SlotId) -> None:
        """The slot's bytes are READY. Raises AssertionError where they already were: somebody wrote unannounced."""
        generations = self._generations[tier, group]
        value = int(generations[slot])
        if is_ready(value):
            raise AssertionError(f"end_write without begin_write: {tier} group {group} slot {slot}, generation {value}")
        generations[slot] = value + 1

    def set_owner(self, tier: Tier, group: GroupId, slot: SlotId, session: SessionId | None) -> None:
        """Who leases the slot to write; None = nobody."""
        self._owners[tier, group][slot] = session or 0

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

    def close(self) -> None:
        """State CLOSED for those who still map it; the daemon's own mappings end with the last array over them."""
        self.set_state(ArenaState.CLOSED)
        self._generations.clear()
        self._owners.clear()
        for memfd in (self._control, *self._data.values()):
            memfd.close()
