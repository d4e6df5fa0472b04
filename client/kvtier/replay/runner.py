"""Replays a request trace like an engine, and checks every byte and every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtier.cache import Cache
from kvtier.client import AsyncClient
from kvtier.lease import ReadLease, WriteLease
from kvtier.mirror import Mirror
from kvtier.replay.trace import Payload, Request, key_of
from kvtier.types import BlockResult, Tier, fastest

_QUIET_S: Final = 10.0
"""Seconds that the comparison with the daemon's listing waits for a quiet cache."""
_PAUSE_S: Final = 0.1


@dataclass(slots=True)
class ReplayReport:
    """The outcome of a replay. ``event_gaps``: number of losses of events. ``hits``: prefix hits by the fastest tier of
    each block, counted when a request first acquires the block."""

    requests: int = 0
    block_refs: int = 0
    hits: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    stored: int = 0
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
        """Whether the replay found no wrong byte, no lost event, and no block in other tiers than by the events."""
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
    progress: Callable[[int], None] = lambda done: None,
) -> ReplayReport:
    """Replays the requests one after another, in the cache's fastest mapped tier.

    A longer prompt is cut to the capacity of the tier.

    Args:
        progress: called with the number of finished requests.
    """
    report, tier, payload = ReplayReport(), cache.lease_tier(), Payload(cache.block_bytes)
    async with Mirror(client, [cache.name]) as mirror:
        began = time.perf_counter()
        for request in requests:
            if keys := [key_of(block) for block in request[: cache.slots(tier)]]:
                await _serve(cache, tier, payload, keys, report)
            report.requests += 1
            progress(report.requests)
        report.seconds = time.perf_counter() - began
        report.residency_mismatches = await _mismatches(cache, mirror)
        report.event_gaps = mirror.resyncs
    return report


async def _serve(cache: Cache, tier: Tier, payload: Payload, keys: list[bytes], report: ReplayReport) -> None:
    """Acquires and verifies the stored blocks, and stores the rest."""
    async with cache.acquire(keys, tier) as hits:
        report.block_refs += len(keys)
        report.verify_failures += await wrong_blocks(hits, payload)
        for found in map(fastest, hits.found_in):
            if found is not None:
                report.hits[found] += 1
        if misses := keys[hits.blocks :]:
            async with cache.reserve(len(misses), tier) as lease:
                await asyncio.to_thread(_fill, lease, misses, payload)
                results = await lease.commit(misses, parent=keys[hits.blocks - 1] if hits.blocks else None)
                report.stored += results.count(BlockResult.OK)


def _fill(lease: WriteLease, keys: Sequence[bytes], payload: Payload) -> None:
    for index, key in enumerate(keys):
        payload.write(key, lease.view(index)[0])


async def wrong_blocks(lease: ReadLease, payload: Payload) -> int:
    """Number of blocks of the lease with wrong bytes for their keys. Compares all bytes in place."""

    def compare() -> int:
        return sum(not payload.matches(key, lease.view(index)[0]) for index, key in enumerate(lease.keys))

    return await asyncio.to_thread(compare)


async def _mismatches(cache: Cache, mirror: Mirror) -> int:
    """Number of blocks whose tiers differ between the daemon's listing and its events. A listing takes several calls,
    and a block may move meanwhile, so the comparison is repeated until both agree, or for ``_QUIET_S`` seconds."""
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
