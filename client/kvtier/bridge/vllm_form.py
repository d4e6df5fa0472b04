"""The events that vLLM publishes, as values, and as what msgpack makes of them.

A batch is an array: seconds since the Unix epoch, events, data-parallel rank. Of an event there are two forms, and
readers of today know both or one of them:

- ``map``, of vLLM since June 2026 (its #42892): names of fields, the kind of event under ``type``; optional fields that
  have no value are not there;
- ``array``, of vLLM before: the kind of event, then all fields in the order in which they are declared here.

``cache_salt`` is no field of vLLM's, whose readers skip what they do not know; SGLang sends it and Dynamo reads it. In
an array there is no place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

BlockHash: TypeAlias = int | bytes
"""64 bits, unsigned; or bytes as long as they are."""

FULL_ATTENTION: Final = "full_attention"
SLIDING_WINDOW: Final = "sliding_window"


class Encoding(StrEnum):
    """How an event is laid out."""

    MAP = "map"
    ARRAY = "array"


@dataclass(slots=True, frozen=True)
class BlockStored:
    """Blocks of a chain, each the parent of the next, that a medium has from now on.

    ``parent_block_hash``: of the first one's parent; None = it is a root. ``token_ids``: of all blocks, one after
    another, or none at all. ``extra_keys``: one a block, where token ids are; None for a block without.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: Sequence[Sequence[str] | None] | None
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None
    cache_salt: str | None = None


@dataclass(slots=True, frozen=True)
class BlockRemoved:
    """Blocks that a medium no longer has."""

    block_hashes: Sequence[BlockHash]
    medium: str
    group_idx: int


@dataclass(slots=True, frozen=True)
class AllBlocksCleared:
    """Nothing is left, of any group, in any medium."""


VllmEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

CLEARED: Final = AllBlocksCleared()


def batch_of(events: Sequence[VllmEvent], encoding: Encoding, seconds: float, rank: int) -> list[Any]:
    """A batch as msgpack takes it."""
    lay_out = _map if encoding is Encoding.MAP else _array
    # AIBrix reads a third element only as a number and Dynamo wants three: the rank is always there.
    return [seconds, [lay_out(event) for event in events], rank]


def _map(event: VllmEvent) -> dict[str, Any]:
    match event:
        case BlockStored():
            fields: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": event.lora_id,
                "medium": event.medium,
                "lora_name": event.lora_name,
            }
            optional = {
                "extra_keys": event.extra_keys,
                "group_idx": event.group_idx,
                "kv_cache_spec_kind": event.kv_cache_spec_kind,
                "kv_cache_spec_sliding_window": event.kv_cache_spec_sliding_window,
                "cache_salt": event.cache_salt,
            }
            return fields | {name: value for name, value in optional.items() if value is not None}
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": event.block_hashes,
                "medium": event.medium,
                "group_idx": event.group_idx,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _array(event: VllmEvent) -> list[Any]:
    match event:
        case BlockStored():
            return [
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
                event.extra_keys,
                event.group_idx,
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
            ]
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]
