"""Copies as a few pieces: every byte where a slot-by-slot copy puts it, nothing else touched, no range overstepped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.ids import GroupId, SlotId
from kvtierd.mover.cuda.plan import EVERYWHERE, Path, Paths, Place, Rows, plan

SLOTS = 12
MAX_PITCH = 1 << 20
Copies = list[tuple[GroupId, SlotId, SlotId]]


def copies(*pairs: tuple[int, int], group: int = 0) -> Copies:
    return [(GroupId(group), SlotId(src), SlotId(dst)) for src, dst in pairs]


def one(source: Place, target: Place, nbytes: int) -> Paths:
    return {GroupId(0): [Path(source, target, nbytes)]}


def test_adjacent_slots_without_gaps_are_one_piece() -> None:
    paths = one(Place(1000, 10), Place(5000, 10), 10)
    assert plan(copies((4, 7), (3, 6), (5, 8)), paths, MAX_PITCH) == [Rows(5060, 1030, 30)]


def test_adjacent_slots_with_a_gap_on_one_side_are_rows_of_one_piece() -> None:
    paths = one(Place(1000, 16), Place(5000, 10), 10)
    assert plan(copies((3, 6), (4, 7)), paths, MAX_PITCH) == [Rows(5060, 1048, 10, 2, 10, 16)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Paths, int]:
    """Pools of two groups, apart from each other, and how much memory they take on either side."""
    paths: dict[GroupId, Sequence[Path]] = {}
    end = 0
    for group in range(2):
        pools = []
        for _ in range(draw(st.integers(1, 2))):
            nbytes = draw(st.integers(1, 5))
            strides = [nbytes + draw(st.integers(0, 2)) for _ in range(2)]
            together = [draw(st.sampled_from([1, 3, 5, EVERYWHERE])) for _ in range(2)]
            source, target = (Place(end, stride, limit) for stride, limit in zip(strides, together, strict=True))
            pools.append(Path(source, target, nbytes))
            end += SLOTS * max(strides)
        paths[GroupId(group)] = pools
    return paths, end


PAIRS = st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)).filter(
    lambda pairs: len(set(pairs.values())) == len(pairs)
)


def pool_of(paths: Paths, piece: Rows) -> Path:
    return max(
        (path for pools in paths.values() for path in pools if path.source.start <= piece.src),
        key=lambda path: path.source.start,
    )


def crosses(place: Place, address: int, nbytes: int) -> bool:
    """Whether bytes from ``address`` on lie in more than one range of whole slots."""
    width = place.stride * place.together
    return (address - place.start) // width != (address + nbytes - 1 - place.start) // width


@given(layouts(), PAIRS, PAIRS, st.integers(1, 8))
def test_pieces_do_what_copying_slot_by_slot_does(
    layout: tuple[Paths, int], first: dict[int, int], second: dict[int, int], max_pitch: int
) -> None:
    paths, size = layout
    wanted = copies(*first.items()) + copies(*second.items(), group=1)
    memory = np.arange(1, size + 1, dtype=np.uint32)
    expected = np.zeros(size, np.uint32)
    for group, src, dst in wanted:
        for source, target, nbytes in paths[group]:
            begin, end = source.start + src * source.stride, target.start + dst * target.stride
            expected[end : end + nbytes] = memory[begin : begin + nbytes]

    pieces = plan(wanted, paths, max_pitch)

    found = np.zeros(size, np.uint32)
    for piece in pieces:
        assert piece.rows == 1 or max(piece.src_stride, piece.dst_stride) <= max_pitch
        for into, start, nbytes in piece.singles():
            assert not found[into : into + nbytes].any()
            found[into : into + nbytes] = memory[start : start + nbytes]
        path = pool_of(paths, piece)
        assert not crosses(path.source, piece.src, start + nbytes - piece.src)
        assert not crosses(path.target, piece.dst, into + nbytes - piece.dst)
    assert np.array_equal(found, expected)
    assert sum(piece.nbytes * piece.rows for piece in pieces) == np.count_nonzero(expected)
