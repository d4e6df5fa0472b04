"""The client without an event loop, for scripts, notebooks and engines with threads.

Start ``kvtierd`` first, then run ``python examples/quickstart_sync.py [ADDRESS]``.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import kvtier

SPEC = kvtier.CacheSpec.single("toy-1b", "float16", tokens_per_block=16, layers=2, kv_heads=4, head_size=64)
SHAPE = (2, 2, 4, 16, 64)  # layers, keys and values, heads, tokens, head size: SPEC.block_bytes(0) bytes of float16


def tour(client: kvtier.Client) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 32_000, 64)
    cache = client.open_cache("quickstart-sync", SPEC, budgets={kvtier.Tier.HOST: 16 * SPEC.record_bytes(0)})

    # 64 tokens are four full blocks.
    keys = kvtier.chain_keys(prompt, SPEC.tokens_per_block)
    blocks = rng.standard_normal((4, *SHAPE)).astype(np.float16)
    print("put:", [str(result) for result in cache.put(keys, blocks)])
    print("match:", cache.match(keys).blocks, "blocks are stored")

    # get can copy straight into the caller's arrays.
    out = kvtier.empty(blocks.shape, blocks.dtype)  # like numpy.empty, but the first copy into it is as fast as later
    cache.get(keys, out)
    print("get:", np.array_equal(out, blocks))

    # A lease gives the bytes in place, and they stay as long as the lease is held.
    with cache.acquire(keys) as lease:
        (first,) = lease.view(0)
        print("in place:", np.array_equal(first.view(np.float16).reshape(SHAPE), blocks[0]))

    # Any thread may call the client; each thread copies its own arrays.
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda end: len(cache.get(keys[: end * 32])), range(1, 5))
        print("threads:", list(found))

    cache.drop(keys[:32])
    for item in client.watch(oldest=True, caches=[cache.name]):
        if isinstance(item, kvtier.Event):
            print(f"event {item.event_id}: {item.type} {len(item.keys)} blocks, because of {item.cause}")
            if item.type is kvtier.EventType.REMOVED:
                break


if __name__ == "__main__":
    with kvtier.Client(sys.argv[1] if len(sys.argv) > 1 else None) as client:
        tour(client)
