"""A daemon that does not answer: calls end in time, and nothing stays leased."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, Final

import pytest

from kvtier import Client, Tier, connect
from kvtier.errors import DeadlineExceeded
from tests.integration.blocks import SPEC, blocks, chain
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import PATIENCE_S, eventually

SLOTS: Final = 16
TIMEOUT_S: Final = 0.2
SLACK_S: Final = 3.0
"""A busy machine may take so much longer, over all calls of a test together."""
CALLS: Final = 20

KEYS: Final = chain("kept", 8)
MAPPED, ON_DISK = KEYS[:4], KEYS[4:]
LONG: Final = chain("long", 4000)
"""128 KB in one request: two of them fill the socket of a daemon that does not read."""

Call = Callable[[Any, Any], Any]
"""Of a client and its cache, either the asynchronous ones or the synchronous ones."""

VERBS: Final[Mapping[str, Call]] = {
    "reserve": lambda client, cache: cache.reserve(2, timeout=TIMEOUT_S),
    "drop": lambda client, cache: cache.drop(LONG, timeout=TIMEOUT_S),
    "acquire": lambda client, cache: cache.acquire([*MAPPED, *LONG], timeout=TIMEOUT_S),
    "move": lambda client, cache: cache.move(LONG, Tier.DISK, timeout=TIMEOUT_S),
    "put": lambda client, cache: cache.put(LONG[:2], blocks(LONG[:2]), timeout=TIMEOUT_S),
    "stream_put": lambda client, cache: cache.stream_put(LONG[:2], blocks(LONG[:2]), timeout=TIMEOUT_S),
    "stream_get": lambda client, cache: cache.stream_get(KEYS, timeout=TIMEOUT_S),
    "explain": lambda client, cache: client.explain(KEYS[0], timeout=TIMEOUT_S),
    "stats": lambda client, cache: client.stats(timeout=TIMEOUT_S),
}


@contextmanager
def paused(daemon: DaemonProcess) -> Iterator[None]:
    """Goes on in the end, and at the latest when a call that should have ended long ago is still waiting."""
    late = threading.Timer(PATIENCE_S, daemon.resume)
    daemon.pause()
    late.start()
    try:
        yield
    finally:
        late.cancel()
        daemon.resume()


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(host=SLOTS, disk=4 * SLOTS)


async def fill(daemon):
    """A chain of which the first half is in mapped memory and the whole on disk."""
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        await cache.put(KEYS, blocks(KEYS))
        await cache.move(KEYS, Tier.DISK)
        async with cache.acquire(MAPPED, Tier.HOST):
            pass


async def all_is_given_back(client, cache):
    await eventually(client.leases, lambda held: not held)
    async with cache.reserve(SLOTS) as everything:
        assert len(everything) == SLOTS


async def test_every_call_ends_at_its_deadline(daemon):
    await fill(daemon)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)

        async def call(verb):
            with pytest.raises(DeadlineExceeded):
                await VERBS[verb](client, cache)

        with paused(daemon):
            began = time.monotonic()
            await asyncio.gather(*(call(verb) for verb in islice(cycle(VERBS), CALLS)))
            for verb in islice(cycle(VERBS), CALLS):
                await call(verb)
            assert time.monotonic() - began < (1 + CALLS) * TIMEOUT_S + SLACK_S
        await all_is_given_back(client, cache)


async def test_every_call_of_a_thread_ends_at_its_deadline(daemon):
    await fill(daemon)

    def calls():
        with Client(daemon.address) as client, ThreadPoolExecutor(CALLS) as threads:
            cache = client.open_cache("c", SPEC)

            def call(verb):
                with pytest.raises(DeadlineExceeded):
                    VERBS[verb](client, cache)

            with paused(daemon):
                began = time.monotonic()
                list(threads.map(call, islice(cycle(VERBS), CALLS)))
                for verb in islice(cycle(VERBS), CALLS):
                    call(verb)
                taken = time.monotonic() - began
            until = time.monotonic() + PATIENCE_S
            while client.leases():
                assert time.monotonic() < until, "slots stayed leased"
            with cache.reserve(SLOTS):
                return taken

    assert await asyncio.to_thread(calls) < (1 + CALLS) * TIMEOUT_S + SLACK_S


async def test_a_watch_that_cannot_begin_says_so(daemon):
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        with paused(daemon):
            began = time.monotonic()
            begun = client.watch(heartbeat_s=0.01).__aenter__()
            ends = [*(cache.drop(LONG, timeout=TIMEOUT_S) for _ in range(3)), begun]
            failures = await asyncio.gather(*ends, return_exceptions=True)
            assert time.monotonic() - began < 1 + SLACK_S
        assert {type(failure) for failure in failures} == {DeadlineExceeded}


@pytest.mark.parametrize("asked", [True, False], ids=["known", "unknown"])
async def test_a_release_is_not_lost(daemon, asked):
    """Whether or not the client knows by then that nobody answers."""
    await fill(daemon)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        written, trimmed = await cache.reserve(2), await cache.acquire(MAPPED)
        async with cache.acquire(MAPPED):
            with paused(daemon):
                if asked:
                    with pytest.raises(DeadlineExceeded):
                        await written.commit(chain("new", 2), release=True, timeout=TIMEOUT_S)
                began = time.monotonic()
                await trimmed.trim(1, timeout=TIMEOUT_S)
                await cache.release(trimmed, timeout=TIMEOUT_S)
                await cache.release(written, timeout=TIMEOUT_S)
                assert time.monotonic() - began < 3 * TIMEOUT_S + SLACK_S
            await eventually(client.leases, lambda held: len(held) == 1)
        await all_is_given_back(client, cache)


async def test_a_client_closes_beside_a_daemon_that_does_not_answer(daemon):
    async with await connect(daemon.address) as other:
        client = await connect(daemon.address)
        cache = await client.open_cache("c", SPEC)
        await cache.reserve(2)
        with paused(daemon):
            await asyncio.gather(*(cache.drop(LONG, timeout=TIMEOUT_S) for _ in range(3)), return_exceptions=True)
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await cache.close(timeout=TIMEOUT_S)
            await client.close()
            assert time.monotonic() - began < 5 + SLACK_S
        await eventually(other.leases, lambda held: not held)
