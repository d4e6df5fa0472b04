"""A call that is made again under its number is answered, not executed again."""

import asyncio
import random
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from kvtier import BlockResult, DeadlineExceeded, Tier, arena, transport
from kvtier.errors import LeaseError
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, common_pb2
from kvtier.wire import budgets_to_wire, spec_to_wire
from tests.integration.blocks import SPEC, assert_bytes, block, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.raw import attached, commit_request
from tests.integration.seeing import edge_stats, state, tier_stats
from tests.integration.stuck import stuck_disk
from tests.integration.touching import write_into
from tests.integration.waiting import PATIENCE_S, eventually

HOST, DISK = common_pb2.TIER_HOST, common_pb2.TIER_DISK
KEYS = chain("repeated", 2)
PACKED = b"".join(KEYS)


async def nothing_moves(raw):
    """What a call has set in motion, such as the deletion of what it dropped from disk, is over."""

    async def still():
        stats: admin_pb2.StatsResponse = await raw.call(raw.stubs.admin.Stats, admin_pb2.StatsRequest())
        return not any(tier.filling or tier.retiring for cache in stats.caches for tier in cache.tiers)

    await eventually(still, bool)


async def twice(raw, method, request):
    """The answer, after the same call has been made again to no effect."""
    first: Message = await raw.call(method, request)
    await nothing_moves(raw)
    before = await state(raw)
    again: Message = await raw.call(method, request)
    assert again == first
    assert await state(raw) == before
    return first


async def test_every_verb_that_changes_something_does_so_once(raw, name):
    caches, wire = raw.stubs.caches, raw.stubs.blocks
    budgets = budgets_to_wire(sizes(device=2, host=4, disk=8))
    opening = caches_pb2.OpenRequest(name=name, spec=spec_to_wire(SPEC), budgets=budgets, seq=1)
    opened = await twice(raw, caches.Open, opening)
    assert opened.created
    cache = opened.cache_id
    reserved = await twice(raw, wire.Reserve, blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=3, seq=2))
    commit = commit_request(cache, reserved, KEYS)
    commit.seq = 3
    # Executed again it would say EXISTS, or that the slots are not blank.
    assert (await twice(raw, wire.Commit, commit)).results == bytes([common_pb2.BLOCK_RESULT_OK] * 2)
    acquire = blocks_pb2.AcquireRequest(cache_id=cache, tier=HOST, chains=[blocks_pb2.Chain(keys=PACKED)], seq=4)
    acquired = await twice(raw, wire.Acquire, acquire)
    leases = [reserved.lease_id, acquired.chains[0].groups[0].lease_id]
    # Executed again these leases would be unknown.
    await twice(raw, wire.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=leases, seq=5))
    move = blocks_pb2.MoveRequest(cache_id=cache, to=DISK, keys=PACKED, seq=6)
    assert (await twice(raw, wire.Move, move)).results == bytes([common_pb2.BLOCK_RESULT_OK] * 2)
    # Executed again it would find nothing.
    dropped = await twice(raw, wire.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=PACKED, seq=7))
    assert dropped.dropped == 2
    await twice(raw, caches.Close, caches_pb2.CloseRequest(cache_id=cache, seq=8))


async def test_a_refused_call_has_changed_nothing_and_runs_anew(raw, name):
    cache = (await raw.open(name, budgets=sizes(host=2))).cache_id
    held = await raw.reserve(cache, Tier.HOST, 2)
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=1, seq=1)
    before = await state(raw)
    for _ in range(2):
        assert (await raw.refusal(raw.stubs.blocks.Reserve, request)).reason == "TIER_FULL"
    assert await state(raw) == before
    await raw.call(raw.stubs.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[held.lease_id]))
    assert len((await twice(raw, raw.stubs.blocks.Reserve, request)).slots) == 1


async def test_a_number_belongs_to_one_call(raw, name):
    wire = raw.stubs.blocks
    cache = (await raw.open(name, budgets=sizes(host=4))).cache_id
    await raw.call(wire.Reserve, blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=1, seq=77))
    before = await state(raw)
    for method, request in (
        (wire.Reserve, blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=2, seq=77)),
        (wire.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=PACKED, seq=77)),
    ):
        fault = await raw.refusal(method, request)
        assert (fault.code, fault.detail.field, fault.detail.value) == (grpc.StatusCode.INVALID_ARGUMENT, "seq", "77")
        assert await state(raw) == before


async def test_sessions_number_their_calls_for_themselves(daemon, raw, name):
    cache = (await raw.open(name, budgets=sizes(host=4))).cache_id
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=1, seq=5)
    mine = await raw.call(raw.stubs.blocks.Reserve, request)
    async with attached(daemon.address) as other:
        await other.open(name)
        theirs = await other.call(other.stubs.blocks.Reserve, request)
    assert mine.lease_id != theirs.lease_id
    assert list(mine.slots) != list(theirs.slots)


async def test_what_a_cancelled_call_got_is_learned_by_asking_again(client, raw, name):
    """An answer on its way while the call is cancelled grants slots that nobody knows of: only its number does."""
    cache = (await raw.open(name, budgets=sizes(host=4))).cache_id
    generator = random.Random(5)
    for seq in range(1, 60):
        request = blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=4, seq=seq)
        call = asyncio.ensure_future(raw.call(raw.stubs.blocks.Reserve, request))
        for _ in range(generator.randrange(6)):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        lease = (await raw.call(raw.stubs.blocks.Reserve, request)).lease_id
        await raw.call(raw.stubs.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[lease]))
    stats = await tier_stats(client, name, Tier.HOST)
    assert (stats.free, stats.held) == (4, 0)


async def test_the_client_gives_back_what_its_cancelled_calls_got(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=2, host=4))
    generator = random.Random(6)

    async def take():
        await (cache.reserve(1, Tier.HOST) if generator.random() < 0.5 else cache.acquire(KEYS, Tier.HOST))

    await cache.put(KEYS, blocks(KEYS), tier=Tier.HOST)
    for _ in range(60):
        task = asyncio.create_task(take())
        for _ in range(generator.randrange(10)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await cache.release_all()
    stats = await eventually(lambda: tier_stats(client, name, Tier.HOST), lambda stats: not stats.held)
    assert stats.blank == 0


@pytest.fixture
async def small_cache(client, name):
    return await client.open_cache(name, SPEC, budgets=sizes(host=8))


async def test_a_commit_can_end_its_lease(client, small_cache):
    keys = chain("together", 3)
    await small_cache.put(keys[:1], blocks(keys[:1]))
    lease = await small_cache.reserve(5, Tier.HOST)
    for index, key in enumerate(keys):
        write_into(lease.view(index), block(key))
    assert await lease.commit(keys, release=True) == [BlockResult.EXISTS, BlockResult.OK, BlockResult.OK]
    assert lease.released
    assert await client.leases(cache=small_cache.name) == []
    with pytest.raises(LeaseError):
        lease.view(0)
    async with small_cache.reserve(5, Tier.HOST) as rest:
        assert len(rest) == 5, "its blank slots, and that of the block that was there, came back"
        assert_bytes(keys, await small_cache.get(keys))


async def test_it_ends_with_slots_that_stayed_blank_too(client, small_cache):
    parent, child = chain("orphan", 2)
    lease = await small_cache.reserve(1, Tier.HOST)
    assert await lease.commit([child], parent=parent, release=True) == [BlockResult.PARENT_MISSING]
    assert await client.leases(cache=small_cache.name) == []
    async with small_cache.reserve(8, Tier.HOST) as everything:
        assert len(everything) == 8


@pytest.mark.parametrize("cancelled", [False, True])
async def test_all_others_are_released_beside_one_that_has_not_answered(client, small_cache, cancelled):
    """Whichever of the two the daemon hears first."""
    keys = await put_chain(small_cache, "others", 2)
    for turns in range(12):
        others = [await small_cache.acquire(keys) for _ in range(2)]
        lease = await small_cache.reserve(1, Tier.HOST)
        commit = asyncio.create_task(lease.commit(chain(f"mine {turns}", 1), release=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        if cancelled:
            commit.cancel()
        await small_cache.release_all()
        await asyncio.wait([commit])
        assert all(each.released for each in (*others, lease))
        assert await client.leases(cache=small_cache.name) == []
        assert commit.cancelled() or commit.exception() is None or isinstance(commit.exception(), LeaseError)


@pytest.mark.parametrize(
    "take",
    [lambda cache: cache.reserve(2, Tier.HOST), lambda cache: cache.acquire(KEYS, Tier.HOST)],
    ids=["reserve", "acquire"],
)
async def test_what_a_given_up_call_got_comes_back_from_a_daemon_that_hangs(start_daemon, take, monkeypatch):
    """The answer is lost, and while the daemon hangs no attempt to give back what was granted can succeed."""
    monkeypatch.setattr(arena, "_GIVE_BACK_S", 0.05)
    daemon = start_daemon(host=8)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        await cache.put(KEYS, blocks(KEYS))
        granted, send = asyncio.Event(), transport.send

        async def unheard(*call):
            await send(*call)
            granted.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as deaf:
            deaf.setattr(arena, "send", unheard)
            taking = asyncio.ensure_future(take(cache))
            await granted.wait()
            daemon.pause()
            taking.cancel()
            await asyncio.wait([taking])
        with pytest.raises(DeadlineExceeded):
            await client.stats(timeout=0.5)
        daemon.resume()
        await eventually(client.leases, lambda held: not held)


async def test_a_cache_closes_behind_a_reserve_that_was_given_up(start_daemon):
    """It was refused: what nobody had waited for any more was still leased when the daemon came to the close."""
    daemon = start_daemon(host=8)
    async with opened_cache(daemon.address, "mine", wait=PATIENCE_S) as (client, cache):
        daemon.pause()
        reserving = asyncio.ensure_future(cache.reserve(2, Tier.HOST))
        await passes()
        reserving.cancel()
        await passes()
        closing = asyncio.ensure_future(cache.close())
        await passes()
        daemon.resume()
        with suppress(asyncio.CancelledError):
            await reserving
        await closing
        assert await client.leases() == []
        await (await client.open_cache("mine", SPEC)).close()


async def test_a_move_that_waits_is_one_move_for_all_who_ask_under_its_number(start_daemon):
    daemon, keys = start_daemon(host=8, disk=8), chain("moved", 4)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache), attached(daemon.address) as raw:
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        cache_id = (await raw.open("c")).cache_id
        request = blocks_pb2.MoveRequest(cache_id=cache_id, to=DISK, keys=b"".join(keys), seq=1)

        async def under_way():
            return (await tier_stats(client, "c", Tier.DISK)).filling

        with stuck_disk(daemon, "c") as disk:
            first, second, third = (asyncio.ensure_future(raw.call(raw.stubs.blocks.Move, request)) for _ in range(3))
            assert await eventually(under_way, bool) == 4
            first.cancel()
            await asyncio.wait([first])
            assert await under_way() == 4
            disk.release()
            assert {(await each).results for each in (second, third)} == {bytes([common_pb2.BLOCK_RESULT_OK] * 4)}
        edge = await edge_stats(client, "c", "host>disk")
        assert edge is not None and edge.blocks == 4


async def passes():
    """What has begun says to the daemon what it has to say: that takes turns of the loop, and no answer."""
    for _ in range(50):
        await asyncio.sleep(0)
