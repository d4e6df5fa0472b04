"""The event stream: where it begins, what it lets through, and that it alone is enough to know where every block is."""

import asyncio

import grpc
import pytest

from kvtier import Cause, Cursor, Event, EventType, Gap, SnapshotEnd, SnapshotSlice, SnapshotStart, Tier
from kvtier.abi.words import TIERS
from kvtier.v1 import events_pb2
from tests.integration.blocks import SPEC, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_cache
from tests.integration.models import VSWA, content, groups_of
from tests.integration.raw import refusal
from tests.integration.residency import ResidencyTable, snapshot
from tests.integration.seeing import cache_stats, last_event
from tests.integration.waiting import PATIENCE_S, eventually

DEVICE, HOST, DISK = (tier.bit for tier in TIERS)
cache = own_cache(device=4, host=8, disk=16)


async def until(watch, end):
    """The events up to a cursor that lies ahead, or is reached already."""
    found: list[Event] = []
    async with asyncio.timeout(PATIENCE_S):
        while watch.cursor is None or watch.cursor < end:
            item = await anext(watch)
            assert not isinstance(item, Gap), item
            if isinstance(item, Event):
                found.append(item)
    return found


async def a_life(cache, keys):
    """Stored on the device, down to the host and to the disk, up again, dropped."""
    await cache.put(keys, blocks(keys))
    await cache.move(keys, Tier.HOST)
    await cache.move(keys, Tier.DISK)
    await cache.move(keys, Tier.DEVICE)
    await cache.drop(keys[:1])


async def test_a_blocks_life_in_events(client, name):
    start = await last_event(client)
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=8, disk=16))
    keys = chain(name, 2)
    await a_life(cache, keys)
    async with client.watch(since=start, heartbeat_s=0.05, heartbeats=True) as watch:
        events = await until(watch, await last_event(client))
    assert [event.event_id for event in events] == list(range(start.id + 1, start.id + 1 + len(events)))
    assert {(event.cache, event.group, event.epoch) for event in events} == {(name, 0, start.epoch)}
    created, *others = events
    assert (created.type, created.num_blocks_per_cache_level) == (EventType.CREATED, (4, 8, 16))
    steps: dict[tuple[EventType, Cause | int, Tier | None, Tier | None], list[tuple[bytes, int]]] = {}
    for event in others:
        kind = (event.type, event.cause, event.moved_from, event.moved_to)
        residency = event.residency or bytes(len(event.keys))
        steps.setdefault(kind, []).extend(zip(event.keys, residency, strict=True))
    up, down = keys, keys[::-1]
    assert {kind: sorted(found) for kind, found in steps.items()} == {
        (EventType.STORED, Cause.COMMIT, None, None): sorted((key, DEVICE) for key in up),
        (EventType.UPDATED, Cause.EXPLICIT, Tier.DEVICE, Tier.HOST): sorted((key, HOST) for key in up),
        (EventType.UPDATED, Cause.EXPLICIT, Tier.HOST, Tier.DISK): sorted((key, DISK) for key in up),
        (EventType.UPDATED, Cause.PREFETCH, Tier.DISK, Tier.DEVICE): sorted((key, DEVICE | DISK) for key in up),
        (EventType.REMOVED, Cause.ANCESTOR, None, None): [(keys[1], 0)],
        (EventType.REMOVED, Cause.EXPLICIT, None, None): [(keys[0], 0)],
    }
    gone = [key for event in events if event.type is EventType.REMOVED for key in event.keys]
    assert gone == down, "children go before their parents"
    stored = [event for event in events if event.type is EventType.STORED]
    assert [parent for event in stored for parent in event.parents] == [None, keys[0]]
    assert [rank for event in stored for rank in event.priorities] == [35, 35]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"types": [EventType.STORED]}, {"commit"}),
        ({"types": [EventType.REMOVED]}, {"explicit removal", "ancestor"}),
        ({"causes": [Cause.PREFETCH, Cause.ANCESTOR]}, {"prefetch", "ancestor"}),
        ({"tiers": [Tier.HOST]}, {"to host", "to disk"}),
        ({"tiers": [Tier.DEVICE]}, {"commit", "to host", "prefetch"}),
        ({"tiers": [Tier.DISK], "types": [EventType.UPDATED]}, {"to disk", "prefetch"}),
        ({"types": [EventType.STORED], "causes": [Cause.PREFETCH]}, set()),
        ({"caches": ["someone-else"]}, set()),
    ],
    ids=lambda value: "-".join(f"{key}" for key in value) if isinstance(value, dict) else "",
)
async def test_filters(client, cache, filters, wanted):
    names = {
        (EventType.STORED, Cause.COMMIT, None): "commit",
        (EventType.UPDATED, Cause.EXPLICIT, Tier.HOST): "to host",
        (EventType.UPDATED, Cause.EXPLICIT, Tier.DISK): "to disk",
        (EventType.UPDATED, Cause.PREFETCH, Tier.DEVICE): "prefetch",
        (EventType.REMOVED, Cause.EXPLICIT, None): "explicit removal",
        (EventType.REMOVED, Cause.ANCESTOR, None): "ancestor",
    }
    start = await last_event(client)
    await a_life(cache, chain(cache.name, 2))
    async with client.watch(since=start, heartbeat_s=0.05, heartbeats=True, **filters) as watch:
        events = await until(watch, await last_event(client))
    assert {names[event.type, Cause(event.cause), event.moved_to] for event in events} == wanted


async def test_a_watch_of_some_keys_sees_only_their_blocks(client, cache):
    """In events of many blocks, and in a snapshot's slices; ranges join, so nothing is reported lost."""
    one, other = chain(f"{cache.name} one", 4), chain(f"{cache.name} other", 4)
    start = await last_event(client)
    await cache.put(one, blocks(one))
    await cache.put(other, blocks(other))
    wanted: list[bytes | str] = [one[1], other[3][:5].hex()]
    table, _ = await snapshot(client, caches=[cache.name], keys=wanted)
    assert table.blocks(cache.name).keys() == {one[1], other[3]}
    await cache.move(one[:2], Tier.DISK)
    async with client.watch(since=start, keys=wanted, heartbeat_s=0.05, heartbeats=True) as watch:
        events = await until(watch, await last_event(client))
        assert watch.lag == 0
    assert {key for event in events for key in event.keys} == {one[1], other[3]}
    assert {event.type for event in events} == {EventType.STORED, EventType.UPDATED}
    parents = dict(zip(one[1:], one, strict=False)) | dict(zip(other[1:], other, strict=False))
    for event in events:
        if event.type is EventType.STORED:
            assert event.parents == [parents[key] for key in event.keys]
        else:
            assert event.moved_bytes == len(event.keys) * SPEC.record_bytes(0)


async def test_a_watch_of_some_groups_sees_nothing_of_others(start_for, name):
    daemon = start_for(VSWA, host=8)
    async with opened_cache(daemon.address, name, spec=VSWA, wait=PATIENCE_S) as (client, cache):
        for group in groups_of(VSWA):
            keys = chain("groups", 2)
            await cache.in_group(group).put(keys, content(VSWA, group, keys))
        seen: list[int] = []
        async with client.watch(snapshot=True, caches=[name], groups=[0, 2]) as watch, asyncio.timeout(PATIENCE_S):
            async for item in watch:
                if isinstance(item, SnapshotSlice):
                    seen.append(item.group)
                if isinstance(item, SnapshotEnd):
                    break
        assert seen == [0, 2]
        async with client.watch(oldest=True, caches=[name], groups=[2], heartbeat_s=0.05, heartbeats=True) as watch:
            events = await until(watch, await last_event(client))
        assert {(event.type, event.group) for event in events} == {(EventType.CREATED, 2), (EventType.STORED, 2)}


async def test_a_watch_without_a_start_begins_when_it_is_entered(client, cache):
    """Not when it is first asked for an item: what happens in between would be lost in silence."""
    await a_life(cache, chain("before", 2))
    start = await last_event(client)
    async with client.watch(heartbeats=True, heartbeat_s=0.05) as watch:
        await a_life(cache, chain("after", 2))
        events = await until(watch, await last_event(client))
    assert events[0].event_id == start.id + 1
    assert {key for event in events for key in event.keys} == set(chain("after", 2))


async def test_reservations_and_lookups_are_no_events(client, cache):
    keys = await put_chain(cache, cache.name, 2)
    start = await last_event(client)
    async with cache.reserve(2), cache.acquire(keys):
        await cache.match(keys)
        await cache.locate(keys)
    assert await last_event(client) == start


async def test_a_snapshot_is_exact_at_its_end(client, raw, name):
    """Its slices are taken while blocks are stored, moved and dropped, so none is true of one moment. Compared with
    the events from the cache's beginning on, which say what was true at any."""
    start = await last_event(client)
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=8, host=1500, disk=16))
    cache_id = (await raw.open(name)).cache_id
    many = chain(f"{name} settled", 1400)
    await raw.store(cache_id, Tier.HOST, many)

    work = asyncio.gather(*(_traffic(cache, 12, f"writer {index}") for index in range(3)))
    taken: list[tuple[Cursor, dict[bytes, int]]] = []
    while not work.done():
        taken.append(await _snapshot(client, name))
    await work
    end = await _quiet(client, cache)
    taken.append(await _snapshot(client, name))
    assert taken[-1] == (end, {block.key: block.residency async for block in cache.blocks()})

    async with client.watch(since=start, caches=[name], heartbeats=True, heartbeat_s=0.05) as watch:
        history = await until(watch, end)
    truth, told = ResidencyTable(), 0
    for cursor, blocks_then in taken:
        while told < len(history) and history[told].cursor <= cursor:
            truth.apply(history[told])
            told += 1
        assert truth.blocks(name, 0) == blocks_then, f"at {cursor}"
    assert len(taken) > 3


async def _snapshot(client, name):
    """A snapshot's end, and what slices and events have said up to there."""
    table, kinds = ResidencyTable(), []
    async with client.watch(snapshot=True, caches=[name]) as watch, asyncio.timeout(PATIENCE_S):
        while True:
            item = await anext(watch)
            kinds.append(type(item))
            table.apply(item)
            if isinstance(item, SnapshotEnd):
                break
    assert kinds[0] is SnapshotStart
    assert kinds.count(SnapshotSlice) > 1
    return item.cursor, dict(table.blocks(name))


async def _traffic(cache, count, who="traffic"):
    """Chains of two, some extended, read and dropped again; every number of them is the same each time."""
    for index in range(count):
        keys = await put_chain(cache, f"{who} {index}", 2)
        if index % 3 == 0:
            await cache.get(chain(f"{who} {index // 2}", 2))
        if index % 5 == 0:
            await cache.drop(keys[1:])


async def _quiet(client, cache):
    """The cursor at which nothing moves any more."""
    await eventually(
        lambda: cache_stats(client, cache.name),
        lambda stats: not any(tier.filling or tier.retiring for tier in stats.tiers),
    )
    return await last_event(client)


def filtered(packed):
    """A request whose filter is these bytes: numbers that are no enum can be said only so."""
    return events_pb2.WatchRequest(filter=events_pb2.WatchFilter.FromString(packed))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (events_pb2.WatchRequest(heartbeat_ns=1), "heartbeat_ns"),
        (events_pb2.WatchRequest(heartbeat_ns=2**63), "heartbeat_ns"),
        (events_pb2.WatchRequest(filter=events_pb2.WatchFilter(caches=["ok", "no spaces"])), "filter.caches[1]"),
        (events_pb2.WatchRequest(filter=events_pb2.WatchFilter(groups=[16])), "filter.groups[0]"),
        (events_pb2.WatchRequest(filter=events_pb2.WatchFilter(key_prefixes=[b""])), "filter.key_prefixes[0]"),
        (filtered(b"\x0a\x01\x63"), "filter.types[0]"),  # 99
        (filtered(b"\x0a\x01\x00"), "filter.types[0]"),  # unspecified
        (filtered(b"\x12\x01\x63"), "filter.causes[0]"),
        (filtered(b"\x1a\x01\x63"), "filter.tiers[0]"),
    ],
    ids=str,
)
async def test_a_bad_watch_is_refused(raw, request_, field):
    stream = raw.stubs.events.Watch(request_, metadata=raw.metadata)
    fault = await refusal(stream.read())
    assert (fault.code, fault.detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
