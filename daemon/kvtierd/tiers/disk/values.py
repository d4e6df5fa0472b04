"""What callers of the disk tier pass in and get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.core.traits import Traits
from kvtierd.tiers.parts import Part


@dataclass(slots=True, frozen=True)
class SlabShape:
    """One group's slab: ``slots`` records of ``record_bytes`` (a multiple of 4096) each.

    ``sliding``: of a sliding window, whose blocks are of use without their ancestors. Elsewhere no block is stored, or
    recovered, whose parent is not.
    """

    record_bytes: int
    slots: int
    sliding: bool = False

    @property
    def nbytes(self) -> int:
        return self.record_bytes * self.slots


class DiskWrite(NamedTuple):
    """One block to store. ``parts``: page-aligned, padded, in pool order, together exactly one record of the group."""

    group: GroupId
    slot: SlotId
    key: Key
    parent: Key | None
    traits: Traits
    parts: Sequence[Part]


Retirement = tuple[GroupId, Key, SlotId]
"""A block to forget, if that is the slot it is in."""

Restatement = tuple[GroupId, Key, Traits]
"""A block whose priority, duration and deadline are others now. Its label stays as it was written."""


@dataclass(slots=True, frozen=True)
class Begun:
    """A batch whose bytes are on their way to the disk, as :meth:`DiskStore.begin` returns it.

    ``moving``: threads that write; their results are indices into ``writes``. ``sync_failures``: how many there had
    been when the batch began.
    """

    writes: Sequence[DiskWrite]
    checksums: Sequence[bytes]
    moving: Sequence[Future[list[int]]]
    sync_failures: int


class DiskRead(NamedTuple):
    """One block to fetch into ``parts`` (writable, else as in :class:`DiskWrite`)."""

    group: GroupId
    slot: SlotId
    key: Key
    parts: Sequence[Part]


@dataclass(slots=True, frozen=True)
class ReadReport:
    """Indices into the reads asked for; those in neither set hold their block's verified bytes, the others garbage.

    ``failed``: the disk did not deliver. ``corrupt``: the slot does not hold this block, or its bytes are not what
    was written.
    """

    failed: frozenset[int]
    corrupt: frozenset[int]


class DiskRecord(NamedTuple):
    """One recovered block. ``last_use`` counts uses in its group, not time: greater is later."""

    slot: SlotId
    key: Key
    parent: Key | None
    traits: Traits
    last_use: int


@dataclass(slots=True, frozen=True)
class Recovery:
    """What a store held when it was opened.

    ``records``: per group, parents before children and, among those free to choose, the least recently used first.
    ``quarantined``: slots whose bytes were found corrupt; they hold no block. ``dropped``: records deleted because
    they could not be trusted or reached.
    """

    records: Mapping[GroupId, Sequence[DiskRecord]]
    quarantined: Mapping[GroupId, frozenset[SlotId]]
    dropped: int
