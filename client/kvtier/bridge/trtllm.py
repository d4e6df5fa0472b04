"""Converts kvtier's events to TensorRT-LLM's JSON, for its routers.

Differences:

- A TensorRT-LLM ``updated`` has one block, a ``stored`` one chain: kvtier's events are split.
- TensorRT-LLM has no ``cleared``: it becomes a ``removed`` of all known blocks.
- ``event_id`` counts from 0. Lost events leave a gap of the same length.
- ``updated`` has old values, which the converter remembers. A value is null if the old value is unknown; begin with a
  snapshot to know all blocks.
- A block may be in several tiers. ``cache_level`` is the fastest tier (0 device, 1 host, 2 disk); a change in slower
  tiers alone is no event.
- Full attention has no window: ``window_size`` is then the largest value, 2147483647.
- Blocks are named by the hash of the cache's option ``event_hash``; blocks without a hash are left out. A cache without
  the option uses its keys in hex, with ``kvtier_key`` as ``hash_algo``.

Shapes: TensorRT-LLM's ``KVCacheEventSerializer`` of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.events import BlockTokens, Event, Gap, SnapshotSlice, SnapshotStart, WatchItem, split_hashes
from kvtier.types import ROOT_PARENT, Cause, EventType, fastest
from kvtier.wire import split_keys

KEYS_ALONE: Final = "kvtier_key"
WHOLE_WINDOW: Final = 2**31 - 1

_NO_TOKENS: Final = BlockTokens(())
_NUMBER_BYTES: Final = 8

Hash = int | str
Json = dict[str, Any]


@dataclass(slots=True)
class _SeenBlock:
    """A block as the last event shows it."""

    hash: Hash
    level: int | None
    priority: int


@dataclass(slots=True)
class _SeenGroup:
    """A window group and its known blocks. ``algorithm`` and ``window``: of the latest event."""

    number: int
    blocks: dict[bytes, _SeenBlock] = field(default_factory=dict)
    algorithm: str = ""
    window: int = 0


class TrtllmEvents:
    """Converts the events of one cache to TensorRT-LLM's, as dicts. The events must be unfiltered: a block without its
    events stays unknown. The module's docstring lists the differences.

    ``attention_dp_rank``: the rank in every event; None without attention data parallelism.
    """

    def __init__(self, attention_dp_rank: int | None = None) -> None:
        self._rank: Json = {} if attention_dp_rank is None else {"attention_dp_rank": attention_dp_rank}
        self._groups: dict[int, _SeenGroup] = {}
        self._next_id = 0

    def of(self, item: WatchItem) -> Iterator[Json]:
        """Yields an item as TensorRT-LLM's events in order, each as a dict that JSON can hold."""
        match item:
            case Event() | SnapshotSlice():
                group = self._groups.setdefault(item.group, _SeenGroup(item.group))
                group.algorithm, group.window = item.event_hash, item.window_tokens
                yield from self._applied(group, item)
            case SnapshotStart():
                for group in self._groups.values():
                    yield from self._forget(group)
            case Gap():
                self._next_id += item.last_id - item.first_id + 1
            case _:
                pass

    def _applied(self, group: _SeenGroup, item: Event | SnapshotSlice) -> Iterator[Json]:
        if isinstance(item, SnapshotSlice) or item.type is EventType.STORED:
            yield from self._stored(group, item)
        elif item.type is EventType.UPDATED:
            yield from self._updated(group, item)
        elif item.type is EventType.REMOVED:
            for key in item.keys:
                group.blocks.pop(key, None)
            yield from self._removed(group, [hash for hash in _hashes(item) if hash is not None])
        else:
            yield from self._forget(group)
            if item.type is EventType.CREATED:
                levels = list(item.num_blocks_per_cache_level)
                yield self._envelope(group, {"type": "created", "num_blocks_per_cache_level": levels})

    def _stored(self, group: _SeenGroup, item: Event | SnapshotSlice) -> Iterator[Json]:
        """Yields an event per chain, or an update for a known block: slices and events of a snapshot overlap."""
        parents = split_keys(item.packed_parents)
        above = _names(item.event_hash, item.packed_parent_hashes, parents)
        tokens = item.tokens or (_NO_TOKENS,) * len(parents)
        chain: list[Json] = []
        last, parent_hash = b"", None
        rows = zip(item.keys, parents, _hashes(item), above, item.residency, item.priorities, tokens, strict=True)
        for key, parent, hash, parent_name, residency, priority, of_prompt in rows:
            level = fastest(residency)
            if hash is None or level is None:
                continue
            if key in group.blocks:
                yield from self._change(group, key, hash, level, priority)
                continue
            group.blocks[key] = _SeenBlock(hash, level, priority)
            if chain and parent != last:
                yield self._envelope(group, {"type": "stored", "parent_hash": parent_hash, "blocks": chain})
                chain = []
            if not chain:
                parent_hash = None if parent == ROOT_PARENT else parent_name
            chain.append(_block_json(hash, level, priority, of_prompt))
            last = key
        if chain:
            yield self._envelope(group, {"type": "stored", "parent_hash": parent_hash, "blocks": chain})

    def _updated(self, group: _SeenGroup, event: Event) -> Iterator[Json]:
        if event.cause is Cause.REMOTE:
            return  # the remote store is no cache level
        moved_from = event.moved_from
        for key, hash, residency, priority in zip(
            event.keys, _hashes(event), event.residency, event.priorities, strict=True
        ):
            level = fastest(residency)
            if hash is None or level is None:  # None: the bytes are lost, and a removed event follows
                continue
            if key not in group.blocks:
                # The old level of an unknown block is known only if it moved or left, and no faster copy remains.
                left = moved_from is not None and not residency & moved_from.bit
                if event.moved_to is None and moved_from is not None:
                    left = moved_from < level
                group.blocks[key] = _SeenBlock(hash, moved_from if left else level, priority)
            yield from self._change(group, key, hash, level, priority)

    def _forget(self, group: _SeenGroup) -> Iterator[Json]:
        blocks, group.blocks = group.blocks, {}
        yield from self._removed(group, [known.hash for known in blocks.values()])

    def _removed(self, group: _SeenGroup, hashes: Sequence[Hash]) -> Iterator[Json]:
        if hashes:
            yield self._envelope(group, {"type": "removed", "block_hashes": hashes})

    def _change(self, group: _SeenGroup, key: bytes, hash: Hash, level: int | None, priority: int) -> Iterator[Json]:
        known = group.blocks[key]
        levels, priorities = _diff(known.level, level), _diff(known.priority, priority)
        group.blocks[key] = _SeenBlock(hash, level, priority)
        if levels or priorities:
            body = {"type": "updated", "block_hash": hash, "cache_level": levels, "priority": priorities}
            yield self._envelope(group, body)

    def _envelope(self, group: _SeenGroup, data: Json) -> Json:
        number, self._next_id = self._next_id, self._next_id + 1
        return {
            "event_id": number,
            "data": data,
            "window_size": group.window or WHOLE_WINDOW,
            **self._rank,
            "hash_algo": group.algorithm or KEYS_ALONE,
            "layer_group_id": group.number,
        }


def _hashes(item: Event | SnapshotSlice) -> list[Hash | None]:
    return _names(item.event_hash, item.packed_hashes, item.keys)


def _names(algorithm: str, packed: bytes, keys: Sequence[bytes]) -> list[Hash | None]:
    """Returns a hash for each key, or None for a key without one. A hash of 64 bits is a number, a digest is in hex."""
    if not algorithm:
        return [key.hex() for key in keys]
    raw = split_hashes(packed, len(keys))
    as_shown = (int.from_bytes(each, "big") if len(each) == _NUMBER_BYTES else each.hex() for each in raw)
    return [name if any(each) else None for each, name in zip(raw, as_shown, strict=True)]


def _diff(old: int | None, new: int | None) -> Json | None:
    return None if old == new else {"type": "event_diff", "new_value": new, "old_value": old}


def _block_json(hash: Hash, level: int | None, priority: int, tokens: BlockTokens) -> Json:
    extra = tokens.extra_ids or (0,) * len(tokens.token_ids)
    body = {
        "type": "stored_block",
        "block_hash": hash,
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra_id}
            for token, extra_id in zip(tokens.token_ids, extra, strict=True)
        ],
        "cache_level": level,
        "priority": priority,
        "mm_keys": [{"type": "mm_key", "hash": digest.hex(), "start_offset": place} for digest, place in tokens.items],
    }
    return body if tokens.cache_salt is None else body | {"cache_salt": tokens.cache_salt}
