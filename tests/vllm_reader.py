"""A router that reads vLLM's events: msgspec structs of the form that vLLM publishes, and what it makes of batches.

Written from the published form (``vllm/distributed/kv_events.py`` of 2025 and 2026), not from ours.
"""

from collections import defaultdict
from typing import Any

import msgspec


class Stored(msgspec.Struct, omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class BlockStored(Stored, tag=True):
    """Since June 2026, and in 0.33, events go by name."""


class BlockRemoved(Removed, tag=True):
    pass


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayStored(Stored, array_like=True, tag="BlockStored"):
    """Before, they went by place."""


class ArrayRemoved(Removed, array_like=True, tag="BlockRemoved"):
    pass


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


class FirstStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """Of vLLM 0.9, when there was no more to it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


MAPS = msgspec.msgpack.Decoder(MapBatch)
ARRAYS = msgspec.msgpack.Decoder(ArrayBatch)

Hash = int | bytes


class Router:
    """Which media have a block, by window group and hash: as the batches say, one after another.

    ``heeds_cleared`` False: like readers that skip ``AllBlocksCleared``. It asserts that blocks come after their
    parents, and that a block that is there after a batch was never nowhere during it, if it had been there before.
    """

    def __init__(self, *, heeds_cleared: bool = True) -> None:
        self.media: dict[tuple[int | None, Hash], set[str]] = defaultdict(set)
        self.tokens: dict[tuple[int | None, Hash], list[int]] = {}
        self._heeds_cleared = heeds_cleared

    @property
    def listing(self) -> dict[tuple[int | None, Hash], set[str]]:
        return {where: media for where, media in self.media.items() if media}

    def apply(self, payload: bytes) -> None:
        batch = MAPS.decode(payload)
        before, lost = set(self.listing), set()
        cleared = False
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert event.medium is not None
                    for each in event.block_hashes:
                        self.media[event.group_idx, each].remove(event.medium)
                        if not self.media[event.group_idx, each]:
                            lost.add((event.group_idx, each))
                case AllBlocksCleared():
                    cleared = True
                    if self._heeds_cleared:
                        self.media.clear()
        assert cleared or not (lost & before & set(self.listing)), "it moved, and was nowhere in between"

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert parent is None or self.media[event.group_idx, parent], "a child before its parent"
        assert event.medium is not None
        assert len(event.token_ids) in (0, len(event.block_hashes) * event.block_size)
        for place, each in enumerate(event.block_hashes):
            self.media[event.group_idx, each].add(event.medium)
            if event.token_ids:
                step = event.block_size
                self.tokens[event.group_idx, each] = event.token_ids[place * step : (place + 1) * step]
