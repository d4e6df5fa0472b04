"""Those who wait get their answer once; those who go away leave nothing behind."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtierd.core.ids import CacheId, SessionId, Tier
from kvtierd.core.outcome import GroupGrant, RefusalReason
from kvtierd.core.transfers import ChainRequest
from kvtierd.mover.engine import MOVE_SLICE
from kvtierd.mover.executor import TicketRefused, UnknownCache
from kvtierd.tiers.disk.index import Index
from tests.unit.disk.disk_blocks import watch
from tests.unit.mover.rig import CACHE, GROUP, House, key

DEVICE, DISK = Tier.DEVICE, Tier.DISK
CHAIN = [key(number) for number in range(4)]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """Four device slots, full of blocks that nobody holds, over a disk that takes its time."""
    async with House(tmp_path) as house:
        house.open({DEVICE: 4, DISK: 16})
        await house.client().put(CHAIN)
        house.disk.close_gate()
        yield house


async def waiting_reserve(house: House, count: int, session: int) -> asyncio.Task[GroupGrant]:
    task = asyncio.create_task(house.client(session).reserve(count))
    await asyncio.sleep(0)  # it is asked
    await asyncio.sleep(0)  # what can make room is planned
    assert not task.done()
    return task


def assert_nothing_held(house: House) -> None:
    stats = house.engine.manager(CACHE).stats()
    assert stats.waiting == 0
    assert stats.held_by == {}
    assert all(count.held == 0 for count in stats.tiers.values())


@pytest.fixture
async def line(house: House) -> list[asyncio.Task[GroupGrant]]:
    """Two reserves in a line: one slot is free and three are on their way to the disk.

    The first wants all four. When it is cancelled, the second is granted its one slot in that very turn.
    """
    await house.engine.drop(CACHE, GROUP, CHAIN[-1:])
    return [await waiting_reserve(house, 4, session=2), await waiting_reserve(house, 1, session=3)]


async def test_a_grant_that_meets_a_waiter_cancelled_in_the_same_turn_goes_back(
    house: House, line: list[asyncio.Task[GroupGrant]]
) -> None:
    line[0].cancel()
    line[1].cancel()  # it sees this only after the first one's end has granted it the slot
    await asyncio.wait(line)
    assert [task.cancelled() for task in line] == [True, True]
    assert_nothing_held(house)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_grant_set_but_not_delivered_goes_back_when_the_call_is_cancelled(
    house: House, line: list[asyncio.Task[GroupGrant]], killed: bool
) -> None:
    """Also where its session has ended before."""
    granted: list[int] = []

    def cancel_between_grant_and_delivery() -> None:
        granted.append(house.engine.manager(CACHE).stats().held_by[SessionId(3)])
        if killed:
            house.engine.end_session(SessionId(3))
        line[1].cancel()

    line[0].cancel()
    asyncio.get_running_loop().call_soon(cancel_between_grant_and_delivery)
    await asyncio.wait(line)
    assert granted == [1]
    assert line[1].cancelled()
    assert_nothing_held(house)


async def test_a_session_that_ends_is_told_that_its_wait_is_over(house: House) -> None:
    task = await waiting_reserve(house, 4, session=2)
    other = await waiting_reserve(house, 4, session=3)
    house.engine.end_session(SessionId(2))
    with pytest.raises(TicketRefused) as refused:
        await task
    assert refused.value.refusal.reason is RefusalReason.CANCELLED
    house.disk.open_gate()
    assert len((await other).slots) == 4


async def test_cancelling_an_acquire_of_several_chains_gives_back_those_answered(house: House) -> None:
    below = [key(100), key(101)]
    house.disk.open_gate()
    await house.client().put(below)  # pushes two of the first chain down
    assert (await house.client().move(below, DISK)).results == (True, True)
    await house.engine.settle()
    above = [block for block, residency in house.listed().items() if residency & DEVICE.bit][:1]
    house.disk.close_gate()

    chains = [ChainRequest(above), ChainRequest(below)]
    task = asyncio.create_task(house.engine.acquire(CACHE, SessionId(2), [GROUP], DEVICE, chains, 30.0))
    await asyncio.sleep(0)
    assert house.engine.manager(CACHE).stats().held_by == {2: 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_held(house)


async def test_a_removed_cache_refuses_its_waiters_and_ends_its_moves_first(house: House) -> None:
    task = await waiting_reserve(house, 4, session=2)
    removal = asyncio.create_task(house.engine.remove_cache(CACHE))
    await asyncio.sleep(0)
    with pytest.raises(TicketRefused) as refused:
        await task
    assert refused.value.refusal.reason is RefusalReason.CANCELLED
    with pytest.raises(UnknownCache):
        await house.client().reserve(1)
    assert not removal.done()
    removal.cancel()  # the caller loses patience and asks again
    await asyncio.wait([removal])
    removal = asyncio.create_task(house.engine.remove_cache(CACHE))

    house.disk.open_gate()
    await removal
    assert sum(house.engine.queues().values()) == 0
    with pytest.raises(UnknownCache):
        house.engine.manager(CACHE).stats()


@pytest.fixture
async def used(tmp_path: Path) -> AsyncIterator[House]:
    """A chain on disk and in the device tier, used since."""
    async with House(tmp_path) as house:
        house.open({DEVICE: 4, DISK: 16})
        client = house.client()
        await client.put(CHAIN)
        assert (await client.move(CHAIN, DISK)).results == (True,) * 4
        assert await client.get(CHAIN) == 4
        await house.engine.settle()
        yield house


class SlowWrite:
    """In place of the store's write of uses."""

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = queue.SimpleQueue[None](), threading.Event()
        monkeypatch.setattr(house.disk, "write", self)

    def __call__(self, *uses: object) -> frozenset[int]:
        self.begun.put(None)
        assert self.go_on.wait(30)
        return frozenset()


async def test_a_removal_given_up_while_uses_are_written_can_be_asked_for_again(
    used: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SlowWrite(used, monkeypatch)
    removal = asyncio.create_task(used.engine.remove_cache(CACHE))
    await asyncio.to_thread(write.begun.get, timeout=30)
    removal.cancel()
    await asyncio.wait([removal])
    again = asyncio.create_task(used.engine.remove_cache(CACHE))
    await asyncio.wait([again], timeout=0.1)
    early = again.done()
    write.go_on.set()
    await again
    assert not early, "the store is still written to"
    assert write.begun.empty()


async def test_a_removed_cache_ends_what_began_while_its_uses_were_written(
    used: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of a cache that is gone would be nobody's, and whoever waits for all moves would wait for ever."""
    write = SlowWrite(used, monkeypatch)
    removal = asyncio.create_task(used.engine.remove_cache(CACHE))
    await asyncio.to_thread(write.begun.get, timeout=30)
    used.disk.close_gate()
    await used.engine.drop(CACHE, GROUP, CHAIN)
    deleted = sum(used.engine.queues().values())
    write.go_on.set()
    await asyncio.wait([removal], timeout=0.1)
    early = removal.done()
    used.disk.open_gate()
    await removal
    assert (deleted, early, sum(used.engine.queues().values())) == (4, False, 0)


async def test_caches_do_not_wait_for_each_other(house: House) -> None:
    other = CacheId(2)
    house.open({DEVICE: 4}, cache=other)
    await waiting_reserve(house, 4, session=2)
    grant = await house.client(2, other).reserve(4)
    assert len(grant.slots) == 4
    house.engine.end_session(SessionId(2))
    assert house.engine.manager(other).stats().held_by == {}


async def test_a_cancelled_prefetch_stops_what_has_not_begun(tmp_path: Path) -> None:
    many = [key(number) for number in range(MOVE_SLICE + 8)]
    async with House(tmp_path) as house:
        house.open({DEVICE: 2 * MOVE_SLICE, DISK: 2 * MOVE_SLICE})
        client = house.client()
        await client.put(many)
        assert (await client.move(many, DISK)).results == (True,) * len(many)
        house.disk.close_gate()
        task = asyncio.create_task(client.move(many, DEVICE))
        for _ in range(MOVE_SLICE):  # it is planned in parts, a turn of the loop each
            await asyncio.sleep(0)
        assert house.engine.queues()[DISK, DEVICE] == MOVE_SLICE
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        house.disk.open_gate()
        await house.engine.settle()
        places = house.engine.manager(CACHE).locate(GROUP, many)
        assert sum(bool(place.residency & DEVICE.bit) for place in places) == MOVE_SLICE


async def test_what_is_forgotten_is_so_even_if_the_system_goes_down(
    used: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test pulls the plug: the last word is the index's sync, after the transaction that deletes."""
    steps: list[str] = []
    for name in ("commit", "sync"):
        watch(monkeypatch, Index, name, steps)
    await used.engine.reset(CACHE, force=True)
    assert steps == ["commit", "sync"]


async def test_others_have_their_turn_while_a_large_subtree_is_dropped() -> None:
    """A chain of which one turn of the loop forgets a part."""
    many = [key(number) for number in range(1_500)]
    async with House() as house:
        house.open({Tier.HOST: len(many)})
        await house.client().put(many, Tier.HOST)
        manager = house.engine.manager(CACHE)
        drop = asyncio.create_task(house.engine.drop(CACHE, GROUP, many[:1]))
        seen = {len(many)}
        while not drop.done():
            seen.add(manager.match([GROUP], many).blocks)
            await asyncio.sleep(0)
        assert (await drop).dropped == len(many)
        assert any(0 < left < len(many) for left in seen), "a match in between finds the prefix that is left"
        assert manager.match([GROUP], many).blocks == 0
