"""A daemon that does not answer: calls end in time, what can be read is read, and nothing stays leased."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from typing import Any, Final

import numpy as np
import pytest

from kvtier import BlockResult, Planes, Tier, connect
from kvtier.errors import CallerError, DaemonUnavailable, DeadlineExceeded, InvalidArgument, RetryableError
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain
from tests.integration.conftest import own_daemon
from tests.integration.daemon import DaemonProcess
from tests.integration.models import VSWA, assert_content, by_hand, content, groups_of
from tests.integration.stuck import stuck_disk
from tests.integration.waiting import PATIENCE_S, eventually, heard

SLOTS: Final = 16
TIMEOUT_S: Final = 0.2
SLACK_S: Final = 10.0
"""A busy machine may take so much longer, over all calls of a test together. A call that waits for a silent daemon
takes :data:`PATIENCE_S`, until that goes on."""
CALLS: Final = 20

KEYS: Final = chain("kept", 8)
MAPPED, ON_DISK = KEYS[:4], KEYS[4:]
LONG: Final = chain("long", 4000)
"""128 KB in one request: two of them fill the socket of a daemon that does not read."""

Call = Callable[..., Any]
"""Of a client, its cache, the cache without a mapping, and ``timeout=``."""

VERBS: Final[Mapping[str, Call]] = {
    "reserve": lambda client, cache, streamed, **timeout: cache.reserve(2, **timeout),
    "drop": lambda client, cache, streamed, **timeout: cache.drop(LONG, **timeout),
    "acquire": lambda client, cache, streamed, **timeout: cache.acquire([*MAPPED, *LONG], **timeout),
    "move": lambda client, cache, streamed, **timeout: cache.move(LONG, Tier.DISK, **timeout),
    "put": lambda client, cache, streamed, **timeout: cache.put(LONG[:2], blocks(LONG[:2]), **timeout),
    "streamed put": lambda client, cache, streamed, **timeout: streamed.put(LONG[:2], blocks(LONG[:2]), **timeout),
    "streamed get": lambda client, cache, streamed, **timeout: streamed.get(KEYS, **timeout),
    "explain": lambda client, cache, streamed, **timeout: client.explain(KEYS[0], **timeout),
    "stats": lambda client, cache, streamed, **timeout: client.stats(**timeout),
}

AWAY: Final[Mapping[str, tuple[Callable[[DaemonProcess], None], Callable[[DaemonProcess], None]]]] = {
    "stopped": (DaemonProcess.pause, DaemonProcess.resume),
    "killed": (DaemonProcess.kill, DaemonProcess.start),
}
"""How the daemon goes, and how it comes back."""
daemon = own_daemon(host=SLOTS, disk=4 * SLOTS)


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


async def fill(daemon):
    """A chain of which the first half is in mapped memory and the whole on disk."""
    async with opened_cache(daemon.address, "c") as (_, cache):
        await cache.put(KEYS, blocks(KEYS))
        await cache.move(KEYS, Tier.DISK)
        async with cache.acquire(MAPPED, Tier.HOST):
            pass


async def missed(client):
    """Until it is known to be away."""
    await eventually(lambda: client.connected, lambda connected: not connected)


async def all_is_given_back(client, cache):
    await heard(client)
    await eventually(client.leases, lambda held: not held)
    async with cache.reserve(SLOTS) as everything:
        assert len(everything) == SLOTS


async def test_every_call_ends_at_its_deadline(daemon):
    await fill(daemon)
    async with opened_cache(daemon.address, "c") as (client, cache):
        streamed = await client.open_cache("c", mapped=False)

        async def call(verb):
            with pytest.raises(DeadlineExceeded):
                await VERBS[verb](client, cache, streamed, timeout=TIMEOUT_S)

        with paused(daemon):
            began = time.monotonic()
            await asyncio.gather(*(call(verb) for verb in islice(cycle(VERBS), CALLS)))
            assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        await all_is_given_back(client, cache)


IMPATIENCE_S: Final = 0.05
"""The patience of clients that soon hold a daemon for away."""


@pytest.mark.parametrize("how", AWAY)
async def test_while_the_daemon_is_away_every_call_fails_at_once(daemon, how):
    go, come_back = AWAY[how]
    await fill(daemon)
    async with await connect(daemon.address, timeout=60, patience=1) as client:
        cache = await client.open_cache("c", SPEC)
        streamed = await client.open_cache("c", mapped=False)
        await asyncio.to_thread(go, daemon)
        try:
            with suppress(RetryableError):
                await client.stats()
            assert not client.connected
            began = time.monotonic()
            for call in [*VERBS.values()] * 2:
                with pytest.raises(DaemonUnavailable, match=r"no daemon answers|no sign of life"):
                    await call(client, cache, streamed)
            assert time.monotonic() - began < SLACK_S, "each waited for the client's patience"
        finally:
            await asyncio.to_thread(come_back, daemon)
        await heard(client)
        await client.stats()


@pytest.mark.parametrize("how", AWAY)
async def test_a_client_that_waits_does_not_see_that_the_daemon_was_away(daemon, how):
    go, come_back = AWAY[how]
    await fill(daemon)
    async with await connect(daemon.address, wait=PATIENCE_S, patience=IMPATIENCE_S) as client:
        cache = await client.open_cache("c", SPEC)
        await asyncio.to_thread(go, daemon)
        got = asyncio.ensure_future(cache.drop(KEYS))
        await missed(client)
        assert not got.done()
        await asyncio.to_thread(come_back, daemon)
        assert (await got).results == [BlockResult.OK] * len(KEYS)


async def test_a_call_that_waits_in_a_daemon_that_falls_silent_ends(daemon):
    """One that waits for room, in a daemon that is alive, goes on."""
    async with await connect(daemon.address, patience=IMPATIENCE_S) as client:
        cache = await client.open_cache("c", SPEC)
        await put_chain(cache, "full", SLOTS)
        with stuck_disk(daemon, "c"):
            reserving = asyncio.ensure_future(cache.reserve(SLOTS, timeout=60).take())
            async with await connect(daemon.address) as other:
                await eventually(other.stats, lambda stats: any(c.waiting for c in stats.caches))
            assert await asyncio.wait([reserving], timeout=10 * IMPATIENCE_S) == (set(), {reserving})
            with paused(daemon):
                began = time.monotonic()
                with pytest.raises(DaemonUnavailable):
                    await reserving
                assert time.monotonic() - began < SLACK_S


async def test_a_watch_that_cannot_begin_says_so(daemon):
    async with opened_cache(daemon.address, "c") as (client, cache):
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
    async with opened_cache(daemon.address, "c") as (client, cache):
        written, trimmed = await cache.reserve(2), await cache.acquire(MAPPED)
        async with cache.acquire(MAPPED):
            with paused(daemon):
                if asked:
                    with pytest.raises(DeadlineExceeded):
                        await written.commit(chain("new", 2), release=True, timeout=TIMEOUT_S)
                began = time.monotonic()
                await trimmed.give_back([0], timeout=TIMEOUT_S)
                await cache.release(trimmed, timeout=TIMEOUT_S)
                await cache.release(written, timeout=TIMEOUT_S)
                assert time.monotonic() - began < 3 * TIMEOUT_S + SLACK_S
            await heard(client)
            await eventually(client.leases, lambda held: len(held) == 1)
        await all_is_given_back(client, cache)


async def test_slots_of_a_commit_that_nobody_heard_are_not_blank(daemon):
    """They may be blocks, which whoever fills them anew would change for all readers."""
    keys = chain("unheard", 2)
    async with opened_cache(daemon.address, "c") as (client, cache), cache.reserve(2) as lease:
        with pytest.raises(InvalidArgument):
            await lease.commit(keys[:1], parent=keys[0])
        assert lease.blank == [0, 1]
        with paused(daemon), pytest.raises(DeadlineExceeded):
            await lease.commit(keys[:1], timeout=TIMEOUT_S)
        assert lease.blank == [1]
        with pytest.raises(ValueError, match="read-only"):
            lease.view(0)[0][:] = 0
        await heard(client)
        assert await lease.commit(keys[1:]) == [BlockResult.OK]


@pytest.mark.parametrize("how", AWAY)
async def test_a_hit_that_cannot_be_loaded_is_offered_once(daemon, how):
    go, come_back = AWAY[how]
    await fill(daemon)
    async with opened_cache(daemon.address, "c") as (client, cache):
        await asyncio.to_thread(go, daemon)
        try:
            if how == "killed":
                await missed(client)
            else:
                assert (await cache.match(KEYS)).blocks == 8
            began = time.monotonic()
            assert_bytes(MAPPED, await cache.get(KEYS, timeout=TIMEOUT_S))
            assert time.monotonic() - began < TIMEOUT_S + SLACK_S
            calls = cache.reads.calls
            assert (await cache.match(KEYS)).residency == bytes([Tier.HOST.bit]) * 4
            assert await cache.prefix_length(KEYS) == 4
            assert [place.residency for place in await cache.locate(KEYS)] == [Tier.HOST.bit] * 4 + [0] * 4
            assert await cache.prefix_length(ON_DISK) == 0
            assert_bytes(MAPPED, await cache.get(KEYS))
            assert await cache.get(ON_DISK) == []
            assert cache.reads.calls == calls
            assert cache.lookups == "shared memory, of mapped tiers alone: the daemon does not answer"
        finally:
            await asyncio.to_thread(come_back, daemon)
        await eventually(lambda: cache.prefix_length(KEYS), lambda length: length == 8)
        assert_bytes(KEYS, await cache.get(KEYS))
        assert cache.lookups == "shared memory"
        assert await client.leases() == []


async def test_a_read_that_a_dying_daemon_is_not_told_of_costs_nothing(daemon):
    """A task of the client's tells it; nobody is there to see how that ended."""
    await fill(daemon)
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    async with opened_cache(daemon.address, "c") as (client, cache):
        daemon.pause()
        assert_bytes(MAPPED, await cache.get(MAPPED))
        with pytest.raises(DeadlineExceeded):  # before it, the daemon is told
            await cache.drop(LONG[:1], timeout=TIMEOUT_S)
        await asyncio.to_thread(daemon.kill)
        await missed(client)
    gc.collect()
    assert unseen == []


async def test_a_get_of_which_nothing_can_be_read_says_so_once(daemon):
    await fill(daemon)
    async with opened_cache(daemon.address, "c") as (_, cache):
        with paused(daemon):
            with pytest.raises(DeadlineExceeded):
                await cache.get(ON_DISK, timeout=TIMEOUT_S)
            assert await cache.get(ON_DISK) == []
            assert (await cache.match(ON_DISK)).blocks == 0


async def test_several_groups_count_what_is_mapped(start_for):
    daemon = start_for(VSWA, host=16, disk=16)
    async with opened_cache(daemon.address, "c", spec=VSWA, budgets=by_hand(VSWA, host=16, disk=16)) as (_, cache):
        keys = chain("across", 12)
        await cache.across.put(keys, {group: content(VSWA, group, keys) for group in groups_of(VSWA)})
        full, sliding = cache.in_group(1), cache.in_group(0)
        await full.move(keys[10:], Tier.DISK)
        await sliding.move(keys[11:], Tier.DISK)
        with paused(daemon):
            assert (await cache.across.match(keys)).blocks == 12
            with pytest.raises(DeadlineExceeded):
                await cache.across.get(keys, timeout=TIMEOUT_S)
            match, found = await cache.across.match(keys), await cache.across.get(keys)
            assert match.blocks == len(found[0]) == 10
            for span in match.groups:
                assert_content(VSWA, span.group, keys[span.first_block : 10], found[span.group][span.first_block :])
            assert (await sliding.match(keys)).blocks == await sliding.prefix_length(keys) == 11
            window = await sliding.get(keys)
            assert window[:7] == [None] * 7
            assert_content(VSWA, 0, keys[7:11], window[7:])
        await eventually(lambda: cache.across.match(keys), lambda match: match.blocks == 12)


async def test_mapped_blocks_are_loaded_into_pages_and_found_stored_without_the_daemon(daemon):
    """Also from the middle of a chain, and without a lease: nothing of it waits for a call."""
    await fill(daemon)
    async with opened_cache(daemon.address, "c") as (client, cache):
        plane = np.zeros((8, 3, BLOCK_BYTES // 3), np.uint8)
        planes = Planes([plane[:, part] for part in range(3)])
        with paused(daemon):
            began = time.monotonic()
            assert await cache.get(MAPPED[1:], planes[[5, 0, 3]]) == [5, 0, 3]
            assert_bytes(MAPPED[1:], list(plane.reshape(8, -1)[[5, 0, 3]]))
            assert await cache.probe([*ON_DISK, *MAPPED]) == bytes([4] * 4 + [2 | 4] * 4)
            assert await cache.put(KEYS, blocks(KEYS)) == [BlockResult.EXISTS] * 8
            assert time.monotonic() - began < SLACK_S
            assert cache.reads.calls == 0
            with pytest.raises(DeadlineExceeded):
                await cache.put(LONG[:2], blocks(LONG[:2]), timeout=TIMEOUT_S)
            assert await cache.probe([*ON_DISK, *MAPPED]) == bytes([0] * 4 + [2] * 4)
        await all_is_given_back(client, cache)


async def test_a_caller_in_a_hurry_does_not_make_the_daemon_unreachable(daemon):
    await fill(daemon)
    async with opened_cache(daemon.address, "c") as (_, cache):
        with pytest.raises(RetryableError):
            await cache.acquire(ON_DISK, timeout=1e-6)
        assert await cache.prefix_length(KEYS) == 8
        assert_bytes(KEYS, await cache.get(KEYS))


async def test_a_daemon_that_makes_no_room_in_time_is_heard(daemon):
    """It is the daemon's own answer, so nobody takes the daemon for silent."""
    async with await connect(daemon.address, patience=IMPATIENCE_S) as client:
        cache = await client.open_cache("c", SPEC)
        await put_chain(cache, "full", SLOTS)
        with stuck_disk(daemon, "c"):
            with pytest.raises(DeadlineExceeded, match="no room was made in time"):
                await cache.reserve(SLOTS, timeout=2)
            assert cache.lookups == "shared memory"


async def test_a_client_closes_beside_a_daemon_that_does_not_answer(daemon):
    async with await connect(daemon.address) as other:
        client = await connect(daemon.address)
        cache = await client.open_cache("c", SPEC)
        await cache.reserve(2)
        with paused(daemon):
            await asyncio.gather(*(cache.drop(LONG, timeout=TIMEOUT_S) for _ in range(3)), return_exceptions=True)
            began = time.monotonic()
            with pytest.raises((DaemonUnavailable, DeadlineExceeded)):
                await cache.close(timeout=TIMEOUT_S)
            await client.close()
            assert time.monotonic() - began < 5 + SLACK_S
        await eventually(other.leases, lambda held: not held)


async def test_a_close_is_not_lost(daemon):
    async with opened_cache(daemon.address, "c") as (_, cache), await connect(daemon.address) as other:
        with paused(daemon), pytest.raises(DeadlineExceeded):
            await cache.close(timeout=TIMEOUT_S)

        async def removed():
            with suppress(CallerError):  # a session has it open
                return await other.remove_cache("c", dry_run=True)

        await eventually(removed, bool)
