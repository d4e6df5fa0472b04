"""What the bytes of blocks in memory add up to, for a client that has copied them without holding them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import xxhash

from kvtier.abi.stream import CHECKSUM_BYTES
from kvtierd.core.ids import DEVICE, CacheId, GroupId, Key, SlotId, Tier
from kvtierd.core.transfers import Location
from kvtierd.mover.engine import Engine
from kvtierd.mover.runtime import CacheRuntime, GpuCopies, Stretch
from kvtierd.tiers.base import Bytes, TierError

UNKNOWN: Final = bytes(CHECKSUM_BYTES)

_Place = tuple[Tier, SlotId]


async def of_blocks(engine: Engine, cache: CacheId, group: GroupId, keys: Sequence[Key]) -> list[bytes]:
    """One a block, in a thread; :data:`UNKNOWN` for what is not in memory, or has left its slot by the end.

    Nothing is held meanwhile: as with every read of a slot that nobody holds, its generation tells. Raises
    :class:`UnknownCache`, also where the cache goes meanwhile, and :class:`TierIOError`.
    """
    runtime = engine.runtime(cache)
    places = [_in_memory(block) for block in engine.locate(cache, group, keys)]
    known = [place for place in places if place is not None]
    before = [runtime.arena.generation(tier, group, slot) for tier, slot in known]
    sources = [_source(runtime, group, place) for place in known]
    try:
        digests = await engine.beside(lambda: [_digest(source()) for source in sources])
    except TierError:
        engine.runtime(cache)  # a cache that is gone is the better answer
        raise
    engine.runtime(cache)  # without its cache an arena has no generations to look at
    told = iter(
        digest if runtime.arena.generation(tier, group, slot) == generation else UNKNOWN
        for (tier, slot), generation, digest in zip(known, before, digests, strict=True)
    )
    return [UNKNOWN if place is None else next(told) for place in places]


def _source(runtime: CacheRuntime, group: GroupId, place: _Place) -> Callable[[], Sequence[Bytes]]:
    """What gives the bytes of a slot to a thread, and keeps them there where the cache goes meanwhile."""
    tier, slot = place
    if tier is DEVICE and runtime.cuda is not None:
        return partial(_fetch, runtime.cuda, group, Stretch(slot, 0, runtime.spec.block_bytes(group)))
    parts = runtime.memory(tier).parts(group, slot)
    return lambda: parts


def _fetch(copies: GpuCopies, group: GroupId, stretch: Stretch) -> Sequence[Bytes]:
    return [copies.fetch(group, [stretch])]


def _in_memory(block: Location) -> _Place | None:
    slots = zip((Tier.DEVICE, Tier.HOST), block.slots, strict=False)
    return next(((tier, slot) for tier, slot in slots if slot is not None), None)


def _digest(parts: Sequence[Bytes]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.data)
    return digest.digest()
