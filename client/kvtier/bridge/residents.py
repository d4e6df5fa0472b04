"""Which blocks of a cache are where, with what a router must be told of them: rebuilt from the event stream.

A block stands here if it can be named and placed: of a cache with ``event_hash`` only one that has such a hash, and
whose parent has one or that is a root.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvtier.abi.block_tokens import BlockTokens
from kvtier.events import Event, SnapshotSlice
from kvtier.types import ROOT_PARENT, EventType
from kvtier.wire import split_keys


@dataclass(slots=True, frozen=True)
class Tokens:
    """What a block holds of its prompt, small enough to be kept of each."""

    token_ids: array[int]
    lora_id: int | None
    cache_salt: str | None
    items: tuple[str, ...]
    """Digests of the multimodal items that cover it, in hex."""


@dataclass(slots=True, frozen=True)
class Resident:
    """A block. ``name``, ``parent_name``: packed, as its cache names blocks. ``parent``, ``parent_name``: None = it is
    a root."""

    key: bytes
    parent: bytes | None
    name: bytes
    parent_name: bytes | None
    tokens: Tokens | None
    residency: int

    def is_as(self, other: Resident) -> bool:
        """Whether nothing sets them apart but where they are."""
        return replace(self, residency=other.residency) == other


@dataclass(slots=True, frozen=True)
class Change:
    """``before``, ``after``: sets of tiers; empty = it is not there."""

    block: Resident
    before: int
    after: int


@dataclass(slots=True, frozen=True)
class Difference:
    """Between a group and what it becomes: to be told in this order.

    ``replaced``: their keys stand for other blocks now, under another parent perhaps; these are among ``present``, with
    those that are new or elsewhere. ``gone``: nothing stands for them.
    """

    replaced: list[Change]
    present: list[Change]
    gone: list[Change]


@dataclass(slots=True)
class Group:
    """The blocks of a window group, by key. ``window_tokens``, ``tokens_per_block``: as told last."""

    number: int
    window_tokens: int = 0
    tokens_per_block: int = 0
    blocks: dict[bytes, Resident] = field(default_factory=dict)

    def apply(self, item: Event | SnapshotSlice, *, tokens: bool) -> list[Change]:
        """What the item changes; nothing, when it is applied again. ``tokens``: whether they are kept."""
        self.window_tokens = item.window_tokens
        self.tokens_per_block = item.tokens_per_block or self.tokens_per_block  # created events and slices say it
        kind = EventType.STORED if isinstance(item, SnapshotSlice) else item.type
        match kind:
            case EventType.STORED:
                return [change for block in _stored(item, tokens) if (change := self._put(block)) is not None]
            case EventType.UPDATED:
                known = self.blocks
                rows = zip(split_keys(item.packed_keys), item.residency, strict=True)
                moved = (replace(known[key], residency=residency) for key, residency in rows if key in known)
                return [change for block in moved if (change := self._put(block)) is not None]
            case EventType.REMOVED:
                gone = (self.blocks.pop(key, None) for key in split_keys(item.packed_keys))
                return [Change(block, block.residency, 0) for block in gone if block is not None]
            case EventType.CREATED | EventType.CLEARED:
                return self.clear()

    def clear(self) -> list[Change]:
        """Nothing is left of it."""
        blocks, self.blocks = self.blocks, {}
        return [Change(block, block.residency, 0) for block in blocks.values()]

    def becomes(self, other: Group) -> Difference:
        """Makes this group the other one."""
        known, self.blocks = self.blocks, other.blocks
        self.window_tokens, self.tokens_per_block = other.window_tokens, other.tokens_per_block
        difference = Difference([], [], [])
        for key, block in known.items():
            if key not in other.blocks:
                difference.gone.append(Change(block, block.residency, 0))
            elif not block.is_as(other.blocks[key]):
                difference.replaced.append(Change(block, block.residency, 0))
        replaced = {change.block.key for change in difference.replaced}
        for key, block in other.blocks.items():
            before = known[key].residency if key in known and key not in replaced else 0
            if before != block.residency:
                difference.present.append(Change(block, before, block.residency))
        return difference

    def _put(self, block: Resident) -> Change | None:
        known = self.blocks.get(block.key)
        before = known.residency if known is not None else 0
        self.blocks[block.key] = block
        return Change(block, before, block.residency) if before != block.residency else None


def parents_first(blocks: Iterable[Resident]) -> list[Resident]:
    """The same blocks, each after its parent if that is among them; chains stay together as far as they can."""
    waiting = {block.key: block for block in blocks}
    ordered: list[Resident] = []
    for block in list(waiting.values()):
        path = []
        above: Resident | None = block if block.key in waiting else None
        while above is not None:
            path.append(waiting.pop(above.key))
            above = waiting.get(above.parent) if above.parent is not None else None
        ordered.extend(reversed(path))
    return ordered


def _stored(item: Event | SnapshotSlice, with_tokens: bool) -> Iterator[Resident]:
    keys, parents = split_keys(item.packed_keys), split_keys(item.packed_parents)
    names: Sequence[bytes] = keys
    parent_names: Sequence[bytes] = parents
    if item.event_hash:
        names, parent_names = _cut(item.packed_hashes, len(keys)), _cut(item.packed_parent_hashes, len(keys))
    tokens: Sequence[BlockTokens | None] = item.tokens or [None] * len(keys)
    rows = zip(keys, parents, names, parent_names, tokens, item.residency, strict=True)
    for key, parent, name, parent_name, of_prompt, residency in rows:
        root = parent == ROOT_PARENT
        if any(name) and (root or any(parent_name)):
            above = (None, None) if root else (parent, parent_name)
            kept = _kept(of_prompt) if with_tokens and of_prompt is not None and of_prompt.token_ids else None
            yield Resident(key, above[0], name, above[1], kept, residency)


def _cut(packed: bytes, count: int) -> list[bytes]:
    size = len(packed) // max(1, count)
    return [packed[place * size : (place + 1) * size] for place in range(count)]


def _kept(tokens: BlockTokens) -> Tokens:
    digests = tuple(digest.hex() for digest, _ in tokens.items)
    return Tokens(array("I", tokens.token_ids), tokens.lora_id, tokens.cache_salt, digests)
