"""What is said of one block: where it is, what holds it, and when its turn to leave comes, which is then tried out."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtierd.core import explaining
from kvtierd.core.block import Phase
from kvtierd.core.errors import UnknownGroup
from kvtierd.core.events import Cause
from kvtierd.core.explaining import BlockNow, CopyNow, Departure, MoveNow, Obstacle
from kvtierd.core.ids import GroupId, Tier
from kvtierd.core.policy import Policy, WritePolicy
from kvtierd.core.standing import LOOKED_AT, Precision, Standing
from tests.unit.core.bench import ALICE, BOB, DEVICE, DISK, GROUP, HOST, SECOND, Bench, key

ROOMY = 60
"""Slots of a tier below that takes all that may come down."""


def explained(bench: Bench, name: str) -> BlockNow:
    found = bench.core.explain(GROUP, key(name), bench.now)
    assert found is not None
    return found


def at(bench: Bench, name: str, tier: Tier = DEVICE) -> CopyNow:
    return next(copy for copy in explained(bench, name).copies if copy.tier is tier)


def turn(copy: CopyNow) -> int | None:
    """How many go before it."""
    assert copy.standing is None or copy.standing.precision is Precision.EXACT
    return None if copy.standing is None else copy.standing.before


def test_a_block_that_is_not_stored_has_nothing_to_explain() -> None:
    bench = Bench(device=1)
    assert bench.core.explain(GROUP, key("a"), 0) is None
    with pytest.raises(UnknownGroup):
        bench.core.explain(GroupId(1), key("a"), 0)


def test_where_it_is_and_what_it_stands_on() -> None:
    bench = Bench(device=4, host=4)
    bench.put("abc", priority=40)
    bench.put("d", under="b", priority=90, duration_ms=500)
    (ticket,) = bench.acquire("ab", tier=HOST)
    bench.land()
    b = explained(bench, "b")
    assert (b.key, b.parent, b.depth, b.children, b.residency) == (key("b"), key("a"), 1, 2, 3)
    assert (b.priority, b.own_priority, b.duration_ms, b.deadline_ns) == (90, 40, 0, 0)
    assert [copy.tier for copy in b.copies] == [DEVICE, HOST]
    assert b.copies[1].slot == bench.slot("b", HOST)
    assert [(lease.id, lease.session, lease.tier) for lease in b.leases] == [(bench.lease(ticket), ALICE, HOST)]
    assert at(bench, "b", HOST).obstacles == (Obstacle.LEASED,)
    assert (at(bench, "b").departure, at(bench, "b").obstacles) == (Departure.FREED, ())
    d = explained(bench, "d")
    assert (d.duration_ms, d.deadline_ns, d.leases) == (500, bench.now + SECOND // 2, ())


def test_what_keeps_a_block_is_named() -> None:
    bench = Bench(device=5)
    bench.put("ab")
    bench.pin("b")
    bench.store("c", session=BOB)
    assert at(bench, "a").obstacles == (Obstacle.CHILDREN,)
    assert at(bench, "a").standing is None, "what is below it never goes"
    assert (at(bench, "b").obstacles, at(bench, "b").pins) == ((Obstacle.PINNED,), 1)
    assert (at(bench, "c").obstacles, at(bench, "c").leases) == ((Obstacle.LEASED,), 1)
    assert (at(bench, "a").free, at(bench, "a").unheld) == (2, 1)


def test_a_prefix_on_disk_stays_for_what_stands_on_it() -> None:
    bench = Bench(device=2, disk=4)
    bench.put("ab")
    bench.move("b", DISK)
    bench.land()
    assert at(bench, "a", DISK).obstacles == (Obstacle.DISK_CHILDREN,)
    assert (turn(at(bench, "a", DISK)), at(bench, "a", DISK).departure) == (1, Departure.FREED)
    assert (turn(at(bench, "b", DISK)), at(bench, "b", DISK).departure) == (0, Departure.DROPPED)


def test_a_copy_under_way_is_told_of_at_both_ends() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", HOST)
    bench.move("a", DEVICE)
    assert explained(bench, "a").moves == (MoveNow(HOST, DEVICE, Cause.PREFETCH),)
    assert at(bench, "a").obstacles == (Obstacle.FILLING,)
    assert (at(bench, "a").phase, at(bench, "a").waiters) == (Phase.FILLING, 1)
    assert (at(bench, "a", HOST).obstacles, at(bench, "a", HOST).readers) == ((Obstacle.MOVING,), 1)


def test_a_victim_on_its_way_down_says_so() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    bench.reserve(DEVICE, 1)
    leaving = at(bench, "a")
    assert (leaving.phase, leaving.obstacles, leaving.departure) == (Phase.LEAVING, (), Departure.DEMOTED)


def test_a_request_that_waits_keeps_what_it_matched() -> None:
    bench = Bench(device=2, host=3)
    bench.put("a", HOST)
    bench.put("bc")
    bench.reserve(DEVICE, 2, BOB)
    bench.acquire("a")
    assert explained(bench, "a").waiting == 1
    assert at(bench, "a", HOST).obstacles == (Obstacle.AWAITED,)


def test_under_the_threshold_it_is_dropped_rather_than_demoted() -> None:
    bench = Bench(device=2, host=2, policy=Policy(thresholds={(DEVICE, HOST): 50}))
    bench.put("a", priority=49)
    bench.put("b", priority=50)
    assert (at(bench, "a").departure, at(bench, "a").threshold) == (Departure.DROPPED, 50)
    assert at(bench, "b").departure is Departure.DEMOTED
    assert [turn(at(bench, name)) for name in "ab"] == [0, 1]


def test_a_lost_tier_is_no_place_to_wait_for_a_turn() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    bench.acquire("a", tier=HOST)
    bench.land()
    bench.core.windows[GROUP].state.offline.add(HOST)
    assert Obstacle.TIER_LOST in at(bench, "a", HOST).obstacles
    bench.core.windows[GROUP].state.offline.discard(HOST)


def test_a_parent_has_its_turn_after_what_is_below_it() -> None:
    bench = Bench(device=4)
    bench.put("abc")
    bench.put("x")
    assert [turn(at(bench, name)) for name in "cbax"] == [0, 1, 2, 3]
    assert at(bench, "a").obstacles == (Obstacle.CHILDREN,)
    assert at(bench, "a").departure is Departure.DROPPED


def test_copies_on_disk_of_a_chain_that_is_above_as_well_go_tail_first() -> None:
    bench = Bench(device=8, disk=8)
    bench.put("x")
    bench.move("x", DISK)
    bench.put("abc")
    bench.move("c", DISK)
    bench.land()
    bench.move("c", DEVICE)
    bench.land()
    assert [turn(at(bench, name, DISK)) for name in "cbax"] == [0, 1, 2, 3]


def test_a_parent_that_only_its_child_made_important_has_its_own_turn() -> None:
    bench = Bench(device=8)
    bench.put("a", priority=10)
    bench.put("b", under="a", priority=80)
    bench.put("z", priority=80)
    bench.tell_read("a")
    assert [turn(at(bench, name)) for name in "baz"] == [0, 1, 2]


def test_beyond_what_is_looked_at_there_are_at_least_so_many_before() -> None:
    count = LOOKED_AT + 20
    bench = Bench(device=count)
    for number in range(count):
        bench.put(chr(0x4E00 + number))
    last = at(bench, chr(0x4E00 + count - 1)).standing
    assert last is not None and last.precision is Precision.AT_LEAST
    assert LOOKED_AT - 8 <= last.before < count
    assert at(bench, chr(0x4E00)).standing == Standing(0, Precision.EXACT)


def test_looking_changes_no_recency() -> None:
    bench = Bench(device=3)
    for name in "abc":
        bench.put(name)
    explained(bench, "a")
    bench.blank(DEVICE, 1)
    assert bench.stored() == "bc"


def test_keys_are_found_by_what_they_begin_with_page_by_page() -> None:
    bench = Bench(device=8)
    for name in "abcdefgh":
        bench.put(name)
    wanted, found, page = key("e")[:4], [], 0
    while True:
        some, page = bench.core.keys_with(GROUP, wanted, page, 3)
        found += some
        if not page:
            break
    assert found == [key("e")]
    assert bench.core.keys_with(GROUP, b"", 0, 100) == ([key(name) for name in "abcdefgh"], 0)


def test_a_block_with_many_children_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "CHILDREN_COUNTED", 4)
    bench = Bench(device=8)
    bench.put("a")
    for name in "bcdefg":
        bench.put(name, under="a")
    assert explained(bench, "a").children == 4


@st.composite
def lives(draw: st.DrawFn) -> tuple[Bench, Tier]:
    """A group after a life, and a tier of it: below that there is room for all that may come."""
    tiers = draw(st.sampled_from(((DEVICE,), (HOST,), (DISK, DEVICE), (DEVICE, HOST), (DEVICE, HOST, DISK))))
    tier = draw(st.sampled_from(tiers))
    # What wants slots on disk is itself written there: with a write policy that would be more than is asked for.
    policies = (WritePolicy.BACK,) if tier is DISK else (WritePolicy.BACK, WritePolicy.SELECTIVE, WritePolicy.THROUGH)
    device, host, disk = (0 if each not in tiers else 24 if each is tier else ROOMY for each in Tier)
    policy = Policy(
        thresholds={edge: draw(st.sampled_from((30, 0, 50, 101))) for edge in ((DEVICE, HOST), (DEVICE, DISK))},
        write_policy=draw(st.sampled_from(policies)),
        eviction=draw(st.sampled_from(("lru", "2q"))),
        victims_a_call=draw(st.sampled_from((1, 8))),
    )
    bench = Bench(device=device, host=host, disk=disk, policy=policy)
    names = iter(string.ascii_letters)
    for _ in range(draw(st.integers(3, 20))):
        _live(draw, bench, tiers, tier, names)
        bench.land()
    return bench, tier


def _live(draw: st.DrawFn, bench: Bench, tiers: Sequence[Tier], tier: Tier, names: Iterator[str]) -> None:
    stored = bench.stored()
    what = (
        draw(st.sampled_from(("put", "put", "put", "touch", "move", "down and up", "retain", "pin", "hold")))
        if stored
        else "put"
    )
    block = draw(st.sampled_from(stored)) if stored else ""
    memory = [each for each in tiers if each is not DISK]
    if what == "put" and bench.tier(tier).capacity > len(stored) + 3:
        chain = "".join(next(names) for _ in range(draw(st.integers(1, 3))))
        under = draw(st.sampled_from([None, *stored]))
        bench.put(chain, draw(st.sampled_from(memory)), under=under, priority=draw(st.sampled_from((35, 10, 60, 90))))
    elif what == "touch":
        bench.tell_read(block)
    elif what == "move":
        bench.move(block, draw(st.sampled_from(tiers)))
    elif what == "down and up":
        bench.move(block, tiers[-1])
        bench.land()
        bench.move(block, memory[0])
    elif what == "retain":
        bench.retain(block, draw(st.sampled_from((0, 35, 40, 100))))
    elif what == "pin":
        bench.pin(block, draw(st.sampled_from(tiers)))
    elif what == "hold":
        bench.acquire(block, tier=draw(st.sampled_from(memory)), session=BOB)


def want_a_slot(bench: Bench, tier: Tier, number: int) -> None:
    if tier is not DISK:
        bench.reserve(tier, 1, ALICE)
    else:  # which nobody can reserve: a block comes down that nothing is more important than
        bench.put(chr(0x4E00 + number), priority=100)
        bench.move(chr(0x4E00 + number), DISK)
    bench.land()


@settings(max_examples=200, deadline=None)
@given(lives())
def test_they_leave_in_the_order_that_was_said(life: tuple[Bench, Tier]) -> None:
    bench, tier = life
    said: dict[str, Standing] = {}
    for name in bench.stored():
        for copy in explained(bench, name).copies:
            if copy.tier is tier and copy.standing is not None:
                said[name] = copy.standing
    ranks = [standing.before for standing in said.values() if standing.precision is not Precision.AT_LEAST]
    assert len(set(ranks)) == len(ranks)
    expected = sorted(said, key=lambda name: said[name].before)
    left: list[str] = []
    while len(left) < len(expected):
        before = {name for name in bench.stored() if tier in bench.where(name)}
        want_a_slot(bench, tier, len(bench.events))
        assert not bench.refusals, f"{expected[len(left) :]} were to go"
        left += [name for name in before if name not in bench.stored() or tier not in bench.where(name)]
        place = len(left) - 1
        if place >= 0 and said[expected[place]].precision is not Precision.EXACT:
            return
        assert left == expected[: len(left)]
