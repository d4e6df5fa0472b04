"""A batch's copies: every byte where a slot-by-slot copy puts it, nothing else touched, no range overstepped."""

from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.ids import GroupId, SlotId
from kvtierd.mover.cuda.plan import Pairs, Path, joined, plan

SLOTS = 12
GROUP = GroupId(0)


def pairs(*slots: tuple[int, int], group: GroupId = GROUP) -> Pairs:
    return {group: ([SlotId(src) for src, _ in slots], [SlotId(dst) for _, dst in slots])}


def path(target: tuple[int, int], source: tuple[int, int], nbytes: int) -> Path:
    """Of one pool. Sides are (address of slot 0, bytes from slot to slot)."""
    return Path(np.array([target, source])[:, :, None, None], np.array([[nbytes]]))


def planned(copies: Pairs, of: Path) -> list[list[int]]:
    """(destination, source, bytes) of each copy, in one range."""
    found = plan(copies, {GROUP: of})
    return joined(found, np.zeros_like(found[0]))[0].T.tolist()


def test_adjacent_slots_without_gaps_are_one_copy() -> None:
    assert planned(pairs((4, 7), (3, 6), (5, 8)), path((5000, 10), (1000, 10), 10)) == [[5060, 1030, 30]]


def test_a_gap_on_one_side_keeps_slots_apart() -> None:
    found = planned(pairs((4, 7), (3, 6)), path((5000, 10), (1000, 16), 10))
    assert found == [[5060, 1048, 10], [5070, 1064, 10]]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mapping[GroupId, Path], int]:
    """Pools of two groups, apart from each other, and how much memory they take on either side."""
    paths: dict[GroupId, Path] = {}
    end = 0
    for group in range(2):
        pools = []
        for _ in range(draw(st.integers(1, 2))):
            nbytes = draw(st.integers(1, 5))
            strides = [nbytes + draw(st.integers(0, 2)) for _ in range(2)]
            pools.append(([[end, stride] for stride in strides], nbytes))
            end += SLOTS * max(strides)
        sides = np.array([sides for sides, _ in pools]).transpose(1, 2, 0)
        paths[GroupId(group)] = Path(sides[..., None], np.array([[nbytes] for _, nbytes in pools]))
    return paths, end


PAIRS = st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)).filter(
    lambda pairs: len(set(pairs.values())) == len(pairs)
)


@given(layouts(), PAIRS, PAIRS, st.sampled_from([1, 7, 1000]))
def test_copies_do_what_copying_slot_by_slot_does(
    layout: tuple[Mapping[GroupId, Path], int], first: dict[int, int], second: dict[int, int], range_bytes: int
) -> None:
    paths, size = layout
    memory = np.arange(1, size + 1, dtype=np.uint32)
    expected = np.zeros(size, np.uint32)
    for group, slots in enumerate((first, second)):
        targets, sources = paths[GroupId(group)].parts[..., 0].transpose(0, 2, 1).tolist()
        for pool, nbytes in enumerate(paths[GroupId(group)].nbytes[:, 0].tolist()):
            for src, dst in slots.items():
                begin = sources[pool][0] + src * sources[pool][1]
                end = targets[pool][0] + dst * targets[pool][1]
                expected[end : end + nbytes] = memory[begin : begin + nbytes]
    each = plan({**pairs(*first.items()), **pairs(*second.items(), group=GroupId(1))}, paths)
    if not each.size:
        return

    copies, ranges = joined(each, each[0] // range_bytes)

    found = np.zeros(size, np.uint32)
    for into, start, nbytes in copies.T.tolist():
        assert not found[into : into + nbytes].any()
        found[into : into + nbytes] = memory[start : start + nbytes]
        inside = (each[0] >= into) & (each[0] < into + nbytes)
        assert len(set((each[0][inside] // range_bytes).tolist())) == 1
    assert np.array_equal(found, expected)
    assert (copies[0] // range_bytes == ranges).all()
    assert copies[2].sum() == np.count_nonzero(expected)
