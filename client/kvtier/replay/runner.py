"""Replays a request trace as an engine would, and checks every byte and every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtier.cache import Cache
from kvtier.client import AsyncClient
from kvtier.errors import DeadlineExceeded, KvtierError, TierFull
from kvtier.lease import Lease, ReadLease, WriteLease
from kvtier.mirror import Mirror
from kvtier.replay.trace import Payload, Request, key_of
from kvtier.session import Backoff
from kvtier.types import BlockResult, Tier, fastest

_PATIENCE_S: Final = 60.0
"""How long a request tries to get room before the replay gives up."""
_QUIET_S: Final = 10.0
"""How long the comparison with the daemon's listing waits for a quiet cache."""
_PAUSE_S: Final = 0.1


@dataclass(slots=True)
class Report:
    """The outcome. ``event_gaps``: how often events were lost.

    ``hits``: prefix hits by the fastest tier of each block, counted when a request first acquires it.
    """

    requests: int = 0
    block_refs: int = 0
    hits: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    stored: int = 0
    retries: int = 0
    verify_failures: int = 0
    seconds: float = 0.0
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
        """No wrong byte, no lost event, no block that is elsewhere than the events say."""
        return not (self.verify_failures or self.event_gaps or self.residency_mismatches)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "hits": {str(tier): count for tier, count in self.hits.items()},
            "misses": self.misses,
            "hit_ratio": round(self.hit_ratio, 6),
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(self.requests / self.seconds, 3) if self.seconds else 0.0,
        }


async def replay(
    client: AsyncClient,
    cache: Cache,
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Replays the requests in order, ``concurrency`` at a time, in the cache's fastest mapped tier.

    Args:
        progress: called with the number of requests that are done.

    Raises:
        TierFull, DeadlineExceeded: a request got no room for a minute.
    """
    report = Report()
    async with Mirror(client, [cache.name]) as mirror:
        run = _Replay(cache, requests, report, progress)
        began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(run.work())
        except* KvtierError as failures:
            raise failures.exceptions[0] from failures
        report.seconds = time.perf_counter() - began
        report.residency_mismatches = await _mismatches(cache, mirror)
        report.event_gaps = mirror.resyncs
    return report


async def wrong_blocks(lease: ReadLease, payload: Payload) -> int:
    """How many blocks of the lease hold other bytes than their keys say. All bytes are compared in place."""

    def compare() -> int:
        return sum(not payload.matches(key, lease.view(index)[0]) for index, key in enumerate(lease.keys))

    return await asyncio.to_thread(compare)


class _Replay:
    """The requests of one replay, shared by its workers. A longer prompt is cut to the capacity of the tier."""

    def __init__(
        self, cache: Cache, requests: Sequence[Request], report: Report, progress: Callable[[int], None]
    ) -> None:
        self._cache = cache
        self._report = report
        self._progress = progress
        self._tier = cache.lease_tier()
        self._payload = Payload(cache.block_bytes)
        self._pending: Iterator[Request] = iter(requests)

    async def work(self) -> None:
        """Serves requests until there is none left."""
        for request in self._pending:
            await self._serve([key_of(block) for block in request.ids[: self._cache.slots(self._tier)]])
            self._report.requests += 1
            self._progress(self._report.requests)

    async def _serve(self, keys: list[bytes]) -> None:
        """Serves one request. While the tier is full, it is tried again, with nothing held between two attempts."""
        found_in: dict[int, int] = {}
        backoff, give_up = Backoff(first=0.005, most=0.5), time.monotonic() + _PATIENCE_S
        while keys:
            try:
                await self._attempt(keys, found_in)
                break
            except (TierFull, DeadlineExceeded):
                if time.monotonic() > give_up:
                    raise
                self._report.retries += 1
                await asyncio.sleep(backoff.next())
        self._report.block_refs += len(keys)
        for residency in found_in.values():
            tier = fastest(residency)
            if tier is not None:
                self._report.hits[tier] += 1

    async def _attempt(self, keys: list[bytes], found_in: dict[int, int]) -> None:
        """Acquires and verifies what is stored, and stores the rest.

        Args:
            found_in: gets the residency of each hit, by position, unless an earlier attempt has set it.
        """
        held: list[Lease] = []
        try:
            hits = await self._cache.acquire(keys, self._tier)
            held.append(hits)
            self._report.verify_failures += await wrong_blocks(hits, self._payload)
            for place, residency in enumerate(hits.found_in):
                found_in.setdefault(place, residency)
            if misses := keys[hits.blocks :]:
                lease = await self._cache.reserve(len(misses), self._tier)
                held.append(lease)
                await asyncio.to_thread(self._fill, lease, misses)
                results = await lease.commit(misses, parent=keys[hits.blocks - 1] if hits.blocks else None)
                self._report.stored += results.count(BlockResult.OK)
        finally:
            await self._cache.release(*reversed(held))

    def _fill(self, lease: WriteLease, keys: Sequence[bytes]) -> None:
        for index, key in enumerate(keys):
            self._payload.write(key, lease.view(index)[0])


async def _mismatches(cache: Cache, mirror: Mirror) -> int:
    """How many blocks are elsewhere in the daemon's listing than by its events.

    A listing takes several calls, and a block may move meanwhile. So it is repeated until both agree, or for
    ``_QUIET_S`` seconds.
    """
    give_up = time.monotonic() + _QUIET_S
    while True:
        pages = [page async for page in cache.pages()]
        await mirror.synced(pages[-1].as_of, timeout=_QUIET_S)
        listed = {block.key: block.residency for page in pages for block in page.blocks}
        told = {block.key: block.residency for block in mirror.blocks()}
        wrong = sum(listed.get(key) != told.get(key) for key in listed.keys() | told.keys())
        if not wrong or time.monotonic() > give_up:
            return wrong
        await asyncio.sleep(_PAUSE_S)
