"""Blocks of the integration tests: a small specification, chains of keys, and bytes that follow from a key."""

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import AsyncClient, Cache, CacheSpec, PoolSpec, Tier, WindowGroupSpec, connect

SPEC = CacheSpec(
    model="integration",
    dtype="uint8",
    tokens_per_block=16,
    groups=(WindowGroupSpec(pools=(PoolSpec(1, 1, 72), PoolSpec(2, 1, 72))),),
)
"""Two pools whose parts are not whole pages, so that padding and the order of parts are never right by accident."""

SLOT_BYTES = SPEC.record_bytes(0)
BLOCK_BYTES = SPEC.block_bytes(0)

Blocks = list[NDArray[np.uint8]]


def sizes(*, device: int = 0, host: int = 0, disk: int = 0) -> dict[Tier, int]:
    """Returns bytes by tier for this many slots of :data:`SPEC`; tiers without slots are left out."""
    slots = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
    return {tier: count * SLOT_BYTES for tier, count in slots.items() if count}


def chain(name: str, length: int) -> list[bytes]:
    """Returns the keys of a chain; the keys of a shorter chain are a prefix of them."""
    return [hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(length)]


def block(key: bytes) -> NDArray[np.uint8]:
    """Returns the bytes that belong to a key, different for each key."""
    return np.frombuffer(hashlib.shake_256(key).digest(BLOCK_BYTES), dtype=np.uint8)


def blocks(keys: Iterable[bytes]) -> Blocks:
    return [block(key) for key in keys]


async def put_chain(cache: Cache, name: str, length: int, **how: Any) -> list[bytes]:
    """Puts a chain of this name. Returns its keys."""
    keys = chain(name, length)
    await cache.put(keys, blocks(keys), **how)
    return keys


@asynccontextmanager
async def opened_cache(
    address: str, name: str, *, spec: CacheSpec = SPEC, wait: float = 0.0, **how: Any
) -> AsyncIterator[tuple[AsyncClient, Cache]]:
    """A client of its own and a cache. ``how``: of ``open_cache``."""
    async with await connect(address, wait=wait) as client:
        yield client, await client.open_cache(name, spec, **how)


def assert_bytes(keys: Sequence[bytes], found: Sequence[NDArray[np.uint8]]) -> None:
    """Asserts that ``found`` are the blocks of these keys, to the byte."""
    assert len(found) == len(keys)
    wrong = [index for index, key in enumerate(keys) if not np.array_equal(found[index], block(key))]
    assert not wrong, f"wrong bytes in blocks {wrong} of {len(keys)}"
