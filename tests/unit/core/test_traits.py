"""What is kept of a block besides its bytes: it goes to disk with the block and comes back with it."""

from __future__ import annotations

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, Label, SlotId, Traits
from kvtierd.core.manager import BlockManager
from kvtierd.core.policy import GroupShape
from kvtierd.core.recovery import Recovered
from kvtierd.core.transfers import CommitItem
from tests.unit.core.bench import ALICE, DISK, GROUP, HOST, Bench, key

LABEL = Label(b"\x01" * 8, b"tokens")


def test_a_committed_block_takes_its_traits_to_disk() -> None:
    bench = Bench(host=2, disk=4)
    grant = bench.blank(HOST, 1)
    assert grant.lease is not None
    item = CommitItem(grant.slots[0], key("a"), None, 60, 2000, LABEL)
    _, outcome = bench.core.commit(ALICE, grant.lease, [item], bench.now)
    bench.apply(outcome)
    bench.move("a", DISK)
    (copied,) = bench.moves[0].items
    assert (copied.traits.priority, copied.traits.duration_ms, copied.traits.label) == (60, 2000, LABEL)


def test_a_recovered_block_has_the_traits_it_was_stored_with() -> None:
    shape = GroupShape(GROUP, {HOST: 2, DISK: 4}, {HOST: 4096, DISK: 4096})
    core = BlockManager(CacheId(1), [shape], EventSequencer())
    traits = Traits(60, 2000, 10**18, LABEL)
    core.open({GROUP: [Recovered(SlotId(0), key("a"), None, traits)]}, {}, unclean=False, now=0)
    block = core.windows[GROUP].state.index.get(key("a"))
    assert block is not None
    assert block.traits == traits
