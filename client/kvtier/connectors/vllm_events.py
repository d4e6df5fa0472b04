"""Events of kvtier's cache in the form of vLLM's routers: by medium, under vLLM's hashes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.events import Event
from kvtier.types import EventType, Tier
from kvtier.wire import split_keys

_MEDIA: Final[Mapping[Tier, str]] = {Tier.HOST: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}


class KvEvents:
    """Remembers the tiers of each block: kvtier's events have the present tiers, vLLM's events the changes."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens = tokens_per_block
        self._where: defaultdict[int, dict[bytes, int]] = defaultdict(dict)

    def of(self, events: Iterable[Event]) -> Iterator[KVCacheEvent]:
        """Yields vLLM's events. A block is stored in its new medium before it is removed from the old medium."""
        for event in events:
            known, keys = self._where[event.group], split_keys(event.packed_keys)
            if event.type is EventType.CLEARED:
                keys = list(known)
            after = event.residency or bytes(len(keys))
            before = bytes(known.pop(key, 0) for key in keys)
            known.update((key, tiers) for key, tiers in zip(keys, after, strict=True) if tiers)
            for tier, medium in _MEDIA.items():
                if stored := _hashes(keys, after, before, tier):
                    yield BlockStored(stored, None, [], self._tokens, None, medium, None, group_idx=event.group)
            for tier, medium in _MEDIA.items():
                if removed := _hashes(keys, before, after, tier):
                    yield BlockRemoved(removed, medium, group_idx=event.group)


def _hashes(keys: Iterable[bytes], there: bytes, not_there: bytes, tier: Tier) -> list[bytes | int]:
    rows = zip(keys, there, not_there, strict=True)
    return [maybe_convert_block_hash(BlockHash(key)) for key, here, other in rows if here & ~other & tier.bit]
