"""The daemon as the scheduler sees it: looked up in shared memory, never waited for.

A thread of its own opens the cache, reserves slots ahead, and commits what the workers have written. The scheduler's
thread looks up, and takes slots that are reserved already.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np

from kvtier.abi.keys import KEY_BYTES
from kvtier.cache import Cache
from kvtier.client import AsyncClient, connect
from kvtier.deadline import Backoff
from kvtier.engine.layout import Layout
from kvtier.engine.options import Complaints, EngineOptions
from kvtier.engine.resets import PendingReset
from kvtier.engine.work import Placed
from kvtier.errors import CallerError, InvalidArgument, KvtierError, RetryableError, TierFull
from kvtier.events import Event
from kvtier.groups import AcrossLease
from kvtier.lease import WriteLease
from kvtier.sync.loop import LoopThread
from kvtier.types import BlockResult, CacheOptions, Tier, WriteTicket
from kvtier.wire import MAX_KEYS, split_keys

START_S: Final = 5.0
"""How long a connector's start waits for the daemon; afterwards the engine runs, and kvtier is tried on."""
CALL_S: Final = 5.0
_DOUBT_S: Final = 0.2
_LEAST_PIN_S: Final = 0.01
_MOST_OF_TIER: Final = 4
"""Reserved, with what is being saved, is at most one in so many slots of the tier: loads need some, too."""
_MOST_AHEAD: Final = 1 << 16
_MOST_EVENTS: Final = 1 << 16

_STAYS_BLANK: Final = frozenset({BlockResult.PARENT_MISSING, BlockResult.PARENT_CONFLICT})

_log = logging.getLogger("kvtier.engine")


@dataclass(slots=True, eq=False)
class Reserved:
    """A lease whose slots are taken one by one. ``free``: indices that nobody has taken; ``open``: how many slots are
    neither committed nor given up."""

    lease: WriteLease
    ticket: WriteTicket
    free: deque[int]
    open: int

    @property
    def lost(self) -> bool:
        """The session is over in which it was granted, and the lease with it."""
        return self.lease.cache.session_number != self.lease.binding.session


Slots: TypeAlias = list[tuple[Reserved, list[int]]]
"""By lease, indices there."""


@dataclass(slots=True)
class Taken:
    """Slots for blocks of one group; ``keys`` and ``parents`` are packed, a zero parent is none."""

    group: int
    keys: bytes
    parents: bytes
    at: Slots

    def placed(self, pages: Sequence[int]) -> tuple[Placed, ...]:
        """The same for the workers, a value a lease."""
        rest = iter(pages)
        return tuple(
            Placed(
                reserved.ticket,
                tuple([reserved.lease.slots[index] for index in indices]),
                tuple(islice(rest, len(indices))),
            )
            for reserved, indices in self.at
        )


@dataclass(slots=True)
class Writing:
    """A save: where the workers write it, and whether its commit found its parents."""

    taken: tuple[Taken, ...]
    missing_parent: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Leader:
    """Opened by :class:`kvtier.engine.Planner`. No method but :meth:`close` and :meth:`pin` waits; none raises."""

    def __init__(self, layout: Layout, options: EngineOptions) -> None:
        """Raises :class:`InvalidArgument`, and with ``on_error = "fail"`` what keeps the cache from being opened."""
        self.layout: Final = layout
        self.options: Final = options
        self.complaints: Final = Complaints(_log)
        self.name: Final = layout.cache(options.cache)
        self._reset: Final = PendingReset(self.name, options.address)
        self._groups: Final = range(len(layout.groups))
        self._full: Final = [group for group in self._groups if not layout.groups[group].window] or [0]
        self._cache: Cache | None = None
        self._client: AsyncClient | None = None
        self._fault: KvtierError | None = None
        self._late: Future[AcrossLease] | None = None
        """The last hold that could not be had in time."""
        self._tried: Final = threading.Event()
        """The first attempt to open the cache is over."""
        self._reserved: Final[list[deque[Reserved]]] = [deque() for _ in self._groups]
        self._target: Final = [options.reserve_blocks for _ in self._groups]
        self._written: Final[deque[Writing]] = deque()
        self._events: Final[deque[Event]] = deque(maxlen=_MOST_EVENTS)
        self._watching: asyncio.Task[None] | None = None
        self._wake: asyncio.Event
        self._thread: Final = LoopThread("kvtier-leader")
        self._serving: Final = self._thread.submit(self._serve)
        self._tried.wait(START_S)
        if self._cache is None:
            self._without()

    # -- the scheduler's thread ------------------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """The cache is open, and the daemon answered when it was last asked."""
        return self._cache is not None and self._client is not None and self._client.connected

    def prefix_length(self, keys: bytes, *, for_save: bool = False) -> int:
        """The longest prefix of a chain that all groups can serve, looked up in mapped memory. While the daemon does
        not answer, of memory alone. ``for_save``: to store the rest, which counts as no question."""
        cache = self._cache
        if cache is None or self._reset.due:
            return 0
        few, groups = keys[: MAX_KEYS * KEY_BYTES], range(len(cache.spec.groups))
        return cache.reader.prefix_length(few, groups, for_save=for_save) or 0

    def stored(self, keys: bytes, group: int) -> bytes:
        """For each block of a group a byte, which is not 0 where the block is there for certain."""
        cache = None if self._reset.due else self._cache
        return (cache and cache.reader.probe(keys, group)) or bytes(len(keys) // KEY_BYTES)

    def sources(self, keys: bytes) -> dict[str, int]:
        """How many of the blocks there are by the fastest tier that they are in, in the first group."""
        cache = self._cache
        found = None if cache is None else cache.reader.locate(keys[: MAX_KEYS * KEY_BYTES], self._full[0])
        if found is None:
            return {"host": 0, "disk": 0}
        residency = np.frombuffer(bytes(found.residency), np.uint8)
        host = int(np.count_nonzero(residency & (Tier.DEVICE.bit | Tier.HOST.bit)))
        return {"host": host, "disk": int(np.count_nonzero(residency)) - host}

    def take(self, group: int, count: int) -> tuple[Slots, int]:
        """Slots of a group that are reserved already, and how many: ``count``, or as many as there are."""
        taken: Slots = []
        left = count
        for reserved in self._live(group):
            some = [reserved.free.popleft() for _ in range(min(left, len(reserved.free)))]
            if some:
                taken.append((reserved, some))
                left -= len(some)
        if left:
            self._target[group] = min(2 * max(self._target[group], count), _MOST_AHEAD)
        self._look()
        return taken, count - left

    def give_back(self, taken: Slots, keep: int = 0) -> Slots:
        """Slots that nothing was placed in: all but the first ``keep``, which it returns."""
        kept: Slots = []
        for reserved, indices in taken:
            reserved.free.extendleft(reversed(indices[keep:]))
            if indices[:keep]:
                kept.append((reserved, indices[:keep]))
            keep = max(0, keep - len(indices))
        return kept

    def commit(self, writing: Writing) -> None:
        """All ranks have written: it is committed soon. ``writing.done`` is set when that has ended."""
        self._written.append(writing)
        self._look()

    def drop(self, writing: Writing) -> None:
        """A rank could not write, or the pages were taken away: the slots are free for other blocks."""
        self.complaints.note("saves that were dropped")
        self.doubt()
        for taken in writing.taken:
            self.give_back(taken.at)
        writing.done.set()

    def pin(self, keys: bytes) -> AcrossLease | None:
        """Holds a prefix in the host tier: waits for at most ``pin_wait`` seconds. None: it could not be had.

        While the daemon owes an answer, nobody waits for another.
        """
        wait = self.options.pin_wait
        if not (self._late is None or self._late.done()):
            return None
        asked = self._acquiring(keys, min_blocks=1, timeout=max(wait, _LEAST_PIN_S))
        if asked is None:
            return None
        try:
            return asked.result(wait)
        except KvtierError as error:
            self.complaints.add("a hit could not be pinned", error)
        except TimeoutError:
            self._late = asked
            self.unpin_later(asked)
        return None

    @property
    def has_store(self) -> bool:
        """The daemon has a store beyond the host."""
        return self._cache is not None and self._cache.info.remote

    def fetch(self, keys: bytes, wait: float) -> Future[AcrossLease] | None:
        """Begins to bring a prefix from the store and to hold it in the host tier. None: it cannot be had now."""
        price = self.options.recompute_seconds_per_block
        return self._acquiring(keys, recompute_seconds_per_block=price, timeout=wait)

    def _acquiring(self, keys: bytes, **wanted: Any) -> Future[AcrossLease] | None:
        cache = self._cache
        if cache is None or not self.answers:
            return None

        async def acquire() -> AcrossLease:
            return await cache.across.acquire(keys, Tier.HOST, **wanted)

        with suppress(KvtierError):  # closed
            return self._thread.submit(acquire)
        return None

    def note_why_not_fetched(self, keys: bytes, blocks: int) -> None:
        """Counts, in the background, why a fetch brought no more than so many blocks."""
        cache, price = self._cache, self.options.recompute_seconds_per_block

        async def look() -> None:
            reach = (await cache.across.match(keys, remote=True)).remote_blocks if cache is not None and price else 0
            why = "to recompute is cheaper" if reach > blocks else "the store has no more"
            self.complaints.note(f"not fetched: {why}")

        self._soon(look, "the store could not be asked")

    def unpin_later(self, asked: Future[AcrossLease]) -> None:
        """Gives a hold back that is still to come, in the background."""

        async def give_back() -> None:
            await (await asyncio.wrap_future(asked)).release()

        self._soon(give_back, "a prefix could not be held in time")

    def unpin(self, lease: AcrossLease) -> None:
        """Gives a hold back, in the background."""
        self._soon(lease.release, "a hold could not be given back")

    def reset(self) -> None:
        """Forgets every block of the cache: no block of before is offered from now on, also by the next engine. The
        daemon is told in the background, for as long as it takes."""
        self._reset.begin()
        self._soon(self._carry_out_reset, "the cache could not be reset")

    def events(self) -> list[Event]:
        """Those since this was asked last; the oldest are lost where that is long ago."""
        seen: list[Event] = []
        while self._events:
            seen.append(self._events.popleft())
        return seen

    def doubt(self) -> None:
        """A copy failed: asks whether the daemon answers. While it does not, only memory is offered."""
        client = self._client
        if client is not None:
            self._soon(lambda: client.stats(timeout=_DOUBT_S), "the daemon did not answer after a copy had failed")

    def close(self) -> None:
        """Ends the session: the daemon has all slots back."""

        async def farewell() -> None:
            self._serving.cancel()
            if self._client is not None:
                await self._client.close()

        self._thread.stop(farewell)

    # -- the leader's own thread -----------------------------------------------------------------------------------

    def _without(self) -> None:
        """There is no cache yet. Raises where that is to end the engine."""
        fault = self._fault or CallerError(f"no daemon answers within {START_S:g} s", reason="NO_DAEMON")
        if self.options.on_error == "fail":
            self.close()
            raise fault
        later = ", until it answers" if isinstance(fault, RetryableError) else ""
        _log.warning("the engine runs without kvtier%s: %s", later, fault)

    def _live(self, group: int) -> list[Reserved]:
        for reserved in list(self._reserved[group]):
            if reserved.lost:
                with suppress(ValueError):  # the other thread was quicker
                    self._reserved[group].remove(reserved)
        return list(self._reserved[group])

    def _soon(self, work: Callable[[], Coroutine[Any, Any, object]], fault: str) -> None:
        """Runs it on the leader's own thread. Nobody waits for it."""

        async def run() -> None:
            try:
                await work()
            except KvtierError as error:
                self.complaints.add(fault, error)

        with suppress(KvtierError):  # closed: the daemon has everything back
            self._thread.submit(run)

    def _look(self) -> None:
        with suppress(KvtierError):  # closed
            self._thread.call_soon(self._wake.set)

    async def _serve(self) -> None:
        self._wake = asyncio.Event()
        try:
            cache = await self._open()
            await self._refill(cache)
            self._cache = cache
            self._soon(self._carry_out_reset, "the cache could not be reset")
        except KvtierError as error:
            self._fault = error
            return
        finally:
            self._tried.set()
        size = sum(cache.spec.block_bytes(group) for group in self._groups)
        tiers = ", ".join(f"{cache.slots(tier)} {tier}" for tier in cache.tiers)
        pieces = sum(len(group.planes) for group in self.layout.groups)
        line = "cache %s: blocks of %d bytes in %d pieces a rank, slots of the first group: %s"
        _log.info(line, self.name, size, pieces, tiers)
        if self.options.events and self._client is not None:
            self._watching = asyncio.create_task(self._watch(self._client))
        while True:
            self._wake.clear()
            while self._written:
                await self._commit(self._written.popleft())
            await self._refill(cache)
            if not self._written:
                await self._wake.wait()

    async def _carry_out_reset(self) -> None:
        """Blocks committed while a reset is due go with it."""
        backoff = Backoff(0.1, 5.0)
        while self._cache is not None and self._reset.due:
            why: object = "somebody holds or pins blocks"
            try:
                if await self._reset.carry_out(self._cache):
                    continue  # a later reset may be due
            except KvtierError as error:
                why = error
            self.complaints.add("the cache could not be reset yet", why)
            await asyncio.sleep(backoff.next())

    async def _watch(self, client: AsyncClient) -> None:
        async for item in client.watch(caches=[self.name]):
            if isinstance(item, Event):
                self._events.append(item)

    async def _open(self) -> Cache:
        backoff = Backoff(0.1, 5.0)
        options = CacheOptions(write_policy=self.options.policy)
        while True:
            try:
                if self._client is None:
                    self._client = await connect(self.options.address, timeout=CALL_S)
                cache = await self._client.open_cache(
                    self.name, self.layout.spec, budgets=self.options.budgets, options=options
                )
                if self._reset.due and not await self._reset.carry_out(cache):
                    raise RetryableError("blocks that were to be forgotten are held or pinned", reason="HELD")
            except TierFull:
                raise
            except RetryableError as error:
                self._fault = error
                self._tried.set()
                await asyncio.sleep(backoff.next())
                continue
            if not cache.mapped or Tier.HOST in cache.unmapped or Tier.HOST not in cache.tiers:
                limit = "a daemon on this host with a host tier: an engine's pages are copied through its memory"
                raise InvalidArgument("kvtier setting address", self._client.address, limit)
            return cache

    async def _refill(self, cache: Cache) -> None:
        for group in self._groups:
            of_group = cache.in_group(group)
            most = max(1, of_group.slots(Tier.HOST) // _MOST_OF_TIER)
            target = min(self._target[group], most)
            live = self._live(group)
            free = sum(len(reserved.free) for reserved in live)
            wanted = min(target - free, most - sum(reserved.open for reserved in live))
            if 2 * free > target or wanted <= 0:
                continue
            try:
                lease = await of_group.reserve(wanted, Tier.HOST, timeout=CALL_S)
            except KvtierError as error:
                self.complaints.add("no slots could be reserved", error)
                continue
            self._reserved[group].append(Reserved(lease, lease.ticket(), deque(range(len(lease))), len(lease)))

    async def _commit(self, writing: Writing) -> None:
        try:
            # A full-attention group last: a prefix is found when every group has it.
            for taken in sorted(writing.taken, key=lambda each: not self.layout.groups[each.group].window):
                await self._commit_group(writing, taken)
        except KvtierError as error:
            self.complaints.add("a save could not be committed", error)
            await self._give_up(writing)
        finally:
            writing.done.set()

    async def _commit_group(self, writing: Writing, taken: Taken) -> None:
        keys, parents, start = taken.keys, split_keys(taken.parents), 0
        for reserved, indices in taken.at:
            stop = start + len(indices)
            results = await reserved.lease.commit(
                keys[start * KEY_BYTES : stop * KEY_BYTES],
                parents=parents[start:stop],
                at=indices,
                hold=False,
                timeout=CALL_S,
            )
            for index, result in zip(indices, results, strict=True):
                self.complaints.note(f"commit {result.name.lower()}")
                if result in _STAYS_BLANK:
                    writing.missing_parent = True
                    reserved.free.append(index)
                else:
                    reserved.open -= 1
            if not reserved.open:
                await self._end(taken.group, reserved)
            start = stop

    async def _give_up(self, writing: Writing) -> None:
        """Whether its slots hold blocks is not known: their leases end."""
        for taken in writing.taken:
            for reserved, _ in taken.at:
                await self._end(taken.group, reserved)

    async def _end(self, group: int, reserved: Reserved) -> None:
        with suppress(ValueError):
            self._reserved[group].remove(reserved)
        try:
            await reserved.lease.cache.release(reserved.lease)
        except KvtierError as error:
            self.complaints.add("slots could not be given back", error)
