"""Blocks and leases found at a start: in memory, on disk, or both."""

from __future__ import annotations

import hashlib

import pytest

from kvtierd.core.check import check
from kvtierd.core.events import Cause, EventSequencer, EventType
from kvtierd.core.ids import CacheId, GroupId, Key, SessionId, SlotId, Tier, Traits
from kvtierd.core.leases import LeftLease
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Outcome
from kvtierd.core.policy import GroupShape, Policy, WritePolicy
from kvtierd.core.recovery import Recovered
from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import CommitItem
from tests.slot_rows import begun, contents, filled, owners, restated
from tests.unit.core.bench import Bench

GROUP = GroupId(0)
OLD, NEW = SessionId(7), SessionId(8)
PLAIN = Traits(35)


def key(name: str) -> Key:
    return Key(hashlib.sha256(name.encode()).digest())


def found(
    name: str, parent: str | None, *, device: int | None = None, host: int | None = None, disk: int | None = None
) -> Recovered:
    slots = [None if slot is None else SlotId(slot) for slot in (disk, device, host)]
    return Recovered(slots[0], key(name), key(parent) if parent else None, PLAIN, slots[1], slots[2])


@pytest.fixture
def core() -> BlockManager:
    sizes = {Tier.DEVICE: 4, Tier.HOST: 4, Tier.DISK: 8}
    return BlockManager(CacheId(1), [GroupShape(GROUP, sizes, dict.fromkeys(sizes, 64))], EventSequencer())


def opened(core: BlockManager, *blocks: Recovered) -> Outcome:
    outcome = core.open({GROUP: blocks}, {}, unclean=True, now=0)
    check(core)
    return outcome


def test_a_block_is_announced_once_with_all_that_it_stands_in(core: BlockManager) -> None:
    outcome = opened(core, found("a", None, device=0, host=3, disk=5), found("b", "a", host=1))
    stored = [event for event in outcome.events if event.type is EventType.STORED]
    assert {event.cause for event in stored} == {Cause.RECOVERED}
    assert [change.residency for event in stored for change in event.blocks] == [0b111, 0b010]
    assert (begun(outcome), filled(outcome), outcome.moves) == ([], [], ())
    place = core.locate(GROUP, [key("a")])[0]
    assert place.slots == (SlotId(0), SlotId(3), SlotId(5))


def test_recovered_blocks_are_evicted_and_demoted_like_any_others(core: BlockManager) -> None:
    opened(core, *(found(str(n), None, host=n) for n in range(4)))
    _, outcome = core.reserve(NEW, GROUP, Tier.HOST, 1, now=1)
    check(core)
    (move,) = outcome.moves
    assert (move.src, move.dst) == (Tier.HOST, Tier.DISK)
    assert [item.key for item in move.items] == [key("0")], "the least recently used"


def test_slots_that_an_old_process_may_write_are_nobody_elses_until_it_is_gone(core: BlockManager) -> None:
    opened(core)
    core.restore_lease(LeftLease(OLD, GROUP, Tier.HOST, blank=(SlotId(1), SlotId(2))), now=1)
    check(core)
    assert core.stats().tiers[Tier.HOST].states[SlotState.ORPHANED] == 2
    ticket, outcome = core.reserve(NEW, GROUP, Tier.HOST, 3, now=2)
    assert [refusal.ticket for refusal in outcome.refusals] == [ticket]
    assert [(holder.session, holder.slots) for holder in outcome.refusals[0].holders] == [(OLD, 2)]
    freed = core.end_session(OLD, now=3)
    check(core)
    assert {ownership.ref.slot: ownership.session for ownership in owners(freed)} == {1: None, 2: None}
    _, outcome = core.reserve(NEW, GROUP, Tier.HOST, 3, now=4)
    assert len(outcome.grants[0].slots) == 3


def test_blocks_that_an_old_process_may_read_stay_where_they_are(core: BlockManager) -> None:
    opened(core, *(found(str(n), None, host=n) for n in range(4)))
    core.restore_lease(LeftLease(OLD, GROUP, Tier.HOST, keys=(key("0"), key("1"), key("nobody's"))), now=1)
    check(core)
    _, outcome = core.reserve(NEW, GROUP, Tier.HOST, 1, now=2)
    assert [item.key for move in outcome.moves for item in move.items] == [key("2")]
    core.end_session(OLD, now=3)
    check(core)


def test_what_a_slot_holds_is_told_before_its_generation_says_so(core: BlockManager) -> None:

    opened(core)
    _, outcome = core.reserve(NEW, GROUP, Tier.HOST, 1, now=1)
    grant = outcome.grants[0]
    assert grant.lease is not None
    item = CommitItem(grant.slots[0], key("a"), None, 50, duration_ms=9)
    _, outcome = core.commit(NEW, grant.lease, [item], now=2)
    (content,) = contents(outcome)
    assert filled(outcome) == [content.ref]
    assert (content.key, content.parent, content.traits.priority, content.traits.duration_ms) == (key("a"), None, 50, 9)


def test_a_new_retention_is_told_of_every_slot_of_memory_that_has_the_block(core: BlockManager) -> None:
    opened(core, found("a", None, device=0, host=0, disk=0))
    _, outcome = core.set_retention(NEW, GROUP, [key("a")], [80], [9], now=1_000_000)
    assert [content.ref.tier for content in restated(outcome)] == [Tier.DEVICE, Tier.HOST]
    assert {content.traits for content in restated(outcome)} == {Traits(80, 9, 10_000_000)}
    assert not contents(outcome)
    outcome = core.tick(now=10_000_000)
    assert {content.traits for content in restated(outcome)} == {Traits(35)}, "and that it has ended"


def test_a_clock_that_starts_at_the_release_is_told_of(core: BlockManager) -> None:
    opened(core)
    _, outcome = core.reserve(NEW, GROUP, Tier.HOST, 1, now=1)
    grant = outcome.grants[0]
    assert grant.lease is not None
    _, outcome = core.commit(NEW, grant.lease, [CommitItem(grant.slots[0], key("a"), None, 50, 9)], now=2)
    assert not restated(outcome), "its contents say all of it"
    outcome = core.release(NEW, [grant.lease], now=3)
    assert [content.traits.deadline_ns for content in restated(outcome)] == [3 + 9_000_000]


def test_a_block_dropped_while_held_is_disowned(core: BlockManager) -> None:
    """Its bytes stand until the release; a restart meanwhile must not bring it back."""
    opened(core, found("a", None, host=0, disk=0))
    core.restore_lease(LeftLease(OLD, GROUP, Tier.HOST, keys=(key("a"),)), now=1)
    block = core.windows[GROUP].state.index.get(key("a"))
    assert block is not None
    core.windows[GROUP].state.detach(block, Tier.HOST)
    outcome = core.tick(now=3)
    assert [(content.ref.slot, content.key) for content in contents(outcome)] == [(0, None)]


def test_a_block_forgotten_while_it_is_copied_is_disowned() -> None:
    """Its bytes stand until the copy has ended."""
    bench = Bench(device=1, disk=1, policy=Policy(write_policy=WritePolicy.THROUGH))
    bench.put("a")
    assert len(bench.moves) == 1
    _, outcome = bench.core.reset(NEW, bench.now, force=True)
    assert [(content.ref.tier, content.key) for content in contents(outcome)] == [(Tier.DEVICE, None)]
    assert not begun(outcome), "the copy reads on"


def test_a_block_that_goes_with_a_lost_ancestor_while_it_is_held_is_disowned() -> None:
    """Its tier is well and its bytes stand: only the record could bring it back, under an ancestor stored anew."""
    bench = Bench(host=1, disk=1, recovered=[("a", None, 35)])
    bench.store("b", Tier.HOST, under="a")
    _, outcome = bench.core.lose_disk(bench.now)
    assert [event.cause for event in outcome.events] == [Cause.ANCESTOR, Cause.IO_ERROR]
    assert [(content.ref.tier, content.key) for content in contents(outcome)] == [(Tier.HOST, None)]
    assert not begun(outcome), "who holds it reads on"
