"""The core on real traffic: what three tiers hit, and what each policy of eviction does."""

from __future__ import annotations

from typing import Final

import pytest

from kvtier.replay.trace import read
from kvtierd.core.check import check
from kvtierd.core.evict import EVICTORS
from tests.unit.client.test_oracle import EXTRACT, prefix_lru_hits
from tests.unit.core.replay import replay

SLOTS: Final = (200, 800, 5_000)

TWO_QUEUES: Final = {
    (1_000,): 1.1,
    (2_000,): 1.2,
    (6_000,): 0.99,
    (200, 1_800): 1.2,
    (200, 800, 6_000): 0.99,
}
"""Slots of device, host and disk: what 2Q finds at least, as a multiple of what LRU does."""


@pytest.mark.parametrize("slots", TWO_QUEUES)
async def test_two_queues_find_more_than_lru_or_hardly_less(slots: tuple[int, ...]) -> None:
    requests = await read(EXTRACT)
    replays = {eviction: replay(requests, slots, eviction) for eviction in EVICTORS}
    for each in replays.values():
        check(each.core)
    assert replays["2q"].hits >= TWO_QUEUES[slots] * replays["lru"].hits


async def test_three_tiers_hit_more_than_an_lru_of_the_disks_size() -> None:
    """And nearly as much as one of all three together, though blocks stand in two tiers at once."""
    requests = [request for request in await read(EXTRACT) if len(request.ids) <= SLOTS[0]]
    replayed = replay(requests, SLOTS, "lru")
    check(replayed.core)
    assert replayed.hits > prefix_lru_hits(requests, SLOTS[-1])
    assert replayed.hits > 0.95 * prefix_lru_hits(requests, sum(SLOTS))
    assert all(hits > 0 for hits in replayed.core.stats().hits.values())
