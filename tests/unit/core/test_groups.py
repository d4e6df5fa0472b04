"""Window groups of one cache: blocks, slots and queues of their own, one order of events."""

from __future__ import annotations

from kvtierd.core.check import check
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, GroupId
from kvtierd.core.manager import BlockManager
from kvtierd.core.policy import GroupShape
from kvtierd.core.transfers import CommitItem
from tests.slot_rows import begun
from tests.unit.core.bench import ALICE, DEVICE, key

FULL, SLIDING = GroupId(0), GroupId(1)


def two_groups() -> BlockManager:
    shapes = [GroupShape(group, {DEVICE: slots}, {DEVICE: 4096}) for group, slots in ((FULL, 1), (SLIDING, 2))]
    core = BlockManager(CacheId(1), shapes, EventSequencer())
    core.open({}, {}, unclean=False, restarted=False, now=0)
    return core


def store(core: BlockManager, group: GroupId, name: str) -> None:
    _, outcome = core.reserve(ALICE, group, DEVICE, 1, 0)
    (grant,) = outcome.grants or core.tick(0).grants
    assert grant.lease is not None
    core.commit(ALICE, grant.lease, [CommitItem(grant.slots[0], key(name), None, 35)], 0)
    core.release(ALICE, [grant.lease], 0)
    check(core)


def test_the_same_key_in_two_groups_is_two_blocks() -> None:
    core = two_groups()
    store(core, FULL, "a")
    assert core.match(SLIDING, [key("a")]).blocks == 0
    store(core, SLIDING, "a")
    core.drop(ALICE, FULL, [key("a")], 0)
    assert core.match(FULL, [key("a")]).blocks == 0
    assert core.match(SLIDING, [key("a")]).blocks == 1


def test_a_full_group_leaves_the_other_its_slots() -> None:
    core = two_groups()
    store(core, FULL, "a")
    store(core, SLIDING, "x")
    store(core, SLIDING, "y")
    store(core, FULL, "b")
    assert core.match(FULL, [key("a")]).blocks == 0
    assert core.stats().blocks == 3
    assert core.stats().tiers[DEVICE].capacity == 3


def test_a_session_ends_in_all_groups() -> None:
    core = two_groups()
    for group in (FULL, SLIDING):
        core.reserve(ALICE, group, DEVICE, 1, 0)
    assert core.session_leases(ALICE) == 2
    outcome = core.end_session(ALICE, 0)
    assert {ref.group for ref in begun(outcome)} == {FULL, SLIDING}
    assert core.session_leases(ALICE) == 0
