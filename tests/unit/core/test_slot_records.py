"""What an outcome says of the blocks in memory's slots, so that the next daemon finds there what there is."""

from kvtierd.core.events import Cause
from kvtierd.core.ids import SEVERAL, TIERS, Tier, Traits
from kvtierd.core.policy import Policy, WriteMode
from kvtierd.core.transfers import CommitItem
from tests.slot_rows import begun, contents, owners, restated
from tests.unit.core.bench import ALICE, BOB, DEVICE, GROUP, HOST, Bench, key, keys


def test_a_new_retention_is_told_of_every_slot_of_memory_that_has_the_block() -> None:
    bench = Bench(device=1, host=1, disk=1, recovered=[("a", None, 35)])
    for tier in (HOST, DEVICE):
        bench.acquire("a", tier=tier)
        bench.land()
    bench.end()
    assert bench.where("a") == set(TIERS)
    _, outcome = bench.core.set_retention(GROUP, keys("a"), [80], [9], now=1_000_000)
    assert [content.ref.tier for content in restated(outcome)] == [DEVICE, HOST]
    assert {content.traits for content in restated(outcome)} == {Traits(80, 9, 10_000_000)}
    assert not contents(outcome)
    outcome = bench.core.tick(now=10_000_000)
    assert {content.traits for content in restated(outcome)} == {Traits(35)}, "and that it has ended"


def test_a_block_forgotten_while_it_is_copied_is_disowned() -> None:
    """Its bytes stand until the copy has ended."""
    bench = Bench(device=1, disk=1, policy=Policy(write_policy=WriteMode.THROUGH))
    bench.put("a")
    assert len(bench.moves) == 1
    _, outcome = bench.core.reset(bench.now, force=True)
    assert [(content.ref.tier, content.key) for content in contents(outcome)] == [(DEVICE, None)]
    assert not begun(outcome), "the copy reads on"


def test_a_block_that_goes_with_a_lost_ancestor_while_it_is_held_is_disowned() -> None:
    """Its tier is well and its bytes stand: only the record could bring it back, under an ancestor stored anew."""
    bench = Bench(host=1, disk=1, recovered=[("a", None, 35)])
    bench.store("b", HOST, under="a")
    outcome = bench.core.lose_tier(Tier.DISK, bench.now)
    assert [event.cause for event in outcome.events] == [Cause.IO_ERROR, Cause.ANCESTOR, Cause.IO_ERROR]
    assert [(content.ref.tier, content.key) for content in contents(outcome)] == [(HOST, None)]
    assert not begun(outcome), "who holds it reads on"


def test_a_slot_that_several_write_is_theirs_until_all_of_its_commit_is_told() -> None:
    """If the daemon dies before, none of them has it alone."""
    bench = Bench(device=1)
    grant = bench.blank(DEVICE, 1)
    assert grant.lease is not None
    _, outcome = bench.core.join(BOB, grant.lease, bench.now)
    bench.apply(outcome)
    item = CommitItem(grant.slots[0], key("a"), None, 35)
    _, outcome = bench.core.commit(ALICE, grant.lease, [item], bench.now)
    bench.apply(outcome)
    assert [owner.session for owner in owners(outcome)] == [SEVERAL]
