"""The key index follows every outcome; that it does is checked after every step of every test with a ``House``."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.abi.key_index import ABSENT, Entry, IndexReader
from kvtier.abi.layout import INDEXES_HERE, ArenaLayout
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import SlotId, Tier
from kvtierd.mover.runtime import CacheRuntime, check_index
from kvtierd.tiers.key_index import Blocks
from tests.unit.mover.rig import GROUP, SPEC, House, key

pytestmark = pytest.mark.skipif(not INDEXES_HERE, reason="no key index on this processor")


def reader_of(runtime: CacheRuntime) -> IndexReader:
    """As a client makes one, from the segment alone."""
    control = runtime.arena.control.view()
    control.flags.writeable = False
    return IndexReader(ArenaLayout.read(control, SPEC), control)


async def test_who_has_been_answered_finds_the_block_and_its_slot(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        runtime = house.open({Tier.HOST: 4, Tier.DISK: 8})
        reader, client = reader_of(runtime), house.client()
        await client.put([key(1), key(2)], tier=Tier.HOST)
        epoch, event = reader.shown()
        assert (epoch, event) == (1, house.engine.last_event)
        entry = reader.entry(key(2), GROUP)
        assert entry is not None
        assert entry.residency & Tier.HOST.bit
        assert entry.host_generation == runtime.arena.generation(Tier.HOST, GROUP, SlotId(entry.host_slot))
        await client.move([key(1), key(2)], Tier.DISK)
        assert reader.entry(key(2), GROUP) == Entry(Tier.DISK.bit)
        house.engine.drop(client.cache, client.session, GROUP, [key(1)])
        assert reader.entry(key(1), GROUP) is reader.entry(key(2), GROUP) is ABSENT
        assert reader.shown() == (1, house.engine.last_event)


@pytest.mark.parametrize(
    ("residency", "host"),
    [
        (0, None),
        (Tier.DISK.bit, None),
        (Tier.HOST.bit | Tier.DISK.bit, None),
        (Tier.HOST.bit, (SlotId(3), 2)),
    ],
)
async def test_the_checker_sees_what_is_wrong(residency: int, host: tuple[SlotId, int] | None) -> None:
    async with House() as house:
        runtime = house.open({Tier.HOST: 4})
        await house.client().put([key(1)], tier=Tier.HOST)
        index = runtime.arena.index
        assert index is not None
        entry = index.contents()[GROUP, key(1)]
        index.put(Blocks(GROUP, {key(1): residency}, {} if host is None else {key(1): host}))
        with pytest.raises(InvariantViolation, match="key index"):
            check_index(runtime.manager, runtime.arena)
        assert entry is not None
        at = SlotId(entry.host_slot), entry.host_generation
        index.put(Blocks(GROUP, {key(1): Tier.HOST.bit}, {key(1): at}))
        check_index(runtime.manager, runtime.arena)
        index.put(Blocks(GROUP, {key(9): Tier.DISK.bit}))
        with pytest.raises(InvariantViolation, match="key index"):
            check_index(runtime.manager, runtime.arena)
        index.put(Blocks(GROUP, {key(9): 0}))
