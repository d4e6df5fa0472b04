"""A request trace through the core alone. As a command it compares the policies of eviction:

``python -m tests.unit.core.replay TRACE --slots 500,2000,7500 [--requests N]``
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvtier.abi.words import TIERS
from kvtier.replay.trace import Request, key_of, read
from kvtierd.core.eviction import EVICTORS
from kvtierd.core.ids import Key, Tier
from kvtierd.core.policy import Policy
from kvtierd.simulate.host import Host


class Replay:
    """Requests one after the other against one host, as ``kvtier replay`` sends them."""

    def __init__(self, slots: dict[Tier, int], eviction: str = "lru") -> None:
        self._host = Host(slots, Policy(eviction=eviction))
        self.core = self._host.core
        self.hits = 0

    def request(self, blocks: Sequence[int]) -> None:
        self.hits += self._host.request([Key(key_of(block)) for block in blocks]).found


def replay(requests: Sequence[Request], slots: Sequence[int], eviction: str) -> Replay:
    """``slots``: of device, host and disk, or the first of them. Requests longer than the device are left out."""
    made = Replay(dict(zip(TIERS, slots, strict=False)), eviction)
    for request in requests:
        if len(request.ids) <= slots[0]:
            made.request(request.ids)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit ratios of the core's eviction policies on a request trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--slots", default="500,2000,7500", help="of device, host and disk, or the first of them")
    parser.add_argument("--requests", type=int, help="only the first so many requests")
    arguments = parser.parse_args()
    requests = asyncio.run(read(arguments.trace, arguments.requests))
    slots = [int(count) for count in arguments.slots.split(",")]
    references = sum(len(request.ids) for request in requests if len(request.ids) <= slots[0])
    for eviction in EVICTORS:
        made = replay(requests, slots, eviction)
        by_tier = ", ".join(f"{tier.name.lower()} {hits}" for tier, hits in made.core.stats().hits.items())
        print(f"{eviction:4} {made.hits / references:.4f}  {by_tier}", flush=True)


if __name__ == "__main__":
    main()
