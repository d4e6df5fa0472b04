"""Commits and releases wait for the caller's own work, and what becomes of the lease where that takes too long."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier import BlockResult, Client, DeadlineExceeded, InvalidArgument, Tier, session
from tests.integration.blocks import SPEC, block, blocks, chain, sizes
from tests.integration.conftest import own_cache
from tests.integration.gate import Gate
from tests.integration.seeing import tier_stats
from tests.integration.touching import write_into
from tests.integration.waiting import PATIENCE_S, eventually, patient

KEYS = chain("fenced", 3)
OK = [BlockResult.OK] * 3
SOON_S = 0.05
cache = own_cache(device=8, host=8)


def fill(lease):
    for index, key in enumerate(KEYS):
        write_into(lease.view(index), block(key))


async def written(cache):
    lease = await cache.reserve(3, Tier.DEVICE)
    fill(lease)
    return lease


async def read(cache):
    assert await cache.put(KEYS, blocks(KEYS), tier=Tier.DEVICE) == OK
    return await cache.acquire(KEYS, Tier.DEVICE)


async def held(client, cache):
    """Leased slots of the device tier, as the daemon sees them: blank ones, and all."""
    stats = await tier_stats(client, cache.name, Tier.DEVICE)
    return stats.blank, stats.held


async def begun(call, gate):
    """The call, when it waits at the gate."""
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(gate.asked.wait, PATIENCE_S)
    return task


async def release_across(cache, lease, gate):
    await lease.release()
    await (await cache.across.acquire(KEYS, Tier.DEVICE)).release(stream=gate)


GIVE_BACK = {
    "a release": lambda client, cache, lease, gate: lease.release(stream=gate),
    "a release of all groups": lambda client, cache, lease, gate: release_across(cache, lease, gate),
    "a part of a lease": lambda client, cache, lease, gate: lease.give_back([0, 1], stream=gate),
    "the cache's close": lambda client, cache, lease, gate: cache.close(stream=gate),
    "the client's close": lambda client, cache, lease, gate: client.close(stream=gate),
}


@pytest.mark.parametrize("way", GIVE_BACK)
async def test_slots_are_given_back_after_the_work(client, daemon, cache, way):
    async with await patient(daemon.address) as other:
        theirs, gate = await other.open_cache(cache.name, SPEC), Gate()
        lease = await read(theirs)
        task = await begun(GIVE_BACK[way](other, theirs, lease, gate), gate)
        assert await held(client, cache) == (0, 3)
        gate.open()
        await task
        assert await held(client, cache) == (0, 1 if way == "a part of a lease" else 0)


async def test_a_commit_whose_time_is_up_has_sent_nothing_and_can_be_made_again(client, cache):
    gate, lease = Gate(), await written(cache)
    with pytest.raises(DeadlineExceeded, match="nothing was sent") as caught:
        await lease.commit(KEYS, stream=gate, timeout=SOON_S)
    assert caught.value.reason == "WORK_UNFINISHED"
    assert (lease.blank, lease.released) == ([0, 1, 2], False)
    assert await held(client, cache) == (3, 3)
    assert await lease.commit(KEYS) == OK
    await lease.release()


async def test_a_commit_that_is_cancelled_meanwhile_has_sent_nothing(client, cache):
    gate, lease = Gate(), await written(cache)
    task = await begun(lease.commit(KEYS, stream=gate, release=True), gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    assert await held(client, cache) == (3, 3)
    assert await lease.commit(KEYS, release=True) == OK


@pytest.mark.parametrize(
    "call",
    [lambda lease, **more: lease.cache.release(lease, **more), lambda lease, **more: lease.give_back([0, 1], **more)],
    ids=["all", "some"],
)
async def test_a_release_whose_time_is_up_has_sent_nothing_and_can_be_made_again(client, cache, call):
    gate, lease = Gate(), await read(cache)
    with pytest.raises(DeadlineExceeded, match="they are held"):
        await call(lease, stream=gate, timeout=SOON_S)
    assert (lease.released, lease.blocks) == (False, 3)
    assert await held(client, cache) == (0, 3)
    assert len(lease.view(0)) == 2
    await call(lease)
    await cache.release(lease)
    assert await held(client, cache) == (0, 0)


async def test_a_release_that_is_cancelled_meanwhile_goes_on_by_itself(client, cache):
    gate, lease = Gate(), await read(cache)
    task = await begun(lease.release(stream=gate), gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await held(client, cache) == (0, 3)
    gate.open()
    await eventually(lambda: held(client, cache), lambda now: now == (0, 0))


async def test_what_is_no_stream_is_refused(cache):
    lease = await read(cache)
    with pytest.raises(InvalidArgument, match="stream = "):
        await lease.release(stream=-1)
    assert not lease.released
    await lease.release(stream=0)


async def test_no_goodbye_is_said_to_work_that_does_not_end(client, daemon, cache, monkeypatch):
    """The slots stay out of circulation until the process, which may still touch them, is gone."""
    monkeypatch.setattr(session, "_WORK_GRACE_S", SOON_S)
    other = await patient(daemon.address)
    lease = await read(await other.open_cache(cache.name, SPEC))
    await other.close(stream=Gate())
    assert (await held(client, cache), lease.released) == ((0, 3), False)
    assert (await cache.drop(KEYS)).results == [BlockResult.HELD] * 3


def test_the_synchronous_client_waits_alike(daemon, name):
    with Client(daemon.address) as client, ThreadPoolExecutor(1) as thread:
        cache = client.open_cache(name, SPEC, budgets=sizes(device=8, host=8))
        lease = cache.reserve(3, Tier.DEVICE)
        fill(lease.inner)
        gate = Gate()
        with pytest.raises(DeadlineExceeded):
            lease.commit(KEYS, stream=gate, timeout=SOON_S)
        committing = thread.submit(lambda: lease.commit(KEYS, stream=gate))
        assert not committing.done()
        assert cache.match(KEYS).blocks == 0
        gate.open()
        assert committing.result(PATIENCE_S) == OK
        gate = Gate()
        releasing = thread.submit(lambda: cache.release(lease, stream=gate))
        assert gate.asked.wait(PATIENCE_S)
        assert next(each.held_slots for each in client.stats().sessions if each.session_id == client.session_id) == 3
        gate.open()
        releasing.result(PATIENCE_S)
        assert np.array_equal(np.concatenate(cache.get(KEYS)), np.concatenate(blocks(KEYS)))
        with cache.acquire(KEYS, Tier.DEVICE) as reading:
            reading.give_back([0], stream=0)
        cache.close(stream=0)
