"""A lease that several processes hold: a scheduler plans, workers copy, and nobody's end gives slots away to others.

Also what a lease gives back of itself while it goes on.
"""

import asyncio
import os
import pickle
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvtier import BlockResult, InvalidArgument, LeaseError, LeaseLost, Tier, TierFull
from kvtier.v1 import blocks_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import SPEC, assert_bytes, block, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_cache
from tests.integration.seeing import session_of, tier_stats
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_dead_clients import break_connection
from tests.integration.touching import bytes_in, write_into
from tests.integration.waiting import PATIENCE_S, eventually

OK = BlockResult.OK
HOST = 8
KEYS = chain("shared", 4)
CROWD = chain("crowd", 2 * HOST)
cache = own_cache(host=HOST)


@pytest.fixture
async def theirs(other, cache):
    return await other.open_cache(cache.name, SPEC)


def fill(lease, keys, first=0):
    for index, key in enumerate(keys, first):
        write_into(lease.view(index), block(key))


def sent(ticket):
    return pickle.loads(pickle.dumps(ticket))  # noqa: S301  our own


async def host(client, cache):
    """Blank, held and free slots."""
    stats = await tier_stats(client, cache.name, Tier.HOST)
    return stats.blank, stats.held, stats.free


async def gone(client, pid):
    await eventually(lambda: session_of(client, pid), lambda session: session is None)


# -- three processes ---------------------------------------------------------------------------------------------------


async def hammer(cache, untouchable):
    """Wants more slots than there are, in every way; gets none of these."""
    for _ in range(10):
        with pytest.raises(TierFull):
            await cache.reserve(HOST - len(untouchable) + 1)
        async with cache.reserve(HOST - len(untouchable)) as lease:
            assert not set(lease.slots) & untouchable
            fill(lease, CROWD[: len(lease)])
        with pytest.raises(TierFull):
            await cache.put(CROWD, blocks(CROWD))
    await cache.drop(CROWD[:1])


async def test_a_schedulers_death_gives_nothing_away_under_its_workers(client, daemon, cache):
    with ExitStack() as stack:

        def actor(part, **script):
            return stack.enter_context(Actor(part, address=daemon.address, cache=cache.name, **script))

        scheduler = actor("plan", leases=[4])
        planned = scheduler.says()
        workers = [actor("work", tickets=planned["tickets"]) for _ in range(2)]
        assert [worker.says() for worker in workers] == [{"blank": [[0, 1, 2, 3]], "slots": planned["slots"]}] * 2
        slots = set(planned["slots"][0])
        workers[0].go_on(lease=0, at=0, key=KEYS[0].hex(), parts=[0], commit=False)
        workers[0].says()

        scheduler.kill()
        await gone(client, scheduler.pid)
        assert await host(client, cache) == (4, 4, HOST - 4)
        await hammer(cache, slots)

        workers[0].go_on(lease=0, at=0, key=KEYS[0].hex(), parts=[1], commit=True)
        assert workers[0].says() == {"results": ["OK"]}
        workers[1].go_on(lease=0, at=2, key=chain("alone", 1)[0].hex(), parts=[0, 1], commit=True)
        assert workers[1].says() == {"results": ["OK"]}
        workers[0].kill()
        await gone(client, workers[0].pid)
        assert await host(client, cache) == (2, 4, HOST - 4)
        await hammer(cache, slots)
        assert_bytes(KEYS[:1], await cache.get(KEYS[:1]))
        assert_bytes(chain("alone", 1), await cache.get(chain("alone", 1)))

        workers[1].kill()
        await gone(client, workers[1].pid)
    await (await cache.reserve(HOST)).release()


@pytest.mark.parametrize("dies", ["scheduler", "worker"])
async def test_a_restarted_daemon_honours_the_slots_while_one_holder_lives(short_dir, dies):
    """Its owner table has one word a slot: with one of two owners in it, the slot would go with that one."""
    with SupervisedDaemon(short_dir, sizes(host=HOST)) as daemon:
        async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
            with Actor("plan", address=daemon.address, cache="c", leases=[3]) as scheduler:
                planned = scheduler.says()
                with Actor("work", address=daemon.address, cache="c", tickets=planned["tickets"]) as worker:
                    worker.says()
                    doomed, heir = (scheduler, worker) if dies == "scheduler" else (worker, scheduler)
                    os.kill(daemon.pid, signal.SIGSTOP)
                    doomed.kill()
                    await asyncio.to_thread(daemon.kill)
                    await hammer(cache, set(planned["slots"][0]))
                    heir.kill()

                    async def reserved():
                        try:
                            async with cache.reserve(HOST):
                                return True
                        except TierFull:
                            return False

                    await eventually(reserved, bool)


# -- several holders ---------------------------------------------------------------------------------------------------


async def test_what_one_commits_is_a_block_that_all_hold(client, cache, theirs):
    lease = await cache.reserve(3)
    ticket = sent(lease.ticket())
    assert repr(ticket.secret) not in repr(ticket)
    async with theirs.join(ticket) as joined:
        assert (joined.slots, joined.blank, joined.tier) == (lease.slots, [0, 1, 2], Tier.HOST)
        fill(joined, KEYS[:2])
        assert await lease.commit(KEYS[:1]) == [OK]
        assert await joined.commit(KEYS[1:2], at=[1], parent=KEYS[0]) == [OK]
        await lease.release()
        assert await host(client, cache) == (1, 3, HOST - 3)
        assert (await cache.drop(KEYS[:1])).results == [BlockResult.HELD]
        fill(joined, KEYS[2:3], 2)
        assert await joined.commit(KEYS[2:3], at=[2], parent=KEYS[1]) == [OK]
    assert await host(client, cache) == (0, 0, HOST - 3)
    assert_bytes(KEYS[:3], await cache.get(KEYS[:3]))


async def test_a_slot_whose_key_was_stored_already_stays_with_the_others(client, cache, theirs):
    """They may still be writing it."""
    await cache.put(KEYS[:1], blocks(KEYS[:1]))
    async with cache.reserve(1) as lease, theirs.join(lease.ticket()) as joined:
        assert await lease.commit(KEYS[:1]) == [BlockResult.EXISTS]
        with pytest.raises(LeaseError, match="not held any more"):
            lease.view(0)
        assert await host(client, cache) == (1, 1, HOST - 2)
        fill(joined, KEYS[1:2])
        assert await joined.commit(KEYS[1:2], parent=KEYS[0]) == [OK]
    assert_bytes(KEYS[:2], await cache.get(KEYS[:2]))


async def test_a_part_that_one_gives_back_stays_with_the_others(client, cache, theirs):
    async with cache.reserve(3) as lease:
        async with theirs.join(lease.ticket()):
            await lease.give_back([0, 1])
            assert await host(client, cache) == (3, 3, HOST - 3)
        assert await host(client, cache) == (1, 1, HOST - 1)
        async with theirs.join(lease.ticket()) as late:
            assert (late.blank, len(late.slots)) == ([2], 3)
            with pytest.raises(LeaseError, match="not held any more"):
                late.view(1)


async def test_a_reader_hands_on_what_it_reads(client, cache, theirs):
    await cache.put(KEYS, blocks(KEYS))
    lease = await cache.acquire(KEYS)
    await lease.give_back([3])
    ticket = sent(lease.ticket())
    joined = await theirs.join(ticket)
    assert (joined.keys, joined.blocks, joined.prefix_length, joined.matched) == (tuple(KEYS), 3, 4, 4)
    await lease.release()
    await put_chain(cache, "crowd", HOST - 3)
    assert joined.unchanged()
    assert_bytes(KEYS[:3], [bytes_in(joined.view(index)) for index in range(3)])
    await joined.release()
    assert await host(client, cache) == (0, 0, 0)


async def test_a_broken_connection_orphans_slots_when_it_is_the_last(client, daemon, cache, theirs, raw):
    lease = await cache.reserve(2)
    cache_id = (await raw.open(cache.name)).cache_id
    ticket = lease.ticket()
    request = blocks_pb2.JoinRequest(cache_id=cache_id, lease_id=ticket.lease_id, secret=ticket.secret)
    assert tuple((await raw.call(raw.stubs.blocks.Join, request)).blank) == lease.slots
    raw.detach()
    await eventually(client.stats, lambda stats: any(not one.attached for one in stats.sessions))
    assert await host(client, cache) == (2, 2, HOST - 2)
    await lease.release()
    stats = await tier_stats(client, cache.name, Tier.HOST)
    assert (stats.blank, stats.orphaned) == (0, 2)
    raw.attach_again()
    await eventually(lambda: host(client, cache), lambda now: now == (2, 2, HOST - 2))


async def test_a_holder_heals_its_connection_and_a_kick_takes_its_own_hold_alone(client, cache, other, theirs):
    keys = chain("kicked", 2)
    lease = await cache.reserve(2)
    joined = await theirs.join(lease.ticket())
    await break_connection(other)
    assert await joined.commit(keys[:1]) == [OK]
    shown = [(one.session_id, one.blank_slots, one.held_blocks) for one in await client.leases()]
    assert shown == [(client.session_id, 1, 1), (other.session_id, 1, 1)]
    (explained,) = (await client.explain(keys[0], past=False)).blocks
    assert {one.session_id for one in explained.leases} == {client.session_id, other.session_id}
    await client.kick(other.session_id)
    assert await host(client, cache) == (1, 2, HOST - 2)
    with pytest.raises(LeaseLost):
        await eventually(lambda: joined.view(1), lambda view: False)
    fill(lease, keys[1:], 1)
    assert await lease.commit(keys[1:], at=[1], parent=keys[0]) == [OK]
    await lease.release()


async def test_a_ticket_is_refused_that_is_no_good(cache, theirs, other, name):
    lease = await cache.reserve(1)
    ticket = lease.ticket()
    with pytest.raises(LeaseError) as forged:
        await theirs.join(replace(ticket, secret=bytes(16)))
    assert forged.value.reason == "FOREIGN_LEASE"
    elsewhere = await other.open_cache(f"{name}-2", SPEC, budgets=sizes(host=1))
    with pytest.raises(InvalidArgument, match=f"ticket.cache = {name}: must be {name}-2"):
        await elsewhere.join(ticket)
    with pytest.raises(InvalidArgument, match="group"):
        await theirs.join(replace(ticket, group=1))
    reader = await other.open_cache(name, SPEC, write=False)
    with pytest.raises(InvalidArgument, match="write"):
        await reader.join(ticket)
    await lease.release()
    for call in (theirs.join(ticket), theirs.join(replace(ticket, lease_id=10**6))):
        with pytest.raises(LeaseError) as ended:
            await call
        assert ended.value.reason == "UNKNOWN_LEASE"
    with pytest.raises(LeaseError, match="released"):
        lease.ticket()


# -- a part of a lease -------------------------------------------------------------------------------------------------


async def test_a_store_of_slots_is_committed_a_few_at_a_time(client, cache):
    """One call a commit, and what it made is not held: the next ones may evict it."""
    lease = await cache.reserve(6)
    keys = chain("few", 6)
    for first in (0, 2):
        fill(lease, keys[first : first + 2], first)
        parent = keys[first - 1] if first else None
        assert await lease.commit(keys[first : first + 2], parent=parent, hold=False) == [OK] * 2
    assert lease.blank == [4, 5]
    assert await host(client, cache) == (2, 2, HOST - 6)
    with pytest.raises(LeaseError, match="not held any more"):
        lease.view(0)
    assert await lease.commit(chain("other", 2)[1:], parent=chain("absent", 1)[0], hold=False) == [
        BlockResult.PARENT_MISSING
    ]
    assert lease.blank == [4, 5]
    assert_bytes(keys[:4], await cache.get(keys[:4]))
    with pytest.raises(TierFull):
        await cache.put(CROWD, blocks(CROWD))
    assert (await cache.match(keys)).blocks == 0
    await lease.release()
    assert (await host(client, cache))[:2] == (0, 0)


async def test_a_sequence_is_rewound(client, cache):
    """Blank slots are free at once; the block is no longer held, and stays."""
    async with cache.reserve(5) as lease:
        fill(lease, KEYS[:2])
        assert await lease.commit(KEYS[:2]) == [OK] * 2
        await lease.give_back([1, 3, 4])
        assert (lease.blank, await host(client, cache)) == ([2], (1, 2, HOST - 3))
        assert (await cache.match(KEYS)).blocks == 2
        await lease.give_back([])
        for at, message in (([2, 3], "not held any more"), ([5], r"at\[0\] = 5: must be 0 to 4")):
            with pytest.raises((LeaseError, InvalidArgument), match=message):
                await lease.give_back(at)
        assert lease.blank == [2]
        fill(lease, chain("again", 1), 2)
        assert await lease.commit(chain("again", 1)) == [OK]
        await lease.give_back([0, 2])
        assert await host(client, cache) == (0, 0, HOST - 3)
