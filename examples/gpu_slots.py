"""Computes KV straight into the device tier's slots, and reads it there: ``python examples/gpu_slots.py [ADDRESS]``.

Needs a ``kvtierd`` with ``device = "cuda"``, and torch with a GPU.
"""

import asyncio
import sys

import torch

import kvtier
from kvtier import Tier

SPEC = kvtier.CacheSpec.single("toy-7b", "float16", tokens_per_block=16, layers=4, kv_heads=8, head_size=64)


async def main(address: str | None = None) -> None:
    async with kvtier.connect(address) as client:
        cache = await client.open_cache("gpu-slots", SPEC)
        keys = kvtier.chain_keys(range(64), SPEC.tokens_per_block)  # 64 tokens are four blocks

        compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        async with cache.reserve(4, Tier.DEVICE) as lease:
            with torch.cuda.stream(compute):  # the kernels may still be queued when commit is called
                for index in range(4):
                    (slot,) = lease.tensors(index)
                    slot.fill_(index)
            await lease.commit(keys, stream=compute)  # sent when the kernels have ended

        async with cache.acquire(keys, Tier.DEVICE) as lease:  # READY: any stream may read at once
            means = [lease.tensors(index)[0].float().mean() for index in range(lease.blocks)]
        # The end of the ``async with`` block waited for the means, which were computed on torch's current stream.
        print([float(mean) for mean in means])


if __name__ == "__main__":
    if torch.cuda.is_available():
        asyncio.run(main(*sys.argv[1:]))
    else:
        print("torch sees no GPU here: nothing to show")
