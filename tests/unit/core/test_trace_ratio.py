"""The core on real traffic: what three tiers hit, and what each policy of eviction does."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Final

import pytest

from kvtier.replay.trace import Request, read
from kvtierd.core.check import check
from kvtierd.core.eviction import EVICTORS
from tests.unit.client.test_oracle import EXTRACT, prefix_lru_hits
from tests.unit.core.replay import Replay, replay

THREE_TIERS: Final = (200, 800, 6_000)

TWO_QUEUES: Final = {
    (1_000,): 1.1,
    (2_000,): 1.2,
    (6_000,): 0.99,
    (200, 1_800): 1.2,
    THREE_TIERS: 0.99,
}
"""Slots of device, host and disk: what 2Q finds at least, as a multiple of what LRU does."""

ALWAYS: Final = ((1_000,), (6_000,), THREE_TIERS)
"""Where it finds much more, hardly less, and with all tiers; the rest takes as long again."""


@cache
def requests() -> list[Request]:
    return asyncio.run(read(EXTRACT))


@cache
def replayed(slots: tuple[int, ...], eviction: str) -> Replay:
    return replay(requests(), slots, eviction)


@pytest.mark.parametrize(
    "slots", [pytest.param(slots, marks=() if slots in ALWAYS else pytest.mark.long) for slots in TWO_QUEUES]
)
def test_two_queues_find_more_than_lru_or_hardly_less(slots: tuple[int, ...]) -> None:
    replays = {eviction: replayed(slots, eviction) for eviction in EVICTORS}
    for each in replays.values():
        check(each.core)
    assert replays["2q"].hits >= TWO_QUEUES[slots] * replays["lru"].hits


def test_three_tiers_hit_more_than_an_lru_of_the_disks_size() -> None:
    """And nearly as much as one of all three together, though blocks stand in two tiers at once."""
    sent = [request for request in requests() if len(request.ids) <= THREE_TIERS[0]]
    three = replayed(THREE_TIERS, "lru")
    assert three.hits > prefix_lru_hits(sent, THREE_TIERS[-1])
    assert three.hits > 0.95 * prefix_lru_hits(sent, sum(THREE_TIERS))
    assert all(hits > 0 for hits in three.core.stats().hits.values())
