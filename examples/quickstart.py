"""The whole client on one page: keys, put, match, get, leases, events.

``python examples/quickstart.py [ADDRESS]`` uses the ``kvtierd`` at ADDRESS, or starts a private daemon.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import kvtier
from kvtier.replay.private import PrivateDaemon

SPEC = kvtier.CacheSpec.single("toy-7b", "float16", tokens_per_block=16, layers=4, kv_heads=8, head_size=64)
SHAPE = (4, 2, 8, 16, 64)  # layers, keys and values, heads, tokens, head size: SPEC.block_bytes(0) bytes of float16
BUDGETS = {kvtier.Tier.DEVICE: 16 << 20, kvtier.Tier.HOST: 32 << 20}  # bytes of the cache in each tier


async def tour(address: str) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 32_000, 100)
    async with kvtier.connect(address) as client:
        cache = await client.open_cache("quickstart", SPEC, budgets=BUDGETS)
        watch = client.watch(oldest=True, caches=["quickstart"])

        # 100 tokens are six full blocks. Each key stands for its block's tokens and all tokens before.
        keys = kvtier.chain_keys(prompt, SPEC.tokens_per_block)
        blocks = rng.standard_normal((6, *SHAPE)).astype(np.float16)
        print("put:", [str(result) for result in await cache.put(keys, blocks)])

        # A longer prompt with the same beginning finds all six blocks.
        longer = kvtier.chain_keys([*prompt, *range(50)], SPEC.tokens_per_block)
        match = await cache.match(longer)
        print(f"match: {match.blocks} of {len(longer) // 32} blocks are stored")

        # get copies the blocks; a lease gives the bytes in place, and they stay as long as the lease is held.
        copies = await cache.get(longer)
        print("get:", all(np.array_equal(c.view(np.float16), b.ravel()) for c, b in zip(copies, blocks, strict=True)))
        async with cache.acquire(longer) as lease:
            (first,) = lease.view(0)
            print("in place:", np.array_equal(first.view(np.float16).reshape(SHAPE), blocks[0]))

        # An engine computes its misses straight into reserved slots, then commits them.
        async with cache.reserve(1) as lease:
            (slot,) = lease.view(0)
            slot.view(np.float16)[:] = 1.0
            print("commit:", await lease.commit(longer[6 * 32 : 7 * 32], parent=longer[5 * 32 : 6 * 32]))

        await cache.drop(keys[:32])
        async with watch:
            async for item in watch:
                if isinstance(item, kvtier.Event):
                    print(f"event {item.event_id}: {item.type} {len(item.keys)} blocks, because of {item.cause}")
                    if item.cause is kvtier.Cause.EXPLICIT and item.type is kvtier.EventType.REMOVED:
                        break


async def main() -> None:
    if len(sys.argv) > 1:
        await tour(sys.argv[1])
        return
    async with PrivateDaemon({kvtier.Tier.DEVICE: 64 << 20, kvtier.Tier.HOST: 64 << 20}) as daemon:
        await tour(daemon.address)


if __name__ == "__main__":
    asyncio.run(main())
