"""A large put commits its first blocks while the rest is copied: two commits, one answer, nothing before its bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from kvtier import AsyncClient, BlockResult, Cache, Client, Tier, arrays, transfer
from kvtier.commits import CommitLine
from kvtier.tensors import Bytes
from kvtier.v1 import blocks_pb2
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually

SLOTS = 64
COUNT = 6
LAST = 2
"""Blocks of the second part."""

Copy = Callable[[Sequence[Bytes], Sequence[int], Sequence[Bytes]], None]


class Copies:
    """Those into slots, of which the last blocks wait for ``go``."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self.sizes: list[int] = []
        self.go = threading.Event()

    def __call__(self, pools: Sequence[Bytes], slots: Sequence[int], rows: Sequence[Bytes]) -> None:
        self.sizes.append(len(rows))
        if len(rows) == LAST:
            assert self.go.wait(PATIENCE_S)
        self._copy(pools, slots, rows)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    monkeypatch.setattr(arrays, "_LAST_BYTES", LAST * BLOCK_BYTES)
    monkeypatch.setattr(transfer, "INLINE_BYTES", 0)
    monkeypatch.setattr(transfer, "_ONE_CALL_BYTES", 0)
    made = Copies(transfer.into_slots)
    monkeypatch.setattr(transfer, "into_slots", made)
    return made


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of each commit of every put, in the order in which they were made ready."""
    counts: list[int] = []
    commit = CommitLine.commit_in_turn

    async def counting(
        self: CommitLine,
        requests: Sequence[blocks_pb2.CommitRequest],
        seconds: float,
        may_go: Callable[[int], Awaitable[None]] | None = None,
    ) -> list[blocks_pb2.CommitResponse]:
        counts.extend(len(request.slots) for request in requests)
        return await commit(self, requests, seconds, may_go)

    monkeypatch.setattr(CommitLine, "commit_in_turn", counting)
    return counts


@pytest.fixture
async def cache(client: AsyncClient, name: str) -> Cache:
    return await client.open_cache(name, SPEC, budgets=sizes(host=SLOTS))


async def stored(cache: Cache, keys: list[bytes]) -> int:
    return (await cache.match(keys)).blocks


async def test_the_first_blocks_are_stored_while_the_rest_is_copied(
    cache: Cache, copies: Copies, commits: list[int]
) -> None:
    keys = chain(cache.name, COUNT)
    putting = asyncio.create_task(cache.put(keys, blocks(keys)))
    await eventually(partial(stored, cache, keys), lambda count: count == COUNT - LAST)
    assert_bytes(keys[:-LAST], await cache.get(keys))
    assert not putting.done()
    assert await stored(cache, keys) == COUNT - LAST
    copies.go.set()
    assert await putting == [BlockResult.OK] * COUNT
    assert_bytes(keys, await cache.get(keys))
    assert (copies.sizes, commits) == ([COUNT - LAST, LAST], [COUNT - LAST, LAST])


async def test_the_sync_client_does_so_too(daemon: DaemonProcess, cache: Cache, copies: Copies) -> None:
    keys = chain(cache.name, COUNT)
    with Client(daemon.address) as client:
        own = client.open_cache(cache.name, SPEC)
        putting = asyncio.create_task(asyncio.to_thread(own.put, keys, blocks(keys)))
        await eventually(partial(stored, cache, keys), lambda count: count == COUNT - LAST)
        copies.go.set()
        assert await putting == [BlockResult.OK] * COUNT
    assert_bytes(keys, await cache.get(keys))


async def test_only_a_put_that_is_alone_is_committed_twice(cache: Cache, copies: Copies, commits: list[int]) -> None:
    copies.go.set()
    chains = [chain(f"{cache.name} {number}", COUNT) for number in range(3)]
    results = await asyncio.gather(*(cache.put(keys, blocks(keys)) for keys in chains))
    assert results == [[BlockResult.OK] * COUNT] * 3
    assert sorted(commits) == [LAST, COUNT - LAST, COUNT, COUNT]


async def test_what_is_stored_already_and_what_has_no_parent_are_told_of_each_block(
    cache: Cache, copies: Copies, commits: list[int]
) -> None:
    copies.go.set()
    keys = chain(cache.name, COUNT)
    await cache.put(keys[: COUNT - 1], blocks(keys[: COUNT - 1]))
    assert await cache.put(keys, blocks(keys)) == [BlockResult.EXISTS] * (COUNT - 1) + [BlockResult.OK]
    orphans = chain("orphans", COUNT)
    (parent,) = chain("nobody", 1)
    assert await cache.put(orphans, blocks(orphans), parent=parent) == [BlockResult.PARENT_MISSING] * COUNT
    assert commits[-2:] == [COUNT - LAST, LAST]


async def test_who_gives_up_meanwhile_keeps_the_first_blocks_and_no_slot(
    client: AsyncClient, cache: Cache, copies: Copies
) -> None:
    keys = chain(cache.name, COUNT)
    putting = asyncio.create_task(cache.put(keys, blocks(keys)))
    await eventually(partial(stored, cache, keys), lambda count: count == COUNT - LAST)
    putting.cancel()
    await asyncio.wait([putting], timeout=0.01)
    assert not putting.done()  # the thread reads the caller's arrays
    copies.go.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert_bytes(keys[:-LAST], await cache.get(keys))
    free = SLOTS - (COUNT - LAST)
    await eventually(lambda: tier_stats(client, cache.name, Tier.HOST), lambda stats: stats.free == free)


async def test_who_gives_up_while_two_threads_copy_waits_for_both(
    client: AsyncClient, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write into slots, which are somebody else's once they are given back. Blocks too large for the loop."""
    monkeypatch.setattr(transfer, "_MOST_AT_ONCE", 0)
    monkeypatch.setattr(arrays, "_SHARED_BYTES", 1)
    monkeypatch.setattr(arrays, "_LAST_BYTES", LAST * BLOCK_BYTES)
    monkeypatch.setattr(transfer, "INLINE_BYTES", 0)
    monkeypatch.setattr(transfer, "_ONE_CALL_BYTES", 0)
    copy, both, go = transfer.into_slots, threading.Barrier(3), threading.Event()

    def slow(pools: Sequence[Bytes], slots: Sequence[int], rows: Sequence[Bytes]) -> None:
        if not go.is_set():
            both.wait(PATIENCE_S)
            assert go.wait(PATIENCE_S)
        copy(pools, slots, rows)

    monkeypatch.setattr(transfer, "into_slots", slow)
    keys = chain(cache.name, COUNT)
    whole = np.stack(blocks(keys))
    putting = asyncio.create_task(cache.put(keys, whole))
    await asyncio.to_thread(both.wait, PATIENCE_S)
    putting.cancel()
    await asyncio.wait([putting], timeout=0.01)
    assert not putting.done()
    assert (await tier_stats(client, cache.name, Tier.HOST)).free == SLOTS - COUNT
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await stored(cache, keys) == 0
    await eventually(lambda: tier_stats(client, cache.name, Tier.HOST), lambda stats: stats.free == SLOTS)
    assert await cache.put(keys, whole) == [BlockResult.OK] * COUNT
    assert_bytes(keys, await cache.get(keys))


async def test_the_loop_copies_beside_the_thread_and_others_have_their_turn(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_SHARED_BYTES", 1)
    monkeypatch.setattr(arrays, "_LAST_BYTES", LAST * BLOCK_BYTES)
    monkeypatch.setattr(transfer, "INLINE_BYTES", 0)
    monkeypatch.setattr(transfer, "_ONE_CALL_BYTES", 0)
    copy, here, loop_is_done = transfer.into_slots, threading.get_ident(), threading.Event()
    turns, own, turns_at_copies = 0, 0, []

    def seen(pools: Sequence[Bytes], slots: Sequence[int], rows: Sequence[Bytes]) -> None:
        nonlocal own
        if threading.get_ident() == here:
            own += len(rows)
            turns_at_copies.append(turns)
            if own == COUNT - 2 * LAST:  # all but what the thread took first
                loop_is_done.set()
        else:
            assert loop_is_done.wait(PATIENCE_S)
        copy(pools, slots, rows)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(transfer, "into_slots", seen)
    keys = chain(cache.name, COUNT)
    beside = asyncio.create_task(other())
    assert await cache.put(keys, np.stack(blocks(keys))) == [BlockResult.OK] * COUNT
    beside.cancel()
    assert own == COUNT - 2 * LAST
    assert all(later > earlier for earlier, later in pairwise(turns_at_copies))
    assert_bytes(keys, await cache.get(keys))
