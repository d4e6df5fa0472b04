"""Mapped memory of one tier, whatever can address it: how slots are shown, filled and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from kvtier import transfer
from kvtier.abi.layout import ArenaLayout
from kvtier.buffers import Bytes, Rows
from kvtier.fences import PASSED, Fence
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.gpu import Gpu

View: TypeAlias = "Bytes | Any"
"""Bytes in place: a numpy array, or a :class:`kvtier.abi.cuda.views.DeviceView` of memory that only a GPU addresses."""


class Memory(Protocol):
    """The slots of one tier, by window group."""

    @property
    def gpu(self) -> Gpu | None:
        """Whose memory it is; None: the CPU's. Rows may lie on that GPU, too."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a copy waits for a device, so that no copy, however small, belongs on an event loop."""
        ...

    def pools(self, group: int) -> tuple[View, ...]:
        """All slots, one view a pool: [slots, bytes of a block in that pool]."""
        ...

    def view(self, group: int, slot: int, *, write: bool) -> Sequence[View]:
        """A slot's bytes in place, one 1-D view a pool."""
        ...

    def write(self, group: int, slots: Sequence[int], blocks: Rows) -> None:
        """Copies blocks into slots; when it returns, or raises, nothing is being copied any more."""
        ...

    def read(self, group: int, slots: transfer.Slots, blocks: Rows) -> None:
        """Copies slots into blocks, likewise. Raises :class:`IndexError` for a slot that there is not."""
        ...

    def fence(self, stream: int | None) -> Fence:
        """The point that a stream has reached: see :func:`kvtier.fences.fence_of`."""
        ...


class CpuMemory:
    """Shared memory, as numpy arrays. It is unmapped when the last array over it is gone."""

    gpu: Final = None
    waits: Final = False

    def __init__(self, layout: ArenaLayout, tier: Tier, data: Bytes) -> None:
        """``data``: the tier's whole segment."""
        self._pools = [
            tuple(layout.pool_view(data, tier, group, pool) for pool in range(len(place.pools)))
            for group, place in enumerate(layout.groups)
        ]

    def pools(self, group: int) -> tuple[Bytes, ...]:
        return self._pools[group]

    def view(self, group: int, slot: int, *, write: bool) -> list[Bytes]:
        views = [pool[slot] for pool in self._pools[group]]
        if not write:
            for view in views:
                view.flags.writeable = False
        return views

    def write(self, group: int, slots: Sequence[int], blocks: Rows) -> None:
        transfer.into_slots(self._pools[group], slots, cast("Sequence[Bytes] | Bytes", blocks))

    def read(self, group: int, slots: transfer.Slots, blocks: Rows) -> None:
        transfer.out_of_slots(self._pools[group], slots, cast("Sequence[Bytes] | Bytes", blocks))

    def fence(self, stream: int | None) -> Fence:
        return PASSED
