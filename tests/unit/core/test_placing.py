"""Blocks are put on the lists of candidates late, and still by nobody all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core import group
from kvtierd.core.block import Block, Copy, Phase
from kvtierd.core.candidates import LEAF, REDUNDANT, Candidates
from kvtierd.core.evict import Ranked
from kvtierd.core.group import GroupState
from kvtierd.core.ids import SlotId, Tier
from kvtierd.core.outcome import Outcome
from kvtierd.core.room import PLACED_A_ROUND
from kvtierd.core.traits import Traits
from tests.unit.core.bench import ALICE, GROUP, HOST, Bench, key

SLOTS = 5 * PLACED_A_ROUND


class Turns(Bench):
    """Each call that the core asks for is another turn; ``unplaced``: how many blocks each of them left. The checker
    places all blocks, so it is not asked. ``between``: a block that somebody reads after each turn."""

    def __init__(self, host: int) -> None:
        self.unplaced: list[int] = []
        self.between: str | None = None
        super().__init__(host=host)

    @property
    def state(self) -> GroupState:
        return self.core.windows[GROUP].state

    def apply(self, outcome: Outcome) -> Outcome:
        following: Outcome | None = outcome
        while following is not None:
            self.events += following.events
            self.grants |= {grant.ticket: grant for grant in following.grants}
            self.unplaced.append(self.state.unplaced)
            if following.again and self.between is not None:
                self.core.touch(GROUP, [key(self.between)], 0, self.now)
            following = self.core.tick(self.now) if following.again else None
        return outcome

    def fill(self, count: int) -> None:
        """Blocks 0, 1, … that stand by themselves."""
        for number in range(count):
            self.put_one(number, None)

    def put_one(self, number: int, parent: int | None) -> None:
        grant = self.blank(HOST, 1)
        self.commit(grant, [(str(number), None if parent is None else str(parent), 35)])
        assert grant.lease is not None
        self.release(grant.lease)

    def at_once(self) -> int:
        """The most blocks that a turn has placed."""
        return max(before - after for before, after in zip(self.unplaced, self.unplaced[1:], strict=False))


def test_the_first_eviction_places_a_few_blocks_a_turn_and_the_order_is_exact() -> None:
    turns = Turns(SLOTS)
    turns.fill(SLOTS)
    assert turns.state.unplaced == SLOTS, "nobody has asked"
    turns.unplaced.clear()
    turns.blank(HOST, 2)
    assert len(turns.unplaced) >= SLOTS // PLACED_A_ROUND
    assert turns.at_once() <= PLACED_A_ROUND
    gone = [number for number in range(SLOTS) if turns.state.index.get(key(str(number))) is None]
    assert gone == [0, 1]


def test_who_waits_is_served_though_others_touch_more_blocks_than_a_turn_places() -> None:
    turns = Turns(SLOTS)
    turns.fill(1)
    for number in range(1, SLOTS):
        turns.put_one(number, number - 1)
    turns.between = str(SLOTS - 2)  # and with it all but the last
    turns.blank(HOST, 1)
    assert turns.state.index.get(key(str(SLOTS - 1))) is None


def test_a_tier_that_fills_up_has_its_blocks_placed_before_room_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "UNPLACED_MOST", PLACED_A_ROUND)
    turns = Turns(SLOTS)
    turns.fill(SLOTS * 3 // 4)
    assert turns.state.unplaced == SLOTS * 3 // 4, "for who never needs room that would be in vain"
    turns.fill(SLOTS)
    assert turns.state.unplaced <= PLACED_A_ROUND
    assert turns.at_once() <= PLACED_A_ROUND


@pytest.mark.parametrize("newest_first", [False, True])
def test_what_is_forgotten_unplaced_does_not_pile_up(newest_first: bool) -> None:
    turns = Turns(SLOTS)
    turns.fill(SLOTS)
    turns.unplaced.clear()
    for number in reversed(range(SLOTS)) if newest_first else range(SLOTS):
        turns.apply(turns.core.drop(ALICE, GROUP, [key(str(number))], turns.now)[1])
        assert turns.state.unplaced <= 2 * len(turns.state.index) + SLOTS // 2
    assert turns.state.unplaced <= 64
    assert turns.at_once() <= PLACED_A_ROUND


def test_what_comes_and_goes_in_chains_is_put_on_no_list_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[Block] = []
    monkeypatch.setattr(Candidates, "put", lambda self, block, copy, lists: listed.append(block))
    turns = Turns(SLOTS)
    for number in range(SLOTS):
        turns.put_one(number, number - 1 if number % 32 else None)
        if number % 32 == 31:
            turns.apply(turns.core.drop(ALICE, GROUP, [key(str(number - 31))], turns.now)[1])
    assert not listed
    assert turns.state.unplaced <= 64 + 4 * 32


@given(st.lists(st.tuples(st.sampled_from(["offer", "leave", "victim", "take"]), st.integers(0, 40)), max_size=400))
def test_a_list_of_candidates_gives_the_lowest_rank_whatever_has_gone_stale(steps: list[tuple[str, int]]) -> None:
    blocks = [Block(key(str(number)), None, None, Traits(35)) for number in range(41)]
    rank_of: dict[Block, int] = {}
    ranked = Ranked(Tier.HOST, LEAF)
    for clock, (step, number) in enumerate(steps):
        block = blocks[number]
        if step == "offer":
            rank_of[block] = clock
            _list(block, clock)
            ranked.offer(clock, block)
        elif step == "leave":
            rank_of.pop(block, None)
            block.put_copy(Tier.HOST, None)
        else:
            spared = [block] if step == "victim" else []
            others = [one for one in rank_of if one not in spared]
            assert ranked.victim(spared) is min(others, key=rank_of.__getitem__, default=None)
        in_order = [entry for entry in ranked.in_order() if entry is not None]
        assert in_order == sorted((rank, one) for one, rank in rank_of.items())
        assert set(ranked) == set(rank_of)


def _list(block: Block, rank: int) -> None:
    copy = Copy(SlotId(0), Phase.READY)
    copy.listed, copy.ranked = LEAF | REDUNDANT, rank
    block.put_copy(Tier.HOST, copy)


def test_a_list_of_candidates_forgets_what_is_stale() -> None:
    block = Block(key("a"), None, None, Traits(35))
    ranked = Ranked(Tier.HOST, LEAF)
    for latest in range(10_000):
        _list(block, latest)
        ranked.offer(latest, block)
    entries = sum(1 for _ in ranked.in_order())
    assert entries <= 256
