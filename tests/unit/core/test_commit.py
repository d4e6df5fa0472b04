"""Reserved slots become blocks, immutable from then on; what conflicts is answered block by block."""

from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import BlockResult
from tests.unit.core.bench import DEVICE, Bench

OK, EXISTS, MISSING = BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING


def test_an_existing_key_keeps_the_old_block_and_gives_the_slot_back() -> None:
    bench = Bench(device=2)
    bench.put("a", priority=60)
    old = bench.slot("a", DEVICE)
    told = len(bench.events)
    assert bench.commit(bench.blank(DEVICE, 1), [("a", None, 10)]) == [EXISTS]
    assert (bench.slot("a", DEVICE), bench.priority("a")) == (old, 60)
    assert bench.states(DEVICE) == {SlotState.READY: 1, SlotState.FREE: 1}
    assert len(bench.events) == told


def test_an_existing_key_is_used_by_the_commit() -> None:
    bench = Bench(device=3)
    bench.put("a")
    bench.put("b")
    bench.commit(bench.blank(DEVICE, 1), [("a", None, 35)])
    bench.blank(DEVICE, 2)
    assert bench.stored() == "a"
