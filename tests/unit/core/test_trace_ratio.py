"""The core on real traffic: what three tiers hit, and what each policy of eviction does."""

import asyncio
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from kvtier.replay.trace import Request, arrivals, key_of, read
from kvtierd.core.check import check
from kvtierd.core.ids import TIERS, Key
from kvtierd.core.policy import Policy
from kvtierd.simulate.host import Host

EXTRACT: Final = Path(__file__).parents[3] / "examples/traces/conversation-extract.jsonl"
THREE_TIERS: Final = (200, 800, 6_000)

LEARNED: Final = {(2_000,): 1.15, (6_000,): 1.0, (200, 1_800): 1.1, THREE_TIERS: 1.0}
"""Slots of device, host and disk: the least share of LRU's hits that the learned policy has."""

ALWAYS: Final = ((2_000,), (6_000,), THREE_TIERS)
"""Where it finds much more, hardly less, and with all tiers; the rest takes as long again."""


@cache
def requests() -> list[Request]:
    return asyncio.run(read(EXTRACT))


class Replay:
    """Requests one after the other against one host; those longer than its fastest tier are left out."""

    def __init__(self, slots: tuple[int, ...], eviction: str) -> None:
        host = Host(dict(zip(TIERS, slots, strict=False)), Policy(eviction=eviction))
        self.hits = 0
        for request, seconds in zip(requests(), asyncio.run(arrivals(EXTRACT)), strict=True):
            if len(request) <= slots[0]:
                host.now = int(1e9 * seconds)
                self.hits += host.request([Key(key_of(block)) for block in request]).found
        self.core = host.core


@cache
def replayed(slots: tuple[int, ...], eviction: str) -> Replay:
    return Replay(slots, eviction)


@pytest.mark.parametrize(
    "slots", [pytest.param(slots, marks=() if slots in ALWAYS else pytest.mark.long) for slots in LEARNED]
)
def test_the_learned_policy_finds_more_than_lru(slots: tuple[int, ...]) -> None:
    replays = {eviction: replayed(slots, eviction) for eviction in ("lru", "learned")}
    for each in replays.values():
        check(each.core)
    assert replays["learned"].hits >= LEARNED[slots] * replays["lru"].hits


def prefix_lru_hits(sent: list[Request], blocks: int) -> int:
    """Prefix hits, before insertion, in one LRU of so many blocks. Tails are touched first: prefixes outlive them."""
    recency: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in sent:
        hits += next((n for n, block in enumerate(request) if block not in recency), len(request))
        for block in reversed(request):
            recency[block] = None
            recency.move_to_end(block)
        while len(recency) > blocks:
            recency.popitem(last=False)
    return hits


def test_three_tiers_hit_more_than_an_lru_of_the_disks_size() -> None:
    """And nearly as much as one of all three together, though blocks stand in two tiers at once."""
    sent = [request for request in requests() if len(request) <= THREE_TIERS[0]]
    three = replayed(THREE_TIERS, "lru")
    assert three.hits > prefix_lru_hits(sent, THREE_TIERS[-1])
    assert three.hits > 0.95 * prefix_lru_hits(sent, sum(THREE_TIERS))
    assert all(hits > 0 for hits in three.core.stats().hits.values())
