"""The replay itself: what an engine would do with each request, and its books."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier import transfer
from kvtier.aio import AsyncClient
from kvtier.cache import Cache
from kvtier.errors import DeadlineExceeded, KvtierError, TierFull, TooShort
from kvtier.lease import Lease, ReadLease, WriteLease
from kvtier.replay.account import EventAccount
from kvtier.replay.payload import Payload
from kvtier.replay.trace import Request, hottest, key_of
from kvtier.session import Backoff
from kvtier.types import BlockResult, Tier, fastest

_PATIENCE_S: Final = 60.0
"""How long a request tries to get room before the replay gives up."""

Progress = Callable[[int], None]
"""Told the number of requests that are done."""


@dataclass(slots=True)
class Report:
    """The outcome. ``moves`` and ``removed`` are counted from the event stream, like ``events_seen``.

    ``hits``: blocks by the fastest tier they were found in when their request first acquired them; prefix hits only,
    counted before the request's own blocks are stored. ``hits_besides_first``: those on blocks other than the most
    referenced one of the requests replayed. ``unstored``: misses whose parent was evicted before they could be stored.
    """

    requests: int = 0
    block_refs: int = 0
    hits: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    hits_besides_first: int = 0
    stored: int = 0
    unstored: int = 0
    retries: int = 0
    verify_failures: int = 0
    seconds: float = 0.0
    moves: dict[str, dict[str, int]] = field(default_factory=dict)
    removed: int = 0
    events_seen: int = 0
    event_gaps: int = 0
    residency_mismatches: int = 0

    @property
    def misses(self) -> int:
        return self.block_refs - sum(self.hits.values())

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits.values()) / self.block_refs if self.block_refs else 0.0

    @property
    def flawless(self) -> bool:
        """No wrong byte, no event lost, no residency that the events do not explain."""
        return not (self.verify_failures or self.event_gaps or self.residency_mismatches)

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "block_refs": self.block_refs,
            "hits": {str(tier): count for tier, count in self.hits.items()},
            "misses": self.misses,
            "hit_ratio": round(self.hit_ratio, 6),
            "hits_besides_first": self.hits_besides_first,
            "stored": self.stored,
            "moves": self.moves,
            "removed": self.removed,
            "verify_failures": self.verify_failures,
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(self.requests / self.seconds, 3) if self.seconds else 0.0,
            "events_seen": self.events_seen,
            "event_gaps": self.event_gaps,
            "residency_mismatches": self.residency_mismatches,
        }


async def replay(
    client: AsyncClient,
    cache: Cache,
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Report:
    """Replays requests in order, ``concurrency`` at a time, and checks every byte and every event.

    Uses the cache's fastest tier that can be mapped. ``seed`` drives the back-off when that is full. Raises
    :class:`TierFull` or :class:`DeadlineExceeded` where a request gets no room for a minute.
    """
    async with EventAccount(client, cache) as account:
        run = _Run(cache, requests, seed, progress)
        began = time.perf_counter()
        await _all(run.work() for _ in range(concurrency))
        report = run.report
        report.seconds = time.perf_counter() - began
        report.residency_mismatches = len(await account.mismatches())
        report.events_seen, report.event_gaps, report.removed = account.events, account.gaps, account.removed
        report.moves = {
            edge: {"blocks": moved.blocks, "bytes": moved.bytes} for edge, moved in sorted(account.moves.items())
        }
    return report


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them side by side; the first failure ends the others and is what is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* KvtierError as failures:
        raise failures.exceptions[0] from failures


async def wrong_blocks(lease: ReadLease, payload: Payload) -> int:
    """How many of the lease's blocks hold other bytes than their keys say; all bytes are compared, in place."""
    wrong = 0

    def compare() -> None:
        nonlocal wrong
        for index, key in enumerate(lease.keys):
            (block,) = lease.view(index)
            wrong += not payload.matches(key, block)

    await transfer.run(compare, lease.blocks * lease.cache.block_bytes)
    return wrong


class _Run:
    """Shared by the workers of one replay."""

    def __init__(self, cache: Cache, requests: Sequence[Request], seed: int, progress: Progress) -> None:
        self.report = Report()
        self._cache = cache
        self._tier = cache.lease_tier()
        self._capacity = cache.slots(self._tier)
        self._payload = Payload(cache.block_bytes)
        self._hottest = hottest(requests)
        self._pending: Iterator[Request] = iter(requests)
        self._rng = random.Random(seed)
        self._progress = progress

    async def work(self) -> None:
        """One worker: takes the next request until there is none."""
        for request in self._pending:
            await _Visit(self, request).serve()
            self.report.requests += 1
            self._progress(self.report.requests)

    # What a visit needs, kept here because it is the same for all of them.

    @property
    def cache(self) -> Cache:
        return self._cache

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def capacity(self) -> int:
        return self._capacity

    def backoff(self) -> Backoff:
        return Backoff(first=0.005, most=0.5, rng=self._rng)

    def is_hottest(self, block: int) -> bool:
        return block == self._hottest

    async def verify(self, lease: ReadLease) -> None:
        self.report.verify_failures += await wrong_blocks(lease, self._payload)

    async def fill(self, lease: WriteLease, keys: Sequence[bytes]) -> None:
        """Writes the bytes that each key says."""

        def write() -> None:
            for index, key in enumerate(keys):
                (block,) = lease.view(index)
                self._payload.write(key, block)

        await transfer.run(write, len(keys) * self._cache.block_bytes)


class _Visit:
    """One request. Its blocks are handled in windows of at most the tier's capacity: nearly always one."""

    def __init__(self, run: _Run, request: Request) -> None:
        self._run = run
        self._ids = request.ids
        self._keys = [key_of(block) for block in request.ids]
        self._stored = 0
        """Length of the prefix that was stored when the request came."""
        self._found: dict[int, int] = {}
        """Residency of each hit, by position, when it was first acquired."""

    async def serve(self) -> None:
        run, report = self._run, self._run.report
        if self._keys:
            self._stored = (await run.cache.match(b"".join(self._keys))).blocks
        position = 0
        while position < len(self._keys):
            served = await self._window_with_patience(position)
            if served is None:
                report.unstored += len(self._keys) - position
                break
            position = served
        report.block_refs += len(self._keys)
        for place, residency in self._found.items():
            tier = fastest(residency)
            if tier is not None:
                report.hits[tier] += 1
                report.hits_besides_first += not run.is_hottest(self._ids[place])

    async def _window_with_patience(self, start: int) -> int | None:
        """:meth:`_window`, again and again while there is no room, holding nothing meanwhile."""
        backoff = self._run.backoff()
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._window(start)
            except (TierFull, DeadlineExceeded):
                if time.monotonic() > give_up:
                    raise
                self._run.report.retries += 1
                await asyncio.sleep(backoff.next())

    async def _window(self, start: int) -> int | None:
        """Serves the blocks from ``start`` that the tier can hold at once; how far that was.

        None where a block could not be stored for want of its parent.
        """
        held: list[Lease] = []
        try:
            end = min(start + self._run.capacity, len(self._keys))
            position, complete = await self._acquire(start, min(end, self._stored), held)
            if not complete or position == end:
                return position
            return end if await self._store(position, end, held) else None
        finally:
            await self._run.cache.release(*reversed(held))

    async def _acquire(self, start: int, end: int, held: list[Lease]) -> tuple[int, bool]:
        """Holds and verifies what is stored of [start, end); where that ends, and whether room was enough for it."""
        if start >= end:
            return start, True
        run = self._run
        try:
            lease = await run.cache.acquire(self._keys[start:end], run.tier, min_blocks=1)
        except TooShort:
            return start, True
        held.append(lease)
        await run.verify(lease)
        for offset, residency in enumerate(lease.found_in):
            self._found.setdefault(start + offset, residency)
        return start + lease.blocks, lease.blocks == lease.matched

    async def _store(self, start: int, end: int, held: list[Lease]) -> bool:
        """Stores [start, end). False where a parent was missing."""
        run, keys = self._run, self._keys[start:end]
        lease = await run.cache.reserve(len(keys), run.tier)
        held.append(lease)
        await run.fill(lease, keys)
        results = await lease.commit(keys, parent=self._keys[start - 1] if start else None)
        run.report.stored += results.count(BlockResult.OK)
        return BlockResult.PARENT_MISSING not in results
