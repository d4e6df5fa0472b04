"""The arena of a cache, mapped: slots as numpy arrays or as views of a GPU's memory, generations beside them.

Layout and rules: :mod:`kvtier.abi.layout`. A mapping stays readable after its daemon has gone, so an old view never
faults; whether its bytes still are the block's is what generations, leases and :attr:`Arena.stale` are for.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi import attach
from kvtier.abi.control import HEADER_BYTES, STATE_OFFSET, ArenaState
from kvtier.abi.errors import AbiError
from kvtier.abi.key_index import IndexReader
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtier.buffers import Bytes, Row, Rows
from kvtier.errors import CallerError, DaemonError
from kvtier.memory import CpuMemory, Memory, View
from kvtier.transfer import Slots
from kvtier.types import MAPPED_TIERS, Tier

_SEGMENTS: Final[Mapping[Tier, str]] = {Tier.DEVICE: attach.DEVICE, Tier.HOST: attach.HOST}
_STATE_WORD: Final = STATE_OFFSET // 4
_SERVING: Final = int(ArenaState.SERVING)
"""A global by itself: every read asks twice, and a member of an enumeration takes ten times as long."""


class Arena:
    """The segments of one cache. There is no ``close``: memory is unmapped when the last array over it is gone."""

    def __init__(
        self,
        fds: Mapping[str, int],
        *,
        write: bool,
        spec: CacheSpec,
        device: Callable[[ArenaLayout], Memory] | None = None,
        unmapped: Mapping[Tier, str] = MappingProxyType({}),
    ) -> None:
        """Maps the descriptors, which stay the caller's. ``write`` as it was asked for over the attach socket.

        ``device``: makes the device tier's memory of what the descriptor ``cuda`` was mapped to. ``unmapped``: why a
        tier is not mapped that the cache has.

        Raises :class:`DaemonError` where the segments are not the arena of a cache with this specification.
        """
        self._control = _mapped(fds[attach.CONTROL], write=False)
        try:
            self.layout = ArenaLayout.read(self._control, spec)
        except AbiError as error:
            raise DaemonError(f"the daemon's arena cannot be trusted: {error}", reason="BAD_ARENA") from error
        self.writable = write
        self.stale = False
        """True once the cache is open in another session, or cannot be opened there. Set by the client."""
        self.index = IndexReader(self.layout, self._control) if self.layout.index_bytes else None
        """Where its blocks are; None where the daemon keeps no index."""
        self._states = self._control[:HEADER_BYTES].data.cast("I")
        self._memories: dict[Tier, Memory] = {
            tier: CpuMemory(self.layout, tier, _mapped(fds[name], write=write, at_least=self.layout.data_bytes(tier)))
            for tier, name in _SEGMENTS.items()
            if name in fds
        }
        if device is not None:
            self._memories[Tier.DEVICE] = device(self.layout)
        self.unmapped: Final[Mapping[Tier, str]] = MappingProxyType(dict(unmapped))
        """By tier, why its slots are not mapped, though the cache has it."""
        self._generations = {
            (tier, group): self.layout.generations(self._control, tier, group)
            for tier in MAPPED_TIERS
            for group in range(len(self.layout.groups))
        }

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers with mapped slots, the fastest first."""
        return tuple(sorted(self._memories))

    @property
    def current(self) -> bool:
        """Whether its index and slots may be read without a call: it is not stale, and its daemon did not close it."""
        return not self.stale and self._states[_STATE_WORD] == _SERVING

    @property
    def lookup_bytes(self) -> int:
        """What lookups and reads touch, whatever they are of: the index and the generations."""
        return self.layout.index_bytes + sum(of_slots.nbytes for of_slots in self._generations.values())

    def touch(self) -> None:
        """Maps every page of that, where the first to look would fault in one after another. In any thread: numpy lets
        go of the interpreter's lock over it."""
        start, nbytes = self.layout.index_offset, self.layout.index_bytes
        self._control[start : start + nbytes : mmap.PAGESIZE].max(initial=0)
        for of_slots in self._generations.values():
            of_slots[:: mmap.PAGESIZE // of_slots.itemsize].max(initial=0)

    def slots(self, tier: Tier, group: int) -> int:
        return self.layout.groups[group].slots[tier]

    @property
    def memories(self) -> Collection[Memory]:
        """Of the tiers that are mapped."""
        return self._memories.values()

    def memory(self, tier: Tier) -> Memory:
        """Raises :class:`CallerError` (CANNOT_MAP) where the tier's slots are not mapped, with the reason."""
        memory = self._memories.get(tier)
        if memory is None:
            why = self.unmapped.get(tier, f"the cache has no {tier} tier")
            raise CallerError(f"slots of the {tier} tier are not mapped in this process: {why}", reason="CANNOT_MAP")
        return memory

    def pools(self, tier: Tier, group: int) -> tuple[View, ...]:
        """All slots, one view a pool: [slots, bytes of a block in that pool]; see :meth:`kvtier.lease.Lease.view`."""
        return self.memory(tier).pools(group)

    def view(self, tier: Tier, group: int, slot: int, *, write: bool) -> list[View]:
        """A slot's bytes, one view a pool, not copied."""
        return [*self.memory(tier).view(group, slot, write=write)]

    def write(self, tier: Tier, group: int, slots: Sequence[int], blocks: Sequence[Row]) -> None:
        """Copies blocks into slots, and blocks until that is over."""
        self.memory(tier).write(group, slots, blocks)

    def read(self, tier: Tier, group: int, slots: Slots, blocks: Rows) -> None:
        """Copies slots into blocks, likewise. Raises :class:`IndexError` for a slot that there is not."""
        self.memory(tier).read(group, slots, blocks)

    def generations(self, tier: Tier, group: int, slots: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        """The slots' generations now: a copy."""
        now: NDArray[np.uint64] = self._generations[tier, group][slots]
        return now


def _mapped(fd: int, *, write: bool, at_least: int = HEADER_BYTES) -> Bytes:
    size = os.fstat(fd).st_size
    if size < at_least:
        raise DaemonError(f"a segment of {size} bytes: the layout says {at_least}", reason="BAD_ARENA")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection), dtype=np.uint8)
