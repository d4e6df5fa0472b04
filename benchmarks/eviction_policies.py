"""Hit ratios of eviction policies on a request trace, in one tier that is prefix-closed as kvtier's are.

``python benchmarks/eviction_policies.py TRACE [--blocks 1000,3000] [--requests N] [--json]``

Every policy drops leaves only, touches a request's blocks tail first, and never drops what the request itself uses.

- ``lru``: the least recently used first.
- ``slru``: blocks found again are protected, up to a share of the tier.
- ``2q``: blocks that come back after they were dropped are protected (Johnson and Shasha, VLDB 1994): a ring of the
  keys dropped last remembers them.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.replay.trace import Request, read


@dataclass(slots=True, frozen=True)
class Rule:
    """``protected``: most blocks that are, as a share of the tier. ``remembered``: keys of dropped blocks, likewise.
    ``on_hit``: a hit protects; else only a return does."""

    protected: float = 0.0
    remembered: float = 0.0
    on_hit: bool = False


RULES: Final[Mapping[str, Rule]] = {
    "lru": Rule(),
    "slru, half protected": Rule(0.5, 0.0, on_hit=True),
    "slru, nine tenths protected": Rule(0.9, 0.0, on_hit=True),
    "2q, half protected, one tier remembered": Rule(0.5, 1.0),
    "2q, nine tenths protected, one tier remembered": Rule(0.9, 1.0),
    "2q, all but a twentieth protected, four tiers remembered": Rule(0.95, 4.0),
}


@dataclass(slots=True, eq=False)
class Entry:
    parent: int | None
    children: int = 0
    hot: bool = False
    used: int = 0


class Tier:
    """``blocks`` slots under a rule."""

    def __init__(self, blocks: int, rule: Rule) -> None:
        self._blocks = blocks
        self._rule = rule
        self._entries: dict[int, Entry] = {}
        self._order: list[tuple[bool, int, int]] = []
        self._hot_order: list[tuple[int, int]] = []
        self._hot = 0
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._clock = 0

    def request(self, ids: Sequence[int]) -> int:
        """Returns how long a prefix was there."""
        ids = ids[: self._blocks]
        found = next((n for n, block in enumerate(ids) if block not in self._entries), len(ids))
        self._make_room(len(ids) - found, set(ids))
        for place in range(found, len(ids)):
            self._enter(ids[place], ids[place - 1] if place else None)
        for place in range(len(ids) - 1, -1, -1):
            self._use(ids[place], hit=place < found)
        self._cool()
        return found

    def _make_room(self, wanted: int, kept: set[int]) -> None:
        while len(self._entries) + wanted > self._blocks:
            hot, used, block = heapq.heappop(self._order)
            entry = self._entries.get(block)
            if (
                entry is not None
                and (entry.hot, entry.used) == (hot, used)
                and not entry.children
                and block not in kept
            ):
                self._drop(block, entry)

    def _drop(self, block: int, entry: Entry) -> None:
        del self._entries[block]
        self._hot -= entry.hot
        self._dropped[block] = None
        if len(self._dropped) > self._rule.remembered * self._blocks:
            self._dropped.popitem(last=False)
        if entry.parent is not None:
            parent = self._entries[entry.parent]
            parent.children -= 1
            heapq.heappush(self._order, (parent.hot, parent.used, entry.parent))

    def _enter(self, block: int, parent: int | None) -> None:
        entry = self._entries[block] = Entry(parent)
        if parent is not None:
            self._entries[parent].children += 1
        if block in self._dropped:
            del self._dropped[block]
            self._heat(entry)

    def _use(self, block: int, *, hit: bool) -> None:
        entry = self._entries[block]
        self._clock += 1
        entry.used = self._clock
        if hit and self._rule.on_hit:
            self._heat(entry)
        heapq.heappush(self._order, (entry.hot, entry.used, block))
        if entry.hot:
            heapq.heappush(self._hot_order, (entry.used, block))

    def _heat(self, entry: Entry) -> None:
        self._hot += not entry.hot
        entry.hot = True

    def _cool(self) -> None:
        """The least recently used protected ones are protected no more."""
        while self._hot > self._rule.protected * self._blocks:
            used, block = heapq.heappop(self._hot_order)
            entry = self._entries.get(block)
            if entry is not None and entry.hot and entry.used == used:
                entry.hot = False
                self._hot -= 1
                heapq.heappush(self._order, (False, used, block))


def ratio(requests: Sequence[Request], blocks: int, rule: Rule) -> float:
    """Blocks found of blocks asked for."""
    tier = Tier(blocks, rule)
    return sum(tier.request(each.ids) for each in requests) / sum(len(each.ids) for each in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit ratios of eviction policies on a request trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", default="1000,3000,10000,30000", help="sizes of the tier, in blocks")
    parser.add_argument("--requests", type=int, help="only the first so many requests")
    parser.add_argument("--json", action="store_true", help="one list of {name, params, value, unit, floor, ratio}")
    arguments = parser.parse_args()
    requests = asyncio.run(read(arguments.trace, arguments.requests))
    rows = []
    for blocks in map(int, arguments.blocks.split(",")):
        lru = ratio(requests, blocks, RULES["lru"])
        for name, rule in RULES.items():
            value = ratio(requests, blocks, rule)
            params = {"policy": name, "blocks": blocks, "requests": len(requests)}
            rows.append(
                {
                    "name": "eviction hit ratio",
                    "params": params,
                    "value": round(value, 5),
                    "unit": "1",
                    "floor": round(lru, 5),
                    "ratio": round(value / lru, 4),
                }
            )
            if not arguments.json:
                print(f"{blocks:8} {name:58} {value:.4f} {value / lru - 1:+.1%}", flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
