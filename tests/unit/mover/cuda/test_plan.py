"""A batch's copies: every byte where a slot-by-slot copy puts it, nothing else touched, no range overstepped."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.cuda.driver import Copies, joined
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.cuda.plan import Direction, Sites

SLOTS = 12
GROUP = GroupId(0)
HOST_AT, DEVICE_AT = 1 << 30, 1 << 40


def in_one_range(copies: list[tuple[int, int, int]]) -> list[list[int]]:
    """(destination, source, bytes) of each copy."""
    return joined(np.array(copies).T, np.zeros(len(copies), np.int64))[0].T.tolist()


def test_adjacent_slots_without_gaps_are_one_copy() -> None:
    assert in_one_range([(5070, 1040, 10), (5060, 1030, 10), (5080, 1050, 10)]) == [[5060, 1030, 30]]


def test_a_gap_on_one_side_keeps_slots_apart() -> None:
    assert in_one_range([(5070, 1064, 10), (5060, 1048, 10)]) == [[5060, 1048, 10], [5070, 1064, 10]]


@given(st.permutations(range(12)), st.sampled_from([1, 3, 100]), st.integers(0, 2))
def test_joined_copies_move_the_same_bytes_within_their_ranges(order: list[int], of_range: int, gap: int) -> None:
    copies = np.array([(100 + 10 * n, 500 + (10 + gap * (n % 4 == 0)) * n, 10) for n in order]).T
    ranges = np.array(order) // of_range

    found, their_ranges = joined(copies, ranges)

    def moved(some: Copies) -> list[tuple[int, int]]:
        return sorted((dst + n, src + n) for dst, src, nbytes in some.T.tolist() for n in range(nbytes))

    assert moved(found) == moved(copies)
    for (dst, _, nbytes), of in zip(found.T.tolist(), their_ranges.tolist(), strict=True):
        assert {(dst - 100) // 10 // of_range, (dst + nbytes - 101) // 10 // of_range} == {of}


class Device:
    """Addresses of a device tier, as :class:`kvtierd.tiers.cuda.pool.CudaDevice` tells them."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout

    def address(self, group: GroupId, pool: int, slot: SlotId) -> int:
        return DEVICE_AT + self._layout.groups[group].pools[pool].device_offset + slot * self.stride(group, pool)

    def stride(self, group: GroupId, pool: int) -> int:
        return self._layout.groups[group].pools[pool].padded_bytes


PAIRS = st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), min_size=1)
GROUPS = st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=3), min_size=2, max_size=2)


@given(GROUPS, PAIRS, PAIRS, st.sampled_from(Direction))
def test_every_part_goes_where_the_layout_has_it(
    groups: list[list[int]], first: dict[int, int], second: dict[int, int], direction: Direction
) -> None:
    pools = [tuple(map(PoolSpec.opaque, sizes)) for sizes in groups]
    spec = CacheSpec("m", "float16", 16, groups=tuple(WindowGroupSpec(pools=some) for some in pools))
    tiers = (Tier.DEVICE, Tier.HOST)
    layout = ArenaLayout.plan(spec, {(group, tier): SLOTS for group in range(2) for tier in tiers})
    device = Device(layout)
    sites = Sites(layout, device, HOST_AT)  # type: ignore[arg-type]
    wanted, records = set(), {}
    for group, pairs in enumerate((first, second)):
        place = layout.groups[group]
        at = sites.host_records(GroupId(group), [SlotId(slot) for slot in pairs.values()])
        records[GroupId(group)] = [SlotId(slot) for slot in pairs], at
        for on_device, on_host in pairs.items():
            for number, pool in enumerate(place.pools):
                host = HOST_AT + place.host_offset + on_host * place.record_bytes + pool.record_offset
                there = device.address(GroupId(group), number, SlotId(on_device))
                ends = (host, there) if direction is Direction.TO_HOST else (there, host)
                wanted.add((*ends, pool.block_bytes))
    copies = sites.plan(direction, records).T.tolist()
    assert len(copies) == len(wanted)
    assert set(map(tuple, copies)) == wanted
