"""What callers of the disk tier pass in and get back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
    """A batch whose bytes have been handed to the disk. ``written`` waits until it has them, and gives the indices
    of writes of which it has not. ``sync_failures``: how many there had been when it began."""

    writes: Sequence[DiskWrite]
    checksums: Sequence[bytes]
    written: Callable[[], frozenset[int]]
    sync_failures: int


def together(begun: Sequence[Begun]) -> Begun:
    """As if all of these, which began in this order, had begun as one."""
    if len(begun) == 1:
        return begun[0]
    return Begun(
        [write for one in begun for write in one.writes],
        [checksum for one in begun for checksum in one.checksums],
        _AllWritten(begun),
        min(one.sync_failures for one in begun),
    )


@dataclass(slots=True, frozen=True)
class _AllWritten:
    """A class and no function in :func:`together`: in machine code that would be in a cycle with what it refers to."""

    begun: Sequence[Begun]

    def __call__(self) -> frozenset[int]:
        unwritten: set[int] = set()
        with ExitStack() as under_way:  # what raises in one of them: the others have been waited for, too
            base = 0
            for one in self.begun:
                under_way.callback(_wait, one, base, unwritten)
                base += len(one.writes)
        return frozenset(unwritten)


def _wait(one: Begun, base: int, unwritten: set[int]) -> None:
    unwritten.update(base + number for number in one.written())


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
