"""A request trace through the core alone. As a command it compares the policies of eviction:

``python -m tests.unit.core.replay TRACE --slots 500,2000,7500 [--requests N]``
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.abi.words import TIERS
from kvtier.replay.trace import Request, key_of, read
from kvtierd.core.events import EventSequencer
from kvtierd.core.eviction import EVICTORS
from kvtierd.core.ids import CacheId, Key, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, Move, MoveResult, Outcome
from kvtierd.core.policy import GroupShape, Policy
from kvtierd.core.transfers import ChainRequest, CommitItem
from tests.unit.core.bench import ALICE, DEVICE, GROUP

_PRIORITY: Final = 35


class Replay:
    """One client, and a mover for which everything goes well: requests one after the other, as ``kvtier replay`` sends
    them."""

    def __init__(self, slots: dict[Tier, int], eviction: str = "lru") -> None:
        shape = GroupShape(GROUP, slots, dict.fromkeys(slots, 65536))
        self.core = BlockManager(CacheId(1), [shape], EventSequencer(), Policy(eviction=eviction))
        self.hits = 0
        self._moves: list[Move] = []
        self._grants: list[Grant] = []
        self.core.fill({}, {}, unclean=False, restarted=False)
        self._take(self.core.announce(0))

    def request(self, blocks: Sequence[int]) -> None:
        chain = [Key(key_of(block)) for block in blocks]
        self.hits += self.core.match(GROUP, chain).blocks
        _, outcome = self.core.acquire(ALICE, GROUP, DEVICE, [ChainRequest(chain)], 0)
        leases = list(self._answered(outcome))
        found = len(leases[0].slots) if leases else 0
        if found < len(chain):
            _, outcome = self.core.reserve(ALICE, GROUP, DEVICE, len(chain) - found, 0)
            leases += self._answered(outcome)
            parents = [None, *chain]
            items = [
                CommitItem(slot, chain[place], parents[place], _PRIORITY)
                for place, slot in enumerate(leases[-1].slots, start=found)
            ]
            assert leases[-1].lease is not None
            self._take(self.core.commit(ALICE, leases[-1].lease, items, 0)[1])
        self._take(self.core.release(ALICE, [grant.lease for grant in leases if grant.lease is not None], 0))

    def _answered(self, outcome: Outcome) -> Iterator[Grant]:
        """Lets moves end until the call is answered."""
        self._take(outcome)
        while not self._grants:
            self._land()
        grants, self._grants = self._grants, []
        return iter(grants)

    def _land(self) -> None:
        results = [MoveResult(move.id) for move in self._moves]
        self._moves.clear()
        self._take(self.core.completed(results, 0))

    def _take(self, outcome: Outcome) -> None:
        assert not outcome.refusals
        self._moves += outcome.moves
        self._grants += outcome.grants


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
