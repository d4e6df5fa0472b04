"""Clients that put again and again have their slots before they need them; nobody notices, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from kvtier import AsyncClient, BlockResult, Cache, Client, InvalidArgument, Tier, connect, stock
from kvtier.holdings import Holdings
from kvtier.lease import WriteLease
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon, StartFor
from tests.integration.models import VSWA, by_hand, content, groups_of
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually

SLOTS = 64
MOST = SLOTS // stock.SHARE


T = TypeVar("T")


async def _now(value: T) -> T:
    return value


class Reserved(list[int]):
    """Slots of each reservation that took a call."""


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> Reserved:
    """And nothing is given back for want of use, or not asked for, however slow the machine is."""
    monkeypatch.setattr(stock, "IDLE_S", 100 * PATIENCE_S)
    counts, reserve = Reserved(), Holdings._reserve

    async def counting(self: Holdings, cache: Cache, tier: Tier, count: int, timeout: float | None) -> WriteLease:
        counts.append(count)
        return await reserve(self, cache, tier, count, timeout)

    monkeypatch.setattr(Holdings, "_reserve", counting)
    return counts


@pytest.fixture
async def cache(client: AsyncClient, name: str) -> AsyncIterator[Cache]:
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=SLOTS))
    yield cache
    await cache.close()


async def put(cache: Cache, name: str, count: int) -> list[bytes]:
    keys = chain(name, count)
    assert await cache.put(keys, blocks(keys)) == [BlockResult.OK] * count
    return keys


async def stocked(cache: Cache, count: int) -> None:
    """Has the client keep so many slots."""
    for turn in range(2):
        await put(cache, f"stocked {turn}", count)


async def leased(client: AsyncClient, cache: Cache) -> list[int]:
    """Blank slots of each lease."""
    return [lease.blank_slots for lease in await client.leases(cache=cache.name)]


async def test_the_third_put_in_a_row_makes_no_call_for_its_slots(
    client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    stored = [await put(cache, f"put {number}", 3) for number in range(8)]
    assert reserved == [3, 3]
    assert await leased(client, cache) == [3]
    for keys in stored:
        assert_bytes(keys, await cache.get(keys))


async def test_fewer_blocks_fit_too_and_the_rest_goes_back(
    client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    await stocked(cache, 4)
    keys = await put(cache, "fewer", 2)
    assert reserved == [4, 4]
    assert await leased(client, cache) == [2]
    assert_bytes(keys, await cache.get(keys))
    assert (await tier_stats(client, cache.name, Tier.HOST)).free == SLOTS - 8 - 2 - 2


async def test_more_blocks_take_a_call_and_what_was_kept_goes_back(
    client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    await stocked(cache, 2)
    await put(cache, "more", 3)
    assert reserved == [2, 2, 3]
    await eventually(lambda: leased(client, cache), lambda slots: slots == [3])


async def test_a_put_that_is_refused_before_it_is_sent_asks_for_nothing(
    client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    await put(cache, "first", 3)
    keys, others = chain("refused", 3), cache.prompt(range(3 * SPEC.tokens_per_block))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="prompt"):
            await cache.put(keys, blocks(keys), prompt=others)
    await put(cache, "last", 3)
    assert await leased(client, cache) == [3]


async def test_a_reservation_takes_what_is_just_right(client: AsyncClient, cache: Cache, reserved: Reserved) -> None:
    await stocked(cache, 2)
    async with cache.reserve(2) as lease:
        assert len(lease) == 2
        assert await leased(client, cache) == [2]
    assert reserved == [2, 2]
    assert await leased(client, cache) == []


async def test_the_whole_tier_can_be_reserved_by_who_keeps_a_part(cache: Cache, reserved: Reserved) -> None:
    await stocked(cache, MOST)
    async with cache.reserve(SLOTS) as lease:
        assert len(lease) == SLOTS


async def test_more_than_a_share_of_the_tier_is_never_kept(
    client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    for number in range(3):
        await put(cache, f"put {number}", MOST + 1)
    assert reserved == [MOST + 1] * 3
    assert await leased(client, cache) == []


async def test_puts_at_the_same_time_keep_no_more_than_that(
    client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    stored: list[list[bytes]] = []
    for turn in range(4):
        stored += await asyncio.gather(*(put(cache, f"{turn}/{number}", 2) for number in range(6)))
        assert sum(await leased(client, cache)) <= MOST
    assert len(reserved) < 4 * 6
    for keys in stored:
        assert_bytes(keys, await cache.get(keys))


async def test_what_nobody_uses_goes_back_by_itself(
    client: AsyncClient, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "IDLE_S", 0.5)
    number = 0
    while not await leased(client, cache):
        number += 1
        await put(cache, f"put {number}", 1)
    await eventually(lambda: leased(client, cache), lambda slots: not slots)


async def test_a_closed_cache_leaves_nothing(client: AsyncClient, name: str, reserved: Reserved) -> None:
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=SLOTS))
    await stocked(cache, 2)
    await cache.close()
    assert await leased(client, cache) == []


async def test_two_clients_fill_a_small_tier_and_neither_is_refused(
    daemon: DaemonProcess, client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    async with await connect(daemon.address) as second:
        other = await second.open_cache(cache.name, SPEC)
        for turn in range(12):
            await asyncio.gather(put(cache, f"first {turn}", 3), put(other, f"second {turn}", 3 + turn % 2))
        await asyncio.gather(put(cache, "a half", SLOTS // 2), put(other, "the other", SLOTS // 2))
        await put(cache, "nothing left", 1)


async def test_who_wants_the_whole_tier_waits_for_what_another_keeps(
    daemon: DaemonProcess, client: AsyncClient, cache: Cache, reserved: Reserved
) -> None:
    await stocked(cache, 2)
    async with await connect(daemon.address) as second:
        other = await second.open_cache(cache.name, SPEC)
        reserving = asyncio.ensure_future(other.reserve(SLOTS).take())
        await eventually(second.stats, lambda stats: any(each.waiting for each in stats.caches))
        await cache.release_all()
        assert len(await reserving) == SLOTS


async def test_a_reset_is_not_refused_for_what_another_keeps(
    daemon: DaemonProcess, cache: Cache, reserved: Reserved
) -> None:
    await stocked(cache, 2)
    async with await connect(daemon.address) as second:
        assert (await (await second.open_cache(cache.name, SPEC)).reset()).dropped == 4
    await put(cache, "afterwards", 2)
    assert reserved == [2, 2]


async def test_a_cap_on_reservations_counts_what_is_kept_once(start_daemon: StartDaemon, reserved: Reserved) -> None:
    daemon = start_daemon("--max-reserved-fraction", "0.25", host=SLOTS)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("capped", SPEC)
        await stocked(cache, MOST)
        async with cache.reserve(SLOTS // 4) as lease:
            assert len(lease) == SLOTS // 4
        await put(cache, "afterwards", MOST)


async def test_after_a_restart_they_are_forgotten_and_puts_go_on(start_daemon: StartDaemon, reserved: Reserved) -> None:
    daemon = start_daemon(host=SLOTS)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        await stocked(cache, 2)
        await asyncio.to_thread(daemon.kill)
        await asyncio.to_thread(daemon.start)
        stored = [await put(cache, f"after {number}", 2) for number in range(3)]
        for keys in stored:
            assert_bytes(keys, await cache.get(keys))
        async with cache.reserve(SLOTS) as everything:
            assert len(everything) == SLOTS


async def test_a_kicked_client_goes_on(
    daemon: DaemonProcess, client: AsyncClient, name: str, reserved: Reserved
) -> None:
    async with await connect(daemon.address) as hanging:
        cache = await hanging.open_cache(name, SPEC, budgets=sizes(host=SLOTS))
        await stocked(cache, 2)
        assert (await client.kick(hanging.session_id)).slots == 2
        assert await leased(client, cache) == []
        keys = await put(cache, "after the kick", 2)
        assert_bytes(keys, await cache.get(keys))


async def test_a_broken_connection_changes_nothing(client: AsyncClient, cache: Cache, reserved: Reserved) -> None:
    await stocked(cache, 2)
    link = client._session._link
    assert link is not None
    link.attach._sock.shutdown(2)  # type: ignore[attr-defined]
    keys = await put(cache, "after the break", 2)
    assert reserved == [2, 2]
    assert_bytes(keys, await cache.get(keys))


async def test_a_cancelled_put_leaves_nothing(start_daemon: StartDaemon, reserved: Reserved) -> None:
    daemon = start_daemon(host=SLOTS)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        await stocked(cache, 2)
        daemon.pause()
        putting = asyncio.ensure_future(put(cache, "cancelled", 2))
        await eventually(lambda: _now(cache._holdings._ending), bool)  # its commit is under way
        putting.cancel()
        await eventually(lambda: _now(cache._holdings._leases), lambda leases: not leases)  # and its lease given back
        daemon.resume()
        with pytest.raises(asyncio.CancelledError):
            await putting
        await eventually(lambda: leased(client, cache), lambda slots: not slots)


async def test_every_window_group_has_its_own(start_for: StartFor, reserved: Reserved) -> None:
    daemon = start_for(VSWA, host=64)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("vswa", VSWA, budgets=by_hand(VSWA, host=64))
        for number in range(4):
            keys = chain(f"across {number}", 3)
            arrays = {group: content(VSWA, group, keys) for group in groups_of(VSWA)}
            results = await cache.across.put(keys, arrays)
            assert results == {group: [BlockResult.OK] * 3 for group in groups_of(VSWA)}
            assert (await cache.across.match(keys)).blocks == 3
        assert reserved == [3] * (2 * len(VSWA.groups))


def test_threads_share_what_is_kept(daemon: DaemonProcess, name: str, reserved: Reserved) -> None:
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=SLOTS))
        stored = [chain(f"thread {number}", 2) for number in range(24)]
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda keys: cache.put(keys, blocks(keys)), stored))
        assert results == [[BlockResult.OK] * 2] * len(stored)
        assert len(reserved) < len(stored)
        for keys in stored:
            assert_bytes(keys, cache.get(keys))
        cache.close()
        assert client.leases(cache=name) == []
