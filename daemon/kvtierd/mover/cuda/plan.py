"""What a batch's copies are in as few pieces as the hardware takes: pure arithmetic on addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvtierd.core.ids import GroupId, SlotId
from kvtierd.mover.work import Run, runs

EVERYWHERE: Final = 1 << 62
"""``Place.together`` where all slots lie in one allocation."""


class Place(NamedTuple):
    """A pool's part of the slots of one group: of slot s it begins ``s * stride`` bytes after ``start``.

    ``together``: so many slots from slot 0 on lie in one page-locked range, the next as many in the next one. No copy
    may span two ranges: to the driver they are strangers, even where one ends at the other's first byte.
    """

    start: int
    stride: int
    together: int = EVERYWHERE


class Path(NamedTuple):
    """Where ``nbytes`` of every slot of a group come from and go to."""

    source: Place
    target: Place
    nbytes: int


Paths = Mapping[GroupId, Sequence[Path]]
"""One a pool."""


class Rows(NamedTuple):
    """``rows`` times ``nbytes``, ``src_stride`` apart at the source and ``dst_stride`` at the destination."""

    dst: int
    src: int
    nbytes: int
    rows: int = 1
    dst_stride: int = 0
    src_stride: int = 0

    def singles(self) -> Iterator[tuple[int, int, int]]:
        """(destination, source, bytes) of each row."""
        for row in range(self.rows):
            yield self.dst + row * self.dst_stride, self.src + row * self.src_stride, self.nbytes


def plan(copies: Iterable[tuple[GroupId, SlotId, SlotId]], paths: Paths, max_pitch: int) -> list[Rows]:
    """The pieces of (group, source, destination) copies, whose destinations differ.

    Adjacent slots are one piece where their bytes are contiguous on both sides, else rows of one. A stride over
    ``max_pitch`` is more than the hardware takes as rows: then every slot is a piece.
    """
    return [
        piece
        for run in runs(copies)
        for path in paths[run.group]
        for part in _within_ranges(run, path)
        for piece in _pieces(part, path, max_pitch)
    ]


def _within_ranges(run: Run, path: Path) -> Iterator[Run]:
    source, target = path.source.together, path.target.together
    src, dst, left = run.src, run.dst, run.count
    while left:
        count = min(left, source - src % source, target - dst % target)
        yield Run(run.group, src, dst, count)
        src, dst, left = SlotId(src + count), SlotId(dst + count), left - count


def _pieces(run: Run, path: Path, max_pitch: int) -> Iterator[Rows]:
    source, target, nbytes = path
    src, dst = source.start + run.src * source.stride, target.start + run.dst * target.stride
    if run.count == 1 or source.stride == target.stride == nbytes:
        yield Rows(dst, src, nbytes * run.count)
        return
    rows = Rows(dst, src, nbytes, run.count, target.stride, source.stride)
    if max(source.stride, target.stride) <= max_pitch:
        yield rows
    else:
        yield from (Rows(*single) for single in rows.singles())
