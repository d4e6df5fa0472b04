"""A host under each eviction policy, and under the best possible policy."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

from kvtierd.core.ids import Key, Tier
from kvtierd.core.policy import Policy
from kvtierd.core.returns import LEARNED, LRU
from kvtierd.simulate.host import Host

BELADY: Final = "belady"
"""Knows the future: evicts the block with the latest next request (Belady, 1966). No policy finds more blocks."""
POLICIES: Final = (LRU, LEARNED, BELADY)
_NEVER: Final = 1 << 62


@dataclass(slots=True, frozen=True)
class Oracle:
    """Tells hints after requests. ``ends``: share of the requests after which it ends the blocks that no later request
    asks for. ``returns``: share after which it tells when the other blocks return, wrong by a factor of e^-1 to e."""

    ends: float = 0.0
    returns: float = 0.0

    def tell(
        self, host: Host, number: int, chain: Sequence[Key], following: Sequence[int], times: Sequence[float]
    ) -> None:
        """``following``: numbers of the blocks' next requests. ``times``: of all requests, in seconds."""
        if _spread(number) < self.ends:
            host.end([key for key, request in zip(chain, following, strict=True) if request == _NEVER][::-1])
        if _spread(number + 1) < self.returns:
            for request, key in dict(zip(following, chain, strict=True)).items():
                if request != _NEVER:
                    host.expect(key, (times[request] - host.now / 1e9) * exp(2 * _spread(number + request) - 1))


def _spread(number: int) -> float:
    """Spreads numbers evenly from 0 to 1, consecutive numbers far apart: fractions of multiples of the golden ratio."""
    return number * 0.6180339887498949 % 1


def blocks_found(
    policy: str,
    slots: Mapping[Tier, int],
    chains: Sequence[Sequence[bytes]],
    times: Sequence[float] = (),
    oracle: Oracle | None = None,
) -> int:
    """Sends every request, a chain of keys, to a host.

    Args:
        policy: one of :data:`POLICIES`.
        slots: by tier. A longer prompt is cut to the slots of the fastest tier.
        times: arrivals of the requests in seconds. Without them, all requests arrive at once.

    Returns:
        Blocks of prefixes that the host had.
    """
    longest = slots[min(slots)]
    cut = [[Key(key) for key in chain[:longest]] for chain in chains]
    if policy == BELADY:
        return _belady(sum(slots.values()), cut)
    host = Host(slots, Policy(eviction=policy))
    following = _next_requests(cut) if oracle is not None else []
    found = 0
    for number, chain in enumerate(cut):
        host.now = int(times[number] * 1e9) if times else 0
        found += host.request(chain).found
        if oracle is not None:
            oracle.tell(host, number, chain, following[number], times)
    return found


def _belady(slots: int, chains: Sequence[Sequence[Key]]) -> int:
    """Blocks found under :data:`BELADY`. Prefixes stay whole by themselves: the next request of a block is never after
    that of its child, and of blocks with the same next request the deepest is evicted first."""
    stored: dict[Key, int] = {}
    order: list[tuple[int, int, Key]] = []
    """A heap of (-next request, -depth, key), with stale entries."""
    found = 0
    for chain, following in zip(chains, _next_requests(chains), strict=True):
        here = next((depth for depth, key in enumerate(chain) if key not in stored), len(chain))
        found += here
        while len(stored) + len(chain) - here > slots:
            request, _, key = heapq.heappop(order)
            if stored.get(key) == -request:
                del stored[key]
        for depth, (key, request) in enumerate(zip(chain, following, strict=True)):
            stored[key] = request
            heapq.heappush(order, (-request, -depth, key))
    return found


def _next_requests(chains: Sequence[Sequence[Key]]) -> list[list[int]]:
    """The number of the next request for each block of each chain."""
    later: dict[Key, int] = {}
    following: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        following.append([later.get(key, _NEVER) for key in chains[number]])
        later.update(dict.fromkeys(chains[number], number))
    return following[::-1]
