"""Reads without a call beside a client that does its worst to the cache: it spoils bytes of that cache, and delays or
deceives nobody elsewhere. What no client can reach, and a damaged machine might spoil, costs calls."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from kvtier import BlockResult, Client, Tier, connect
from kvtier.abi import attach
from kvtier.abi.layout import BUCKET_BYTES, INDEXES_HERE, ArenaLayout
from tests.integration.actors import Actor
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.punching import punch
from tests.integration.raw import attached, close_all
from tests.integration.seeing import cache_stats
from tests.integration.waiting import eventually

pytestmark = pytest.mark.skipif(not INDEXES_HERE, reason="no reads without calls on this processor")

READS = 150


@contextmanager
def mapped(raw, cache, *, write):
    """The cache's descriptors, in hands that do with them what they like."""
    fds = raw.socket.map(cache.info.cache_id, write=write)
    try:
        yield fds
    finally:
        close_all(fds)


def scribble(fd, rng):
    with mmap.mmap(fd, os.fstat(fd).st_size) as view:
        start = int(rng.integers(len(view) // 4096)) * 4096
        view[start : start + 65536] = rng.bytes(len(view[start : start + 65536]))


def punch_out(fd, rng):
    punch(fd, int(rng.integers(os.fstat(fd).st_size // 4096)) * 4096, 65536)


@pytest.mark.parametrize("spoil", [scribble, punch_out])
async def test_readers_of_a_cache_that_is_spoilt_get_its_garbage_and_others_get_theirs(
    daemon, client, raw, name, spoil
):
    budgets = sizes(host=16, disk=16)
    keys = chain("both", 8)
    spoilt, healthy = [await client.open_cache(f"{name}{index}", SPEC, budgets=budgets) for index in range(2)]
    for cache in (spoilt, healthy):
        await cache.put(keys, blocks(keys))
    await raw.open(spoilt.name)
    over, failures = threading.Event(), list[BaseException]()

    def go_on(action):
        try:
            while not over.is_set():
                action()
        except BaseException as error:  # noqa: BLE001  it is raised below
            failures.append(error)

    def read(cache, *, right):
        found = cache.get(keys)
        assert [len(block) for block in found] == [BLOCK_BYTES] * 8
        if right:
            assert_bytes(keys, found)

    rng = np.random.default_rng(1)
    with mapped(raw, spoilt, write=True) as fds, Client(daemon.address) as reading:
        bad, good = (reading.open_cache(cache.name, SPEC, write=False) for cache in (spoilt, healthy))
        actions = (
            lambda: spoil(fds[attach.HOST], rng),
            lambda: read(bad, right=False),
            lambda: read(good, right=True),
        )
        threads = [threading.Thread(target=go_on, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()

        async def read_so_far():
            return READS * 8 if failures else min(bad.reads.hits, good.reads.hits)

        await eventually(read_so_far, lambda hits: hits >= READS * 8)
        over.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert not failures, failures[0]
        assert (bad.reads.calls, good.reads.calls) == (0, 0)
    fresh = chain("afterwards", 4)
    assert set(await spoilt.put(fresh, blocks(fresh))) == {BlockResult.OK}
    assert_bytes(fresh, await spoilt.get(fresh))
    assert (await client.stats()).problems == ()


async def test_a_writer_stopped_in_the_middle_of_a_slot_holds_that_slot_and_nobody_up(daemon, client, name):
    slots = 8
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=slots, disk=32))
    keys = chain("before", 4)
    await cache.put(keys, blocks(keys))
    with Actor("write_half", address=daemon.address, cache=name) as writer:
        slot = writer.says()["slot"]
        writer.signal(signal.SIGSTOP)
        # It is no slot of any block that anybody finds.
        assert cache.arena.generations(Tier.HOST, 0, np.array([slot]))[0] % 2 == 1
        for number in range(8):
            assert_bytes(keys, await cache.get(keys))
            others = chain(f"others {number}", 3)
            assert set(await cache.put(others, blocks(others))) == {BlockResult.OK}
            assert slot not in [place.host_slot for place in await cache.locate(others)]
            assert_bytes(others, await cache.get(others))
        async with cache.reserve(slots - 1, Tier.HOST) as rest:
            assert slot not in rest.slots
        writer.kill()

        async def all_slots():
            return sum(each.held + each.orphaned for each in (await cache_stats(client, name)).tiers)

        await eventually(all_slots, lambda held: held == 0)
        async with cache.reserve(slots, Tier.HOST) as everything:
            assert slot in everything.slots


def reopened(fd):
    """A read-only descriptor's segment, writable: what the daemon's own user can do."""
    os.fchmod(fd, 0o600)
    try:
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    finally:
        os.fchmod(fd, 0o400)
    try:
        return np.frombuffer(mmap.mmap(writable, 0), np.uint8)
    finally:
        os.close(writable)


async def test_the_daemons_own_user_could_and_then_readers_ask(start_daemon):
    """The same uid is the same trust: it can write ``control``, too. As a machine might that died in the middle of it,
    it leaves every bucket odd; nobody waits for them."""
    daemon = start_daemon(host=8)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = await client.open_cache("c", SPEC)
        keys = chain("odd", 4)
        await cache.put(keys, blocks(keys))
        assert_bytes(keys, await cache.get(keys))
        assert cache.reads.calls == 0
        await raw.open("c")
        with mapped(raw, cache, write=False) as fds:
            control = reopened(fds[attach.CONTROL])
        layout = ArenaLayout.read(control, SPEC)
        index = control[layout.index_offset : layout.index_offset + layout.index_bytes].view(np.uint64)
        sequences = index.reshape(-1, BUCKET_BYTES // 8)[:, 0]
        sequences |= np.uint64(1)
        assert (await cache.match([*keys, bytes(32)])).blocks == 4
        assert await cache.prefix_length(keys) == 4
        assert [place.residency for place in await cache.locate(keys)] == [Tier.HOST.bit] * 4
        assert await cache.get(chain("strangers", 2)) == []
        assert cache.reads.calls == 4
        # A bucket that the daemon writes next is right again.
        before = sequences.copy()
        await cache.drop(keys)
        await cache.put(keys, blocks(keys))
        mended = sequences != before
        assert mended.any()
        assert (sequences[mended] % 2 == 0).all()
