"""Drop: a block with its subtree, or nothing of it."""

from kvtierd.core.events import Cause
from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import BlockResult
from tests.unit.core.bench import DEVICE, DISK, HOST, Bench

OK, NOT_FOUND, HELD = BlockResult.OK, BlockResult.NOT_FOUND, BlockResult.HELD


def test_a_block_that_is_being_copied_goes_at_once_and_its_slots_when_the_copy_has_ended() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    bench.move("a", HOST)
    waiting = bench.reserve(DEVICE, 1)
    bench.cancel(waiting)
    assert bench.drop("a") == ([OK], 1)
    assert bench.states(DEVICE) == {SlotState.RETIRING: 1}
    assert bench.states(HOST) == {SlotState.RETIRING: 1}
    bench.land()
    assert bench.stored() == ""
    assert (bench.states(DEVICE), bench.states(HOST)) == ({SlotState.FREE: 1}, {SlotState.FREE: 1})


def test_a_dropped_blocks_disk_records_are_deleted_children_first() -> None:
    bench = Bench(disk=2, recovered=[("a", None, 35), ("b", "a", 35)])
    bench.drop("a")
    assert bench.in_flight() == [("b", DISK, None, Cause.CAPACITY), ("a", DISK, None, Cause.CAPACITY)]
