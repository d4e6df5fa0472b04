"""kvtier's events as TensorRT-LLM's: the JSON that its routers read.

What differs, and how it is bridged:

- An ``updated`` of theirs is of one block, a ``stored`` of one chain; ours are cut up. A long chain comes in several
  ``stored``, each of which has the one before as its parent, and what is removed in several ``removed``.
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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, Protocol

from kvtier.abi.block_tokens import BlockTokens
from kvtier.abi.keys import KEY_BYTES

KEYS_ALONE: Final = "kvtier_key"
WHOLE_WINDOW: Final = 2**31 - 1

EVENT_WEIGHT: Final = 1024
"""An event is closed once it has so many tokens or hashes: about 60 KB, and a millisecond of whoever makes it."""

BLOCK_WEIGHT: Final = 8
"""A stored block counts as so many tokens, besides those that it has."""

_NO_TOKENS: Final = BlockTokens(())
_NUMBER_BYTES: Final = 8
_ROOT: Final = bytes(KEY_BYTES)

Hash = int | str
Json = dict[str, Any]


class OfGroup(Protocol):
    """What is told of a window group. ``event_hash``: how its blocks are named; ``window_tokens``: 0 = full
    attention."""

    @property
    def group(self) -> int: ...
    @property
    def event_hash(self) -> str: ...
    @property
    def window_tokens(self) -> int: ...


class OfBlocks(OfGroup, Protocol):
    """What is told of some of its blocks: keys, 32 bytes each, and one a block of whatever else is not empty.

    ``residency``: sets of tiers, as bits; ``priorities``: a byte each. ``packed_parents`` to ``tokens``: of stored
    ones; the parent of a root is zeros, as is a hash where there is none.
    """

    @property
    def packed_keys(self) -> bytes: ...
    @property
    def packed_hashes(self) -> bytes: ...
    @property
    def residency(self) -> bytes: ...
    @property
    def priorities(self) -> bytes: ...
    @property
    def packed_parents(self) -> bytes: ...
    @property
    def packed_parent_hashes(self) -> bytes: ...
    @property
    def tokens(self) -> Iterable[BlockTokens]:
        """False where there are none of any block."""
        ...


@dataclass(slots=True)
class _Known:
    """A block that was told of."""

    hash: Hash
    level: int | None
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
    level: int | None
    priority: int
    tokens: BlockTokens


class TrtllmTeller:
    """Of one cache, with nothing filtered away: what it is not told of, it does not know.

    What its methods return is made as it is asked for, and is to be taken to its end.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self.next_id = 0
        """Of the next event."""

    def begin(self) -> Iterator[Json]:
        """All is told anew from here on: what was known is taken back."""
        for group in self._groups.values():
            yield from self._forget(group)

    def lost(self, events: int) -> None:
        """So many were, which leaves a hole."""
        self.next_id += events

    def created(self, of: OfGroup, levels: Sequence[int]) -> Iterator[Json]:
        """``levels``: blocks that each cache level has room for, the fastest first."""
        group = self._group(of)
        yield from self._forget(group)
        yield self._envelope(group, {"type": "created", "num_blocks_per_cache_level": list(levels)})

    def stored(self, of: OfBlocks) -> Iterator[Json]:
        """One event a chain. What is known already changes at most: slices and events of a snapshot overlap."""
        group = self._group(of)
        chain: list[_Stored] = []
        weight = 0
        for block in _blocks(of):
            if block.hash is None:
                continue
            if block.key in group.blocks:
                yield from self._change(group, block.key, block.hash, block.level, block.priority)
                continue
            group.blocks[block.key] = _Known(block.hash, block.level, block.priority)
            if chain and (block.parent != chain[-1].key or weight >= EVENT_WEIGHT):
                yield self._envelope(group, _chain_json(chain))
                chain, weight = [], 0
            chain.append(block)
            weight += BLOCK_WEIGHT + len(block.tokens.token_ids)
        if chain:
            yield self._envelope(group, _chain_json(chain))

    def updated(self, of: OfBlocks, moved_from: int | None) -> Iterator[Json]:
        """``moved_from``: the cache level that a move took them from; None = it was no move."""
        group = self._group(of)
        hashes = _hashes(of.event_hash, of.packed_hashes, of.packed_keys)
        rows = zip(_cut(of.packed_keys), hashes, of.residency, of.priorities, strict=True)
        for key, hash, residency, priority in rows:
            if hash is None:
                continue
            level = _fastest(residency)
            if key not in group.blocks:
                # Never told of: where it was is known only if it moved, and then only if nothing faster is left of it.
                left = moved_from is not None and not residency >> moved_from & 1
                group.blocks[key] = _Known(hash, moved_from if left else level, priority)
            yield from self._change(group, key, hash, level, priority)

    def removed(self, of: OfBlocks) -> Iterator[Json]:
        """They left the index."""
        group = self._group(of)
        hashes = [hash for hash in _hashes(of.event_hash, of.packed_hashes, of.packed_keys) if hash is not None]
        for key in _cut(of.packed_keys):
            group.blocks.pop(key, None)
        yield from self._removed(group, hashes)

    def cleared(self, of: OfGroup) -> Iterator[Json]:
        """Every block of the group left the index."""
        yield from self._forget(self._group(of))

    def _group(self, of: OfGroup) -> _Group:
        group = self._groups.setdefault(of.group, _Group(of.group))
        group.algorithm, group.window = of.event_hash, of.window_tokens
        return group

    def _forget(self, group: _Group) -> Iterator[Json]:
        blocks, group.blocks = group.blocks, {}
        yield from self._removed(group, [known.hash for known in blocks.values()])

    def _removed(self, group: _Group, hashes: Sequence[Hash]) -> Iterator[Json]:
        for place in range(0, len(hashes), EVENT_WEIGHT):
            data = {"type": "removed", "block_hashes": hashes[place : place + EVENT_WEIGHT]}
            yield self._envelope(group, data)

    def _change(self, group: _Group, key: bytes, hash: Hash, level: int | None, priority: int) -> Iterator[Json]:
        known = group.blocks[key]
        levels, priorities = _diff(known.level, level), _diff(known.priority, priority)
        group.blocks[key] = _Known(hash, level, priority)
        if levels or priorities:
            body = {"type": "updated", "block_hash": hash, "cache_level": levels, "priority": priorities}
            yield self._envelope(group, body)

    def _envelope(self, group: _Group, data: Json) -> Json:
        number, self.next_id = self.next_id, self.next_id + 1
        return {
            "event_id": number,
            "data": data,
            "window_size": group.window or WHOLE_WINDOW,
            "hash_algo": group.algorithm or KEYS_ALONE,
            "layer_group_id": group.number,
        }


def _blocks(of: OfBlocks) -> Iterator[_Stored]:
    """Each as it is asked for: whoever makes events of many can pause between them."""
    above = _hashes(of.event_hash, of.packed_parent_hashes, of.packed_parents)
    # The key of a root's parent is all zeros, as is the hash of a parent without one: none, both of them.
    parents = zip(_cut(of.packed_parents), above, strict=True)
    return map(
        _Stored,
        _cut(of.packed_keys),
        _cut(of.packed_parents),
        _hashes(of.event_hash, of.packed_hashes, of.packed_keys),
        (None if parent == _ROOT else hash for parent, hash in parents),
        map(_fastest, of.residency),
        of.priorities,
        of.tokens or repeat(_NO_TOKENS),
    )


def _hashes(algorithm: str, packed: bytes, packed_keys: bytes) -> Iterator[Hash | None]:
    """One a key; None for those that have none."""
    if not algorithm:
        return (key.hex() for key in _cut(packed_keys))
    count = len(packed_keys) // KEY_BYTES
    size = len(packed) // max(1, count)
    raw = (packed[place * size : (place + 1) * size] for place in range(count))
    return (_hash(each) if any(each) else None for each in raw)


def _cut(packed_keys: bytes) -> Iterator[bytes]:
    return (packed_keys[place : place + KEY_BYTES] for place in range(0, len(packed_keys), KEY_BYTES))


def _hash(raw: bytes) -> Hash:
    """64 bits as a number, digests in hex."""
    return int.from_bytes(raw, "big") if len(raw) == _NUMBER_BYTES else raw.hex()


def _fastest(residency: int) -> int | None:
    """The lowest cache level of a set; None for the empty one."""
    return (residency & -residency).bit_length() - 1 if residency else None


def _diff(old: int | None, new: int | None) -> Json | None:
    return None if old == new else {"type": "event_diff", "new_value": new, "old_value": old}


def _chain_json(chain: Sequence[_Stored]) -> Json:
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
