"""The checker that compares the key index with the core, after every step of every test with a ``House``."""

import pytest

from kvtier.abi.layout import INDEXES_HERE
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import SlotId, Tier
from kvtierd.mover.runtime import check_index
from kvtierd.tiers.key_index import IndexedBlocks
from tests.unit.mover.rig import GROUP, House, key

pytestmark = pytest.mark.skipif(not INDEXES_HERE, reason="no key index on this processor")


@pytest.mark.parametrize(
    ("residency", "host"),
    [(0, None), (Tier.DISK.bit, None), (Tier.HOST.bit | Tier.DISK.bit, None), (Tier.HOST.bit, (SlotId(3), 2))],
)
async def test_the_checker_sees_what_is_wrong(residency: int, host: tuple[SlotId, int] | None) -> None:
    async with House() as house:
        runtime = house.open({Tier.HOST: 4})
        await house.client().put([key(1)], tier=Tier.HOST)
        index = runtime.arena.index
        assert index is not None
        entry = index.contents()[GROUP, key(1)]
        index.put(IndexedBlocks(GROUP, {key(1): residency}, {} if host is None else {key(1): host}))
        with pytest.raises(InvariantViolation, match="key index"):
            check_index(runtime.manager, runtime.arena)
        assert entry is not None
        at = SlotId(entry.host_slot), entry.host_generation
        index.put(IndexedBlocks(GROUP, {key(1): Tier.HOST.bit}, {key(1): at}))
        check_index(runtime.manager, runtime.arena)
        index.put(IndexedBlocks(GROUP, {key(9): Tier.DISK.bit}))
        with pytest.raises(InvariantViolation, match="key index"):
            check_index(runtime.manager, runtime.arena)
        index.put(IndexedBlocks(GROUP, {key(9): 0}))
