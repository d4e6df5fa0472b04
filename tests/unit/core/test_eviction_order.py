"""Who goes first: lowest effective priority, then least recently used, never a parent before its child."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.block import Block, Copy, Phase
from kvtierd.core.events import Cause, EventType
from kvtierd.core.eviction import LEAF, REDUNDANT, Ranked
from kvtierd.core.ids import SlotId, Tier, Traits
from tests.unit.core.bench import DEVICE, DISK, HOST, Bench, key


@pytest.mark.parametrize(
    ("chains", "used", "use", "wanted", "left"),
    [
        pytest.param("a b c", "a", Bench.touch, 2, "a", id="the least recently used"),
        pytest.param("ab x", "ab", Bench.touch, 1, "ab", id="a touch of a child keeps its whole prefix"),
        pytest.param("abc xy", "c", Bench.tell_read, 2, "abc", id="the last key that is read stands for its chain"),
        pytest.param("a b c", "cba", Bench.tell_read, 1, "ab", id="of several the one read last stays longest"),
        pytest.param("a b c", "cba", Bench.tell_read, 2, "a", id="and then the one read before it"),
    ],
)
def test_the_least_recently_used_goes_first(
    chains: str, used: str, use: Callable[[Bench, str], None], wanted: int, left: str
) -> None:
    bench = Bench(device=len(chains.replace(" ", "")))
    for chain in chains.split():
        bench.put(chain)
    use(bench, used)
    bench.blank(DEVICE, wanted)
    assert bench.stored() == left


def test_a_lower_priority_goes_before_a_longer_unused_block() -> None:
    bench = Bench(device=2)
    bench.put("a", priority=36)
    bench.put("b", priority=35)
    bench.blank(DEVICE, 1)
    assert bench.stored() == "a"


def test_a_chain_goes_leaf_first_though_all_of_it_was_used_at_once() -> None:
    bench = Bench(device=3)
    bench.put("abc")
    bench.blank(DEVICE, 1)
    assert bench.stored() == "ab"
    bench.end()
    bench.blank(DEVICE, 2)
    assert bench.stored() == "a"


def test_a_parent_ranks_as_high_as_its_most_important_child() -> None:
    bench = Bench(device=3)
    bench.put("a", priority=10)
    bench.put("b", under="a", priority=80)
    bench.put("x", priority=50)
    assert bench.priority("a") == 80
    bench.blank(DEVICE, 1)
    assert bench.stored() == "ab"


def test_a_priority_travels_up_the_whole_prefix_and_back_when_the_child_goes() -> None:
    bench = Bench(device=3)
    bench.put("ab", priority=40)
    bench.put("c", under="b", priority=90)
    assert [bench.priority(name) for name in "abc"] == [90, 90, 90]
    told = len(bench.events)
    bench.drop("c")
    assert [bench.priority(name) for name in "ab"] == [40, 40]
    assert list(bench.said(told)) == [
        (EventType.REMOVED, Cause.EXPLICIT, "c"),
        (EventType.UPDATED, Cause.EXPLICIT, "ba"),
    ]
    assert bench.events[-1].blocks.priorities == [40, 40]


def test_a_less_important_child_changes_nothing_above() -> None:
    bench = Bench(device=2)
    bench.put("a", priority=60)
    told = len(bench.events)
    bench.put("b", under="a", priority=20)
    assert bench.priority("a") == 60
    assert list(bench.said(told)) == [(EventType.STORED, Cause.COMMIT, "b")]


def test_recency_counts_in_the_lower_tier_too() -> None:
    """By last use, not by arrival: what came down last may have been used first."""
    bench = Bench(device=2, host=2)
    bench.put("a")
    bench.put("b")
    bench.move("b", HOST)
    bench.land()
    bench.move("a", HOST)
    bench.land()
    bench.blank(HOST, 1)
    assert bench.stored() == "b"


def test_the_first_victims_of_host_are_ready_above() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a", HOST)
    bench.put("b", HOST, priority=60)
    (on_host,) = bench.acquire("b", tier=HOST)
    (on_device,) = bench.acquire("b")
    bench.land()
    bench.release(bench.lease(on_host), bench.lease(on_device))
    assert bench.where("b") == {DEVICE, HOST}
    bench.put("c")
    bench.make_room(DEVICE, 1)
    assert (bench.where("a"), bench.where("b"), bench.where("c")) == ({HOST}, {DEVICE}, {HOST})


def test_the_first_victims_of_disk_are_ready_above() -> None:
    bench = Bench(device=2, disk=2, recovered=[("a", None, 35), ("b", None, 60)])
    bench.acquire("b")
    bench.land()
    bench.put("c")
    bench.make_room(DEVICE, 1)
    assert (bench.where("a"), bench.where("b"), bench.where("c")) == ({DISK}, {DEVICE}, {DISK})


def test_a_disk_copy_that_a_child_there_needs_is_no_victim_though_the_block_is_above_too() -> None:
    bench = Bench(device=2, disk=3, recovered=[("a", None, 35), ("b", "a", 35), ("x", None, 60)])
    bench.acquire("a")
    bench.land()
    bench.put("c", priority=90)
    bench.make_room(DEVICE, 1)
    assert (bench.where("a"), bench.where("c"), bench.stored()) == ({DEVICE, DISK}, {DISK}, "acx")


@given(st.lists(st.tuples(st.sampled_from(["offer", "leave", "victim", "take"]), st.integers(0, 40)), max_size=400))
def test_a_list_of_candidates_gives_the_lowest_rank_whatever_has_gone_stale(steps: list[tuple[str, int]]) -> None:
    blocks = [Block(key(str(number)), None, None, Traits(35)) for number in range(41)]
    rank_of: dict[Block, int] = {}
    ranked = Ranked(Tier.HOST, LEAF, blocks)
    for clock, (step, number) in enumerate(steps):
        block = blocks[number]
        if step == "offer":
            rank_of[block] = clock
            _list(block, clock)
            ranked.offer(clock, SlotId(number))
        elif step == "leave":
            rank_of.pop(block, None)
            block.copies[Tier.HOST] = None
        else:
            spared = [block] if step == "victim" else []
            others = [one for one in rank_of if one not in spared]
            assert ranked.victim(spared) is min(others, key=rank_of.__getitem__, default=None)
        assert ranked.victim() is min(rank_of, key=rank_of.__getitem__, default=None)
        assert set(ranked) == set(rank_of)


def _list(block: Block, rank: int) -> None:
    copy = Copy(SlotId(0), Phase.READY)
    copy.listed, copy.ranked = LEAF | REDUNDANT, rank
    block.copies[Tier.HOST] = copy


def test_a_list_of_candidates_forgets_what_is_stale() -> None:
    block = Block(key("a"), None, None, Traits(35))
    ranked = Ranked(Tier.HOST, LEAF, [block])
    for latest in range(10_000):
        _list(block, latest)
        ranked.offer(latest, SlotId(0))
    assert len(ranked._heap) + len(ranked._old) <= 256
