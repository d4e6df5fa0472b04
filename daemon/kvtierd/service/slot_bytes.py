"""Bytes of slots for clients that map none: in place where the daemon has them mapped, else copied by the GPU."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from kvtierd.core.ids import DEVICE, GroupId, LeaseId, SessionId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.runtime import CacheRuntime, GpuCopies, Stretch
from kvtierd.tiers.base import Bytes, MemoryStore


class SlotBytes(Protocol):
    """Of one group's slots in one memory tier. Loop thread only.

    Raises :class:`~kvtierd.tiers.base.TierIOError` where the memory fails.
    """

    async def read(self, stretches: Sequence[Stretch]) -> list[list[Bytes]]:
        """The bytes of each stretch, in one array or several; they stay as they are until the next ``await``."""
        ...

    async def write(self, stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
        """Fills the stretches, one after another. The answer is what was written to each, likewise. Raises
        :class:`~kvtierd.mover.work.Unaccounted` besides: then the slots may be given to nobody any more."""
        ...


def slot_bytes(
    engine: Engine, runtime: CacheRuntime, tier: Tier, group: GroupId, session: SessionId, lease: LeaseId
) -> SlotBytes:
    """Of slots that are ``lease``'s. Who gives that up does so by :meth:`Engine.afterwards`."""
    if tier is DEVICE and runtime.cuda is not None:
        return _OnGpu(partial(engine.while_held, runtime.id, session, lease), runtime.cuda, group)
    return _Mapped(runtime.memory(tier), group)


class _Mapped:
    """Without an ``await``: what holds when it is called holds until it returns."""

    def __init__(self, memory: MemoryStore, group: GroupId) -> None:
        self._memory = memory
        self._group = group

    async def read(self, stretches: Sequence[Stretch]) -> list[list[Bytes]]:
        return [list(self._parts(stretch)) for stretch in stretches]

    async def write(self, stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
        written = await self.read(stretches)
        start = 0
        for parts in written:
            for part in parts:
                np.copyto(part, data[start : start + len(part)])
                start += len(part)
        return written

    def _parts(self, stretch: Stretch) -> Iterator[Bytes]:
        end = 0
        for part in self._memory.parts(self._group, stretch.slot):
            begin, end = end, end + len(part)
            if stretch.start < end and stretch.stop > begin:
                yield part[max(stretch.start - begin, 0) : stretch.stop - begin]


class _OnGpu:
    """In a thread. The slots stay held until the copy has ended, whatever becomes of those who hold them."""

    def __init__(
        self, in_thread: Callable[[Callable[[], Bytes]], Awaitable[Bytes]], copies: GpuCopies, group: GroupId
    ) -> None:
        self._in_thread = in_thread
        self._copies = copies
        self._group = group

    async def read(self, stretches: Sequence[Stretch]) -> list[list[Bytes]]:
        fetch = partial(self._copies.fetch, self._group, stretches)
        return _apart(stretches, await self._in_thread(fetch))

    async def write(self, stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
        return _apart(stretches, await self._in_thread(partial(self._copies.put, self._group, stretches, data)))


def _apart(stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
    ends = np.cumsum([stretch.nbytes for stretch in stretches])
    return [[part] for part in np.split(data, ends[:-1])]
