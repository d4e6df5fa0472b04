"""Reserved slots become blocks, immutable from then on; what conflicts is answered block by block."""

from kvtierd.core.transfers import BlockResult
from tests.unit.core.bench import DEVICE, Bench

OK, EXISTS, MISSING = BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING


def test_an_existing_key_is_used_by_the_commit() -> None:
    bench = Bench(device=3)
    bench.put("a")
    bench.put("b")
    bench.commit(bench.blank(DEVICE, 1), [("a", None, 35)])
    bench.blank(DEVICE, 2)
    assert bench.stored() == "a"
