"""Ring and log as one stream: whatever has left which of them, all ids are events or losses, once and in order."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.v1 import events_pb2
from kvtierd.core.events import BlockChanges, BlockEvent, Cause, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, Label, Tier
from kvtierd.event_log import EventLog, EventRun
from kvtierd.event_log.segments import LogSegments
from kvtierd.service.hub import CacheHeader, EventHub, Loss
from kvtierd.service.watch import EventFilter, Watcher, every_cache, no_cache
from tests.unit.event_log.runs import MB

HEADERS = {CacheId(1): CacheHeader("one"), CacheId(2): CacheHeader("two")}
RING_BYTES = 5000
"""For some fifty events."""
LONG = Label(b"", bytes(400))
PATIENCE_S = 10.0


def event(number: int, time_ns: int = 0, cache: int = 1, label: Label | None = None) -> BlockEvent:
    blocks = BlockChanges([Key(number.to_bytes(32, "big"))], [None], [Tier.HOST.bit], [35], [label], [None])
    return BlockEvent(EventId(number), EventType.STORED, Cause.COMMIT, CacheId(cache), GroupId(0), time_ns, blocks)


class Forgetful(EventLog):
    """``logs``: else what it is offered is lost."""

    logs = True

    def offer(self, run: EventRun) -> int:
        return super().offer(run) if self.logs else run.last


class Life:
    """One life of a daemon, as far as its events go."""

    def __init__(self, path: Path, epoch: int, epoch_first: int, last: int, max_bytes: int = 4 * MB) -> None:
        self.log = Forgetful.open(path, max_bytes, MB)
        self.log.start(epoch_first)
        self.hub = EventHub(epoch, last, epoch_first, HEADERS, RING_BYTES, self.log)

    async def publish(self, count: int, make: Callable[[int], BlockEvent] = event) -> None:
        first = self.hub.last + 1
        for at in range(first, first + count, 10):
            self.hub.publish([make(number) for number in range(at, min(at + 10, first + count))])
            while self.hub.readable < self.hub.last:
                await self.hub.news(self.hub.readable)

    async def logged(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.log.status().newest < self.hub.last:  # noqa: ASYNC110  another thread's, without an event
                await asyncio.sleep(0.002)

    async def told(self, epoch: int, cursor: int) -> tuple[list[int], list[Loss]]:
        """All ids that are told from there to the last, and the losses; each joins what was before."""
        seen: list[int] = []
        losses: list[Loss] = []
        while (found := await self.hub.after(epoch, cursor)) is not None:
            if isinstance(found, Loss):
                assert found.first == cursor + 1 <= found.last + 1
                losses.append(found)
                epoch, cursor = found.then, found.last
                continue
            ids = [each.id for each in events_pb2.WatchBatch.FromString(found.body).events]
            assert found.first == cursor + 1
            assert ids == list(range(found.first, found.last + 1))
            epoch, cursor = found.epoch, found.last
            seen += ids
        assert (epoch, cursor) == (self.hub.epoch, self.hub.readable)
        return seen, losses

    async def end(self) -> None:
        await self.log.finish(PATIENCE_S)
        self.log.close()


@asynccontextmanager
async def life(path: Path, epoch: int = 1, epoch_first: int = 1, last: int = 0, **more: int) -> AsyncIterator[Life]:
    one = Life(path, epoch, epoch_first, last, **more)
    try:
        yield one
    finally:
        await one.end()


def first_to_last(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


async def test_each_epoch_is_told_up_to_what_was_logged_of_it(tmp_path: Path) -> None:
    """Of the third nothing was."""
    async with life(tmp_path / "log") as one:
        await one.publish(100)
    async with life(tmp_path / "log", 2, 1001, 1000) as two:
        await two.publish(50)
        two.log.logs = False
        await two.publish(10)
    async with life(tmp_path / "log", 3, 2001, 2000) as three:
        three.log.logs = False
        await three.publish(5)
    async with life(tmp_path / "log", 4, 3001, 3000) as now:
        await now.publish(120)
        ids, losses = await now.told(1, 90)
        assert ids == [*first_to_last(91, 100), *first_to_last(1001, 1050), *first_to_last(3001, 3120)]
        assert losses == [Loss(1, 101, 1000, "unclean-stop", 2), Loss(2, 1051, 3000, "unclean-stop", 4)]
        assert await now.told(2, 1049) == ([1050, *first_to_last(3001, 3120)], losses[1:])
        assert await now.told(2, 1055) == (first_to_last(3001, 3120), [Loss(2, 1056, 3000, "unclean-stop", 4)])
        assert await now.told(2, 3000) == (first_to_last(3001, 3120), [])
        assert [now.hub.end_of(epoch) for epoch in (1, 2, 3, 4)] == [1000, 3000, 3000, None]
        assert [now.hub.epoch_of(number) for number in (1, 1000, 1001, 3000, 3001)] == [1, 1, 2, 2, 4]


async def test_what_was_not_logged_is_a_loss_once_the_ring_has_it_no_more(tmp_path: Path) -> None:
    async with life(tmp_path / "log") as now:
        await now.publish(100)
        await now.logged()
        now.log.logs = False
        await now.publish(100)
        now.log.logs = True
        await now.publish(99)
        await now.logged()
        await now.publish(1)
        ids, losses = await now.told(1, 0)
        assert losses == [Loss(1, 101, 200, "not-logged", 1)]
        assert ids == [*first_to_last(1, 100), *first_to_last(201, 300)]
        await now.logged()
        now.log.logs = False
        await now.publish(100)
        ids, losses = await now.told(1, 250)
        assert losses == [Loss(1, 301, now.hub._oldest_in_memory - 1, "not-logged", 1)]


async def test_what_was_deleted_is_told_to_be(tmp_path: Path) -> None:
    async with life(tmp_path / "log", max_bytes=MB) as before:
        await before.publish(100, lambda number: event(number, time_ns=number))
    async with life(tmp_path / "log", 2, 1001, 1000, max_bytes=MB) as now:
        await now.publish(3000, lambda number: event(number, time_ns=number, label=LONG))
        await now.logged()
        oldest = now.hub.oldest
        assert 1001 < oldest < 3900
        ids, losses = await now.told(1, 50)
        assert ids == first_to_last(oldest, 4000)
        assert losses == [Loss(1, 51, 1000, "compacted", 2), Loss(2, 1001, oldest - 1, "compacted", 2)]
        # A time before what is left: it begins with the loss. A later one does not.
        assert await now.hub.since(oldest - 10) == 1000
        assert await now.hub.since(oldest + 10) == oldest + 9


async def test_a_time_is_found_wherever_its_event_is(tmp_path: Path) -> None:
    async with life(tmp_path / "log") as now:
        await now.publish(200, lambda number: event(number, time_ns=number * 10))
        await now.logged()
        now.log.logs = False
        await now.publish(20, lambda number: event(number, time_ns=number * 10))
        for number in (1, 55, 180, 200, 201, 219, 220):
            assert await now.hub.since(number * 10) == number - 1
            assert await now.hub.since(number * 10 - 9) == number - 1
        assert await now.hub.since(2201) == 220
        assert await now.hub.since(0) == 0


async def test_a_time_is_found_before_its_event_can_be_read(tmp_path: Path) -> None:
    """Whoever notes the time, has something done and then watches since that time must be told of it."""
    async with life(tmp_path / "log") as now:
        await now.publish(20, lambda number: event(number, time_ns=number * 10))
        now.hub.publish([event(number, time_ns=number * 10) for number in range(21, 31)])
        assert now.hub.readable == 20
        assert await now.hub.since(250) == 24
        assert await now.hub.since(301) == 30


async def test_readers_at_random_while_it_goes_on(tmp_path: Path) -> None:
    """Many of them at once, at places in ring, log and between, with a log that compacts meanwhile."""
    rng = random.Random(5)
    async with life(tmp_path / "log", max_bytes=MB) as now:

        async def write() -> None:
            for _ in range(60):
                await now.publish(rng.randrange(1, 60), lambda number: event(number, label=LONG))
                await asyncio.sleep(0)

        async def read() -> None:
            cursor = rng.randrange(now.hub.readable + 1)
            seen, losses = await now.told(1, cursor)
            covered = set(seen).union(*(range(loss.first, loss.last + 1) for loss in losses))
            assert covered.issuperset(range(cursor + 1, now.hub.readable + 1))
            assert len(covered) == len(seen) + sum(loss.last - loss.first + 1 for loss in losses)
            assert {loss.reason for loss in losses} <= {"compacted"}

        async def told_all() -> None:
            for _ in range(5):
                await read()
                await asyncio.sleep(0)

        await now.publish(10)
        await asyncio.gather(write(), *(told_all() for _ in range(20)))


async def test_a_hundred_that_catch_up_get_all_of_it_and_keep_nobody_waiting(tmp_path: Path) -> None:
    async with life(tmp_path / "log") as now:
        await now.publish(1999)
        await now.logged()
        await now.publish(1)
        catching_up = [asyncio.create_task(now.told(1, 10 * number)) for number in range(100)]
        await asyncio.sleep(0)
        keeping_up = await now.told(1, now.hub._oldest_in_memory - 1)
        assert len(keeping_up[0]) == now.hub.last - now.hub._oldest_in_memory + 1
        assert not any(task.done() for task in catching_up), "who needs no log waited for those who do"
        for number, (ids, losses) in enumerate(await asyncio.gather(*catching_up)):
            assert (ids, losses) == (first_to_last(10 * number + 1, 2000), [])


async def test_what_cannot_be_read_is_a_loss_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with life(tmp_path / "log") as now:
        await now.publish(199)
        await now.logged()
        await now.publish(1)

        def fails(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(LogSegments, "read", fails)
        ids, losses = await now.told(1, 0)
        assert losses == [Loss(1, 1, now.hub._oldest_in_memory - 1, "not-logged", 1)]
        assert ids == first_to_last(now.hub._oldest_in_memory, 200)


async def batches(now: Life, wanted: EventFilter, until: int, heartbeat_s: float = 0.01) -> list[events_pb2.WatchBatch]:
    got = []
    async for raw in Watcher(now.hub, 1, 0, wanted, heartbeat_s).follow():
        got.append(events_pb2.WatchBatch.FromString(raw))
        if got[-1].last_id >= until:
            break
    return got


async def test_filters_and_rights_hold_for_what_the_log_tells(tmp_path: Path) -> None:
    label = Label(b"", b"secret!!")
    async with life(tmp_path / "log") as now:
        await now.publish(300, lambda number: event(number, cache=1 + number % 2, label=label))
        await now.logged()
        allowed = EventFilter().allowed(every_cache, every_cache)
        told = [each for batch in await batches(now, allowed, 300) for each in batch.events]
        assert [each.tokens[0].token_ids for each in told] == [b"secret!!"] * 300
        other = EventFilter.of(events_pb2.WatchFilter(caches=["two"])).allowed(lambda cache: True, no_cache)
        got = await batches(now, other, 300)
        assert [each.id for batch in got for each in batch.events] == first_to_last(1, 300)[::2]
        assert b"secret" not in b"".join(batch.SerializeToString() for batch in got)
        covered = [number for batch in got for number in range(batch.first_id, batch.last_id + 1)]
        assert covered == first_to_last(1, 300)
        one_key = EventFilter.of(events_pb2.WatchFilter(key_prefixes=[(77).to_bytes(32, "big")]))
        assert [each.id for batch in await batches(now, one_key, 300) for each in batch.events] == [77]


async def test_a_watcher_covers_the_end_of_an_epoch_before_it_tells_of_the_next(tmp_path: Path) -> None:
    async with life(tmp_path / "log") as one:
        await one.publish(100)
    async with life(tmp_path / "log", 2, 1001, 1000) as now:
        await now.publish(10, lambda number: event(number, cache=2))
        wanted = EventFilter.of(events_pb2.WatchFilter(caches=["two"]))
        got = await batches(now, wanted, 1010, heartbeat_s=3600)
    assert [(batch.epoch, batch.first_id, batch.last_id) for batch in got if not batch.HasField("gap")][-2:] == [
        (1, 1, 100),
        (2, 1001, 1010),
    ]
    (gap,) = [batch for batch in got if batch.HasField("gap")]
    assert (gap.epoch, gap.first_id, gap.last_id) == (2, 1001, 1000)
    assert (gap.gap.epoch, gap.gap.first_id, gap.gap.last_id) == (1, 101, 1000)
