"""What a cache's verbs answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvtier.types import BlockResult, Cursor, Tier


@dataclass(slots=True, frozen=True)
class Match:
    """A stored prefix: ``blocks`` long, one residency byte a block."""

    blocks: int
    residency: bytes
    as_of: Cursor


@dataclass(slots=True, frozen=True)
class Location:
    """Where one key's bytes are. Slot and generation are None where the residency does not name the tier."""

    residency: int
    device_slot: int | None
    device_generation: int | None
    host_slot: int | None
    host_generation: int | None


@dataclass(slots=True, frozen=True, eq=False)
class Locations(Sequence[Location]):
    """Where many keys' bytes are: a list of :class:`Location`, kept as one array a field.

    Where ``residency`` does not name a tier, its slots and generations mean nothing here, and are None in a
    :class:`Location`. Equal to any sequence of the same locations.
    """

    residency: NDArray[np.uint8]
    device_slots: NDArray[np.uint32]
    device_generations: NDArray[np.uint64]
    host_slots: NDArray[np.uint32]
    host_generations: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.residency)

    @overload
    def __getitem__(self, index: int) -> Location: ...
    @overload
    def __getitem__(self, index: slice) -> Locations: ...
    def __getitem__(self, index: int | slice) -> Location | Locations:
        if isinstance(index, slice):
            return Locations(*(getattr(self, column.name)[index] for column in fields(self)))
        residency = int(self.residency[index])
        on_device, on_host = residency & Tier.DEVICE.bit, residency & Tier.HOST.bit
        return Location(
            residency,
            int(self.device_slots[index]) if on_device else None,
            int(self.device_generations[index]) if on_device else None,
            int(self.host_slots[index]) if on_host else None,
            int(self.host_generations[index]) if on_host else None,
        )

    def __iter__(self) -> Iterator[Location]:
        return map(
            Location,
            self.residency.tolist(),
            _where(self.residency, Tier.DEVICE, self.device_slots),
            _where(self.residency, Tier.DEVICE, self.device_generations),
            _where(self.residency, Tier.HOST, self.host_slots),
            _where(self.residency, Tier.HOST, self.host_generations),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return f"Locations({list(self)!r})"


def _where(residency: NDArray[np.uint8], tier: Tier, values: NDArray[Any]) -> list[int | None]:
    there = (residency & tier.bit) != 0
    return [value if known else None for value, known in zip(values.tolist(), there.tolist(), strict=True)]


@dataclass(slots=True, frozen=True)
class GroupSpan:
    """Blocks ``[first_block, first_block + len(residency))`` of a chain in one window group, a residency byte each."""

    group: int
    first_block: int
    residency: bytes


@dataclass(slots=True, frozen=True)
class AcrossMatch:
    """A prefix of ``blocks`` blocks that every window group can serve, and what each has of it, by index."""

    blocks: int
    groups: tuple[GroupSpan, ...]
    as_of: Cursor


@dataclass(slots=True, frozen=True)
class ReadCounts:
    """How a cache object's lookups and gets went since it was opened, all window groups together.

    ``lookups``: verbs answered from shared memory. ``hits``: blocks copied without a call; ``misses``: blocks that a
    get asked for and found absent without one. ``reuses``: blocks copied in vain, since their slot was given away
    meanwhile. ``calls``: verbs that asked the daemon.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    reuses: int = 0
    calls: int = 0


@dataclass(slots=True, frozen=True)
class ListedBlock:
    """An indexed block. ``parent`` None = it is a root."""

    key: bytes
    parent: bytes | None
    residency: int
    priority: int
    pinned: int = 0
    """The tiers where it is pinned, as a bit set."""


@dataclass(slots=True, frozen=True)
class Page:
    """Part of a listing, which is consistent if every page has the same ``as_of``."""

    blocks: tuple[ListedBlock, ...]
    as_of: Cursor


@dataclass(slots=True, frozen=True)
class DropReport:
    """One result a key asked for; ``dropped`` counts the subtrees."""

    results: list[BlockResult]
    dropped: int


@dataclass(slots=True, frozen=True)
class ResetReport:
    """``kept``: blocks that are leased or pinned, and those that these stand on."""

    dropped: int
    kept: int
