"""Compares a prefix-aware router over three daemons with round-robin: ``python examples/router.py [TRACE [REQUESTS]]``.

Each request of a trace goes to one daemon, as if an engine ran on each host: stored blocks are hits, the other blocks
are computed and stored. Mirrors show the router, without a call, which daemon has the longest prefix of a request. The
router passes over a daemon that has had many more of the latest requests than another.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path

import numpy as np

import kvtier
from kvtier.replay.private import PrivateDaemon
from kvtier.replay.trace import key_of, read, replay_spec

TRACE = Path(__file__).parent / "traces/conversation-extract.jsonl"
REQUESTS = 500
SPEC = replay_spec(block_bytes=4096)
HOST_BLOCKS = 1_500  # on each daemon, for each router
NAMES = ("node-1", "node-2", "node-3")
RECENT = 16 * len(NAMES)
SLACK = 8  # recent requests that a daemon may have more than the least loaded daemon

Router = Callable[[Sequence[bytes]], str]


def round_robin() -> Router:
    turns = cycle(NAMES)
    return lambda keys: next(turns)


def prefix_aware(mirrors: kvtier.Mirrors, names: Mapping[str, str]) -> Router:
    """Makes the router. ``names``: maps a daemon's address to its name."""
    recent: deque[str] = deque(maxlen=RECENT)

    def route(keys: Sequence[bytes]) -> str:
        load = Counter(recent)
        bound = min(load[name] for name in NAMES) + SLACK
        known = {names[each.name]: each.blocks for each in mirrors.rank(keys)}
        blocks = {name: count for name, count in known.items() if load[name] <= bound}
        chosen = max(blocks, key=lambda name: (blocks[name], -load[name]))
        recent.append(chosen)
        return chosen

    return route


async def serve(caches: Mapping[str, kvtier.Cache], route: Router, chains: Sequence[Sequence[bytes]]) -> str:
    """Sends each request to a daemon. Returns a line with the hits."""
    computed = np.zeros((max(map(len, chains)), SPEC.block_bytes(0)), np.uint8)  # stands for an engine's computation
    hits, requests = 0, Counter[str]()
    for keys in chains:
        name = route(keys)
        found = len(await caches[name].get(keys))
        if misses := keys[found:]:
            await caches[name].put(misses, computed[: len(misses)], parent=keys[found - 1] if found else None)
        hits += found
        requests[name] += 1
    asked = sum(map(len, chains))
    spread = ", ".join(f"{requests[name]} to {name}" for name in NAMES)
    return f"hit ratio {hits / asked:.3f}, {hits} of {asked} blocks; {spread}"


async def main(trace: Path = TRACE, limit: int = REQUESTS) -> None:
    chains = [[key_of(block) for block in request] for request in await read(trace, limit)]
    budgets = {kvtier.Tier.HOST: HOST_BLOCKS * SPEC.record_bytes(0)}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        private = [PrivateDaemon({tier: 2 * size for tier, size in budgets.items()}) for _ in NAMES]
        daemons = await asyncio.gather(*map(enter, private))
        clients = [await enter(await kvtier.connect(daemon.address)) for daemon in daemons]

        async def open_on_all(cache: str) -> dict[str, kvtier.Cache]:
            opened = [await client.open_cache(cache, SPEC, budgets=budgets) for client in clients]
            return dict(zip(NAMES, opened, strict=True))

        caches = await open_on_all("round-robin")
        print("round-robin: ", await serve(caches, round_robin(), chains))
        caches = await open_on_all("prefix-aware")
        mirrors = await enter(kvtier.Mirrors(clients, ["prefix-aware"]))
        await mirrors.synced()
        router = prefix_aware(mirrors, {client.address: name for client, name in zip(clients, NAMES, strict=True)})
        print("prefix-aware:", await serve(caches, router, chains))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else TRACE, int(sys.argv[2]) if sys.argv[2:] else REQUESTS))
