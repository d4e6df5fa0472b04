"""kvtier's events as TensorRT-LLM's: the JSON that its routers read.

What differs, and how it is bridged:

- An ``updated`` of theirs is of one block, a ``stored`` of one chain; ours are cut up.
- They have no ``cleared``: it comes as ``removed`` of all that was known.
- ``event_id`` counts from 0 here. Events that were lost leave a hole as large as they were.
- ``updated`` has old values: they are remembered. Of a block that was never told of, null stands where nothing is
  known; begin with a snapshot to know all of them.
- A block may be in several tiers. ``cache_level`` is the fastest one (0 device, 1 host, 2 disk), and what changes only
  in slower ones is no event of theirs.
- Full attention has no window: ``window_size`` is then the largest there can be, 2147483647.
- Blocks are named by the cache's ``event_hash``; those without one are left out. A cache without that option has its
  own keys, in hex, under the name ``kvtier_key``.

Shapes: TensorRT-LLM's ``KVCacheEventSerializer`` of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.events import BlockTokens, Event, Gap, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import ROOT_PARENT, EventType, Tier, fastest
from kvtier.wire import split_keys

KEYS_ALONE: Final = "kvtier_key"
WHOLE_WINDOW: Final = 2**31 - 1
_NO_TOKENS: Final = BlockTokens(())
_NUMBER_BYTES: Final = 8

Hash = int | str
Json = dict[str, Any]


@dataclass(slots=True)
class _Known:
    """A block that was told of."""

    hash: Hash
    level: Tier | None
    priority: int


@dataclass(slots=True)
class _Group:
    """``algorithm`` and ``window``: as told last."""

    number: int
    blocks: dict[bytes, _Known] = field(default_factory=dict)
    algorithm: str = ""
    window: int = 0


@dataclass(slots=True, frozen=True)
class _Stored:
    """``hash``: None where it has none. ``parent_hash``: None for a root, and for a parent without."""

    key: bytes
    parent: bytes
    hash: Hash | None
    parent_hash: Hash | None
    level: Tier | None
    priority: int
    tokens: BlockTokens


class TrtllmEvents:
    """Of one cache, with nothing filtered away: what it is not shown, it does not know of."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._next = 0

    def of(self, item: WatchItem) -> Iterator[Json]:
        """An item in TensorRT-LLM's words: some events, in order, or nothing."""
        match item:
            case Event():
                yield from self._event(item)
            case SnapshotSlice():
                yield from self._stored(self._group(item), item)
            case SnapshotStart():
                for group in self._groups.values():
                    yield from self._forget(group)
            case Gap():
                self._next += item.last_id - item.first_id + 1
            case _:
                pass

    def _event(self, event: Event) -> Iterator[Json]:
        group = self._group(event)
        match event.type:
            case EventType.CREATED:
                yield from self._forget(group)
                levels = list(event.num_blocks_per_cache_level)
                yield self._envelope(group, {"type": "created", "num_blocks_per_cache_level": levels})
            case EventType.STORED:
                yield from self._stored(group, event)
            case EventType.UPDATED:
                yield from self._updated(group, event)
            case EventType.REMOVED:
                hashes = [
                    hash for hash in _hashes(event.event_hash, event.packed_hashes, event.keys) if hash is not None
                ]
                for key in event.keys:
                    group.blocks.pop(key, None)
                if hashes:
                    yield self._envelope(group, {"type": "removed", "block_hashes": hashes})
            case EventType.CLEARED:
                yield from self._forget(group)

    def _group(self, item: Event | SnapshotSlice) -> _Group:
        group = self._groups.setdefault(item.group, _Group(item.group))
        group.algorithm, group.window = item.event_hash, item.window_tokens
        return group

    def _forget(self, group: _Group) -> Iterator[Json]:
        blocks, group.blocks = group.blocks, {}
        if blocks:
            yield self._envelope(group, {"type": "removed", "block_hashes": [known.hash for known in blocks.values()]})

    def _stored(self, group: _Group, item: Event | SnapshotSlice) -> Iterator[Json]:
        """One event a chain. What is known already changes at most: slices and events of a snapshot overlap."""
        chain: list[_Stored] = []
        for block in _blocks(item):
            if block.hash is None:
                continue
            if block.key in group.blocks:
                yield from self._change(group, block.key, block.hash, block.level, block.priority)
                continue
            group.blocks[block.key] = _Known(block.hash, block.level, block.priority)
            if chain and block.parent != chain[-1].key:
                yield self._envelope(group, _chain_json(chain))
                chain = []
            chain.append(block)
        if chain:
            yield self._envelope(group, _chain_json(chain))

    def _updated(self, group: _Group, event: Event) -> Iterator[Json]:
        hashes = _hashes(event.event_hash, event.packed_hashes, event.keys)
        for key, hash, residency, priority in zip(event.keys, hashes, event.residency, event.priorities, strict=True):
            if hash is None:
                continue
            if key not in group.blocks:
                # Never told of: where it was is known only if it moved, and then only if nothing faster is left of it.
                left = event.moved_from is not None and not residency & event.moved_from.bit
                group.blocks[key] = _Known(hash, event.moved_from if left else fastest(residency), priority)
            yield from self._change(group, key, hash, fastest(residency), priority)

    def _change(self, group: _Group, key: bytes, hash: Hash, level: Tier | None, priority: int) -> Iterator[Json]:
        known = group.blocks[key]
        levels, priorities = _diff(known.level, level), _diff(known.priority, priority)
        group.blocks[key] = _Known(hash, level, priority)
        if levels or priorities:
            body = {"type": "updated", "block_hash": hash, "cache_level": levels, "priority": priorities}
            yield self._envelope(group, body)

    def _envelope(self, group: _Group, data: Json) -> Json:
        number, self._next = self._next, self._next + 1
        return {
            "event_id": number,
            "data": data,
            "window_size": group.window or WHOLE_WINDOW,
            "hash_algo": group.algorithm or KEYS_ALONE,
            "layer_group_id": group.number,
        }


def _blocks(item: Event | SnapshotSlice) -> Iterator[_Stored]:
    keys, parents = split_keys(item.packed_keys), split_keys(item.packed_parents)
    # The key of a root's parent is all zeros, as is the hash of a parent without one: none, both of them.
    above = _hashes(item.event_hash, item.packed_parent_hashes, parents)
    parent_hashes = [None if parent == ROOT_PARENT else hash for parent, hash in zip(parents, above, strict=True)]
    yield from map(
        _Stored,
        keys,
        parents,
        _hashes(item.event_hash, item.packed_hashes, keys),
        parent_hashes,
        map(fastest, item.residency),
        item.priorities,
        item.tokens or [_NO_TOKENS] * len(keys),
    )


def _hashes(algorithm: str, packed: bytes, keys: list[bytes]) -> list[Hash | None]:
    """One a key; None for those that have none."""
    if not algorithm:
        return [key.hex() for key in keys]
    size = len(packed) // max(1, len(keys))
    raw = (packed[place * size : (place + 1) * size] for place in range(len(keys)))
    return [_hash(each) if any(each) else None for each in raw]


def _hash(raw: bytes) -> Hash:
    """64 bits as a number, digests in hex."""
    return int.from_bytes(raw, "big") if len(raw) == _NUMBER_BYTES else raw.hex()


def _diff(old: int | None, new: int | None) -> Json | None:
    return None if old == new else {"type": "event_diff", "new_value": new, "old_value": old}


def _chain_json(chain: list[_Stored]) -> Json:
    return {"type": "stored", "parent_hash": chain[0].parent_hash, "blocks": [_block_json(block) for block in chain]}


def _block_json(block: _Stored) -> Json:
    tokens = block.tokens
    extra = tokens.extra_ids or (0,) * len(tokens.token_ids)
    body = {
        "type": "stored_block",
        "block_hash": block.hash,
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra_id}
            for token, extra_id in zip(tokens.token_ids, extra, strict=True)
        ],
        "cache_level": block.level,
        "priority": block.priority,
        "mm_keys": [{"type": "mm_key", "hash": digest.hex(), "start_offset": place} for digest, place in tokens.items],
    }
    return body if tokens.cache_salt is None else body | {"cache_salt": tokens.cache_salt}
