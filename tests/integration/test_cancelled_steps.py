"""A step that is cancelled loses nothing: a watch, a listing and a mirror keep their place."""

import asyncio
import gc
from typing import Any

import pytest

from kvtier import BlockResult, Cursor, EventType, Mirror, MirrorState
from tests.integration.blocks import blocks, chain
from tests.integration.seeing import last_event
from tests.integration.waiting import PATIENCE_S, eventually, patient

KEYS = chain("cancelled", 4)
OK = [BlockResult.OK] * len(KEYS)


async def cancelled(step):
    """Lets the step begin, and cancels it before any answer can have come."""
    task = asyncio.ensure_future(step)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_watch_that_is_closed_ends_for_a_task_that_waits(client, cache):
    watch = client.watch(caches=[cache.name], types=[EventType.STORED])
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_a_watch_abandoned_in_a_step_ends_quietly_with_its_client(daemon, cache, caplog):
    async with await patient(daemon.address) as other:
        await cancelled(anext(other.watch(caches=[cache.name])))
    await eventually(lambda: [task for task in asyncio.all_tasks() if "Watch" in repr(task)], lambda left: not left)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("listing", ["pages", "blocks"])
async def test_a_listing_repeats_a_cancelled_step(cache, listing):
    assert await cache.put(KEYS, blocks(KEYS)) == OK
    rows = cache.pages(page_blocks=1) if listing == "pages" else cache.blocks()
    found: list[Any] = []
    for _ in range(2 if listing == "pages" else 1):  # later blocks of a page come without a wait
        step = asyncio.ensure_future(anext(rows))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait([step])
        found += [] if step.cancelled() else [step.result()]  # the answer may have come first
        found.append(await anext(rows))
    found += [row async for row in rows]
    listed = [block for page in found for block in page.blocks] if listing == "pages" else found
    assert [block.key for block in listed] == KEYS


async def test_a_mirror_follows_on_when_a_wait_for_it_is_cancelled(client, cache):
    async with Mirror(client, [cache.name]) as mirror:
        now = await last_event(client)
        await cancelled(mirror.synced(Cursor(now.epoch, now.id + 1), timeout=PATIENCE_S))
        assert await cache.put(KEYS, blocks(KEYS)) == OK
        await mirror.synced(await last_event(client), timeout=PATIENCE_S)
        assert (mirror.state, mirror.resyncs) == (MirrorState.EXACT, 0)
        assert mirror.longest_prefix(KEYS) == len(KEYS)
