"""Engines in processes of their own, to race with others, or to be killed in the middle of a kernel.

A part takes one JSON object from standard input, prints one when it is where it was asked to be, and stays until its
standard input ends.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from kvtier import Tier, connect
from kvtier.abi.cuda.driver import Driver
from tests import devices
from tests.gpu.kernels import Kernels, kernels
from tests.gpu.racing import SPEC, Race, wrong_words
from tests.integration.torture_blocks import chain


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def _kernels() -> Kernels:
    return kernels(Driver.open(devices.NAME), 0)


async def race(address: str, seed: int, engines: int, turns: int) -> None:
    """Takes part, and tells what it did."""
    at = _kernels()
    _say(begins=True)
    _say(**await Race(address, at, seed).run(engines, turns))


async def check(address: str, chains: list[int]) -> None:
    """Acquires chains on the device and has kernels compare them; how many blocks there were, how many words wrong."""
    blocks = words = 0
    at = _kernels()
    stream = at.stream()
    async with await connect(address) as client:
        cache = await client.open_cache("race", SPEC)
        for number in chains:
            lease = await cache.acquire(chain(number), Tier.DEVICE)
            checks = [at.check(lease.view(index), key, stream) for index, key in enumerate(lease.keys)]
            await lease.release(stream=stream)
            blocks += len(checks)
            words += sum(wrong() for wrong in checks)
    _say(blocks=blocks, wrong=words)


async def fetch(address: str, chains: list[int]) -> None:
    """Gets chains into arrays; how many blocks, how many words wrong, and why the device is not mapped if it is not."""
    blocks = words = 0
    async with await connect(address) as client:
        cache = await client.open_cache("race", SPEC)
        for number in chains:
            keys = chain(number)
            found = await cache.get(keys, tier=Tier.DEVICE)
            blocks += len(found)
            words += sum(wrong_words(key, block) for key, block in zip(keys, found, strict=False))
        _say(blocks=blocks, wrong=words, unmapped=cache.arena.unmapped.get(Tier.DEVICE, ""))


async def scribble(address: str, slots: int, seconds: float) -> None:
    """Reserves slots and spoils them again and again; tells which as soon as the kernels are launched."""
    at = _kernels()
    stream = at.stream()
    client = await connect(address)
    cache = await client.open_cache("race", SPEC)
    lease = await cache.reserve(slots, Tier.DEVICE)
    for index in range(slots):
        at.scribble_for(seconds / slots, lease.view(index), stream)
    _say(slots=lease.slots)
    await asyncio.to_thread(sys.stdin.read)


_PARTS: Final[Mapping[str, Callable[..., Awaitable[None]]]] = {
    part.__name__: part for part in (race, check, fetch, scribble)
}


async def _play() -> None:
    await _PARTS[sys.argv[1]](**json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    asyncio.run(_play())
