"""Bytes go along every edge and arrive as they were.

What moved is seen three times: in the bytes, in the counters of the edge, and in the events.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from kvtier import BlockResult, Cause, Event, EventType, Tier
from kvtier.abi.words import TIERS
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.seeing import edge_stats

EDGES = list(permutations(TIERS, 2))
COUNT = 6


async def stored_in(cache, tier, keys):
    """Puts a chain where only ``tier`` has it."""
    await cache.put(keys, blocks(keys), tier=Tier.HOST if tier is Tier.HOST else Tier.DEVICE)
    if tier is Tier.DISK:
        assert set(await cache.move(keys, Tier.DISK)) == {BlockResult.OK}
    assert set((await cache.match(keys)).residency) == {tier.bit}


async def counted(client, cache, src, dst):
    edge = await edge_stats(client, cache.name, f"{src}>{dst}")
    return (edge.blocks, edge.bytes, edge.failures) if edge else (0, 0, 0)


def ids(edge):
    return f"{edge[0]}-{edge[1]}"


@pytest.mark.parametrize("edge", EDGES, ids=ids)
async def test_a_move_goes_along_its_edge(client, name, edge):
    src, dst = edge
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=COUNT, host=COUNT, disk=2 * COUNT))
    keys = chain(name, COUNT)
    await stored_in(cache, src, keys)
    before = await counted(client, cache, src, dst)
    async with client.watch(since=(await cache.match(keys)).as_of, caches=[name]) as watch:
        assert set(await cache.move(keys, dst)) == {BlockResult.OK}
        moved: list[Event] = []
        while sum(len(event.keys) for event in moved) < COUNT:
            event = await anext(watch)
            assert isinstance(event, Event)
            moved.append(event)
    after = await counted(client, cache, src, dst)
    assert [b - a for a, b in zip(before, after, strict=True)] == [COUNT, COUNT * SLOT_BYTES, 0]
    assert {(event.type, event.moved_from, event.moved_to) for event in moved} == {(EventType.UPDATED, src, dst)}
    assert {event.cause for event in moved} == {Cause.EXPLICIT if dst > src else Cause.PREFETCH}
    assert sum(event.moved_bytes for event in moved) == COUNT * SLOT_BYTES
    assert sorted(key for event in moved for key in event.keys) == sorted(keys)
    there = set((await cache.match(keys)).residency)
    assert there == {dst.bit | src.bit if src is Tier.DISK else dst.bit}
    assert there == {where for event in moved for where in event.residency}
    assert_bytes(keys, await cache.get(keys, tier=dst if dst is not Tier.DISK else Tier.HOST))
