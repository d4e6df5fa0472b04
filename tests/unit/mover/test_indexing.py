"""The key index follows every outcome; that it does is checked after every step of every test with a ``House``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.abi.key_index import ABSENT, Entry, IndexReader
from kvtier.abi.layout import INDEXES_HERE, ArenaLayout, is_ready
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import Event
from kvtierd.core.ids import SlotId, Tier
from kvtierd.mover.indexing import check_index
from kvtierd.mover.runtime import CacheRuntime
from tests.unit.mover.rig import GROUP, House, key

pytestmark = pytest.mark.skipif(not INDEXES_HERE, reason="no key index on this processor")


def reader_of(runtime: CacheRuntime) -> IndexReader:
    """As a client makes one, from the segment alone."""
    control = runtime.arena.control.view()
    control.flags.writeable = False
    return IndexReader(ArenaLayout.read(control), control)


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


async def test_of_many_blocks_the_index_tells_in_the_next_turn_and_who_waits_hears_later(tmp_path: Path) -> None:
    chain = [key(number) for number in range(16)]
    async with House(tmp_path) as house:
        runtime = house.open({Tier.HOST: 32, Tier.DISK: 32})
        reader, client = reader_of(runtime), house.client()
        before = reader.shown()
        await client.put(chain, tier=Tier.HOST)
        assert house.engine.index_is_behind
        assert reader.shown() == before
        assert {reader.entry(each, GROUP) for each in chain} == {ABSENT}
        await asyncio.sleep(0)
        assert not house.engine.index_is_behind
        assert reader.shown() == (1, house.engine.last_event)
        found = [reader.entry(each, GROUP) for each in chain]
        assert [entry.residency for entry in found if entry is not None] == [Tier.HOST.bit] * 16
        await client.move(chain, Tier.DISK)
        assert {reader.entry(each, GROUP) for each in chain} == {Entry(Tier.DISK.bit)}
        assert reader.shown() == (1, house.engine.last_event)


async def test_slots_get_no_other_generations_while_the_index_is_behind() -> None:
    """An entry with that of a slot which somebody writes would have a reader take those bytes for the block's."""
    chain = [key(number) for number in range(16)]
    async with House() as house:
        runtime = house.open({Tier.HOST: 16})
        reader, client = reader_of(runtime), house.client()
        stood: list[Entry | None] = []
        publish = house.hub.publish

        def looking(events: Sequence[Event]) -> None:
            stood.extend(reader.entry(each, GROUP) for each in chain)  # the generations of this outcome have changed
            publish(events)

        await client.put(chain, tier=Tier.HOST)
        assert house.engine.index_is_behind
        house.hub.publish = looking  # type: ignore[method-assign]
        house.engine.drop(client.cache, client.session, GROUP, chain[:1])
        assert all(entry and entry.residency and is_ready(entry.host_generation) for entry in stood)
        assert {reader.entry(each, GROUP) for each in chain} == {ABSENT}
        assert reader.shown() == (1, house.engine.last_event)


async def test_what_is_removed_leaves_an_index_that_tells_all() -> None:
    chain = [key(number) for number in range(16)]
    async with House() as house:
        reader, client = reader_of(house.open({Tier.HOST: 16})), house.client()
        await client.put(chain, tier=Tier.HOST)
        assert house.engine.index_is_behind
        removed = await house.engine.remove_cache(client.cache)
        assert not house.engine.index_is_behind
        check_index(removed.manager, removed.arena)
        assert reader.entry(chain[-1], GROUP) is not ABSENT


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
        index.put(GROUP, key(1), residency, host)
        with pytest.raises(InvariantViolation, match="key index"):
            check_index(runtime.manager, runtime.arena)
        index.put(GROUP, key(1), Tier.HOST.bit, (SlotId(entry.host_slot), entry.host_generation))
        check_index(runtime.manager, runtime.arena)
        index.put(GROUP, key(9), Tier.DISK.bit)
        with pytest.raises(InvariantViolation, match="key index"):
            check_index(runtime.manager, runtime.arena)
        index.put(GROUP, key(9), 0)
