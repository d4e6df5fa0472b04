"""A long get of a chain that was read before: the loop makes some of the copy beside the thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from kvtier import AsyncClient, Cache, Tier, loading, transfer
from kvtier.answers import ReadCounts
from kvtier.tensors import Bytes
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.waiting import PATIENCE_S, eventually

COUNT = 8
LOOP = threading.get_ident()


class Copies:
    """Out of slots: blocks by thread. ``before`` is called in each, before it copies."""

    def __init__(self) -> None:
        self._copy = transfer.out_of_slots
        self.made: dict[int, int] = {}
        self.before: Callable[[bool], None] = lambda on_loop: None

    def __call__(
        self, pools: Sequence[Bytes], slots: transfer.Slots, rows: Sequence[Bytes] | Bytes, known: bool = False
    ) -> None:
        thread = threading.get_ident()
        self.before(thread == LOOP)
        self.made[thread] = self.made.get(thread, 0) + len(rows)
        self._copy(pools, slots, rows, known)

    @property
    def by_loop(self) -> int:
        return self.made.get(LOOP, 0)


@pytest.fixture
async def keys(client: AsyncClient, name: str) -> list[bytes]:
    return chain(name, COUNT)


@pytest.fixture
async def cache(client: AsyncClient, name: str, keys: list[bytes]) -> AsyncIterator[Cache]:
    """With a chain that has been read, so that it is known how to read it again."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=2 * COUNT))
    await cache.put(keys, blocks(keys), tier=Tier.HOST)
    for _ in range(2):
        assert_bytes(keys, await cache.get(keys))
    yield cache
    await cache.close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> Copies:
    """Of gets that are long: a block is what the loop copies at a time."""
    made = Copies()
    monkeypatch.setattr(loading, "_INLINE_BYTES", 0)
    monkeypatch.setattr(transfer, "INLINE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(transfer, "out_of_slots", made)
    return made


def both(copies: Copies) -> None:
    """The thread waits until the loop has copied a block."""
    loop_was_there = threading.Event()

    def before(on_loop: bool) -> None:
        if on_loop:
            loop_was_there.set()
        else:
            assert loop_was_there.wait(PATIENCE_S)

    copies.before = before


def held(copies: Copies) -> tuple[threading.Event, threading.Event]:
    """The thread says that it is there, and copies when it may go on."""
    there, go = threading.Event(), threading.Event()

    def before(on_loop: bool) -> None:
        if not on_loop:
            there.set()
            assert go.wait(PATIENCE_S)

    copies.before = before
    return there, go


@pytest.mark.parametrize("out", [None, "array", "list"])
async def test_both_make_some_of_it(cache: Cache, keys: list[bytes], copies: Copies, out: str | None) -> None:
    both(copies)
    before = cache.reads
    array = np.zeros((COUNT, BLOCK_BYTES), dtype=np.uint8)
    targets = {None: None, "array": array, "list": list(array)}[out]
    got = await cache.get(keys, targets)
    assert_bytes(keys, got)
    if out is not None:
        assert_bytes(keys, list(array))
    assert sum(copies.made.values()) == COUNT
    assert 0 < copies.by_loop < COUNT
    after = cache.reads
    assert (after.hits - before.hits, after.calls - before.calls) == (COUNT, 0)


async def test_beside_another_one_each_is_the_thread_s(cache: Cache, keys: list[bytes], copies: Copies) -> None:
    first_is_there, go = held(copies)
    first = asyncio.create_task(cache.get(keys))
    assert await asyncio.to_thread(first_is_there.wait, PATIENCE_S)
    second = asyncio.create_task(cache.get(keys))

    async def by_loop() -> int:
        return copies.by_loop

    # All that the thread has not taken of the first one, half of it, and nothing of the second.
    await eventually(by_loop, lambda count: count >= COUNT // 2)
    go.set()
    for got in await asyncio.gather(first, second):
        assert_bytes(keys, got)
    assert copies.by_loop == COUNT // 2


async def test_who_is_cancelled_waits_for_the_thread(cache: Cache, keys: list[bytes], copies: Copies) -> None:
    """Its memory is written to until then."""
    there, go = held(copies)
    getting = asyncio.create_task(cache.get(keys))
    assert await asyncio.to_thread(there.wait, PATIENCE_S)
    getting.cancel()
    await asyncio.sleep(0)
    assert not getting.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await getting
    copies.before = lambda on_loop: None
    assert_bytes(keys, await cache.get(keys))


async def test_what_was_reused_under_the_copy_is_a_miss(cache: Cache, keys: list[bytes], copies: Copies) -> None:
    """Not the bytes of somebody else."""
    there, go = held(copies)
    counts: ReadCounts = cache.reads
    getting = asyncio.create_task(cache.get(keys))
    assert await asyncio.to_thread(there.wait, PATIENCE_S)
    await cache.drop(keys[:1])
    others = chain("others", 2 * COUNT)
    await cache.put(others, blocks(others), tier=Tier.HOST)
    go.set()
    assert await getting == []
    assert cache.reads.reuses > counts.reuses
