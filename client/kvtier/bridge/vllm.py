"""kvtier's events in vLLM's form.

The differences:

- vLLM's events name the *medium* that has a block, kvtier's the tiers that have it afterwards. A block that moves is
  stored in the new medium before it is removed from the old one, in one batch.
- After a gap a new snapshot is compared with the published state, and only the differences are published.
- ``AllBlocksCleared`` concerns all groups, kvtier's events one; some readers skip it, some clear the GPU only. So all
  blocks of a cleared group are removed one by one, and ``AllBlocksCleared`` follows if no group has any left.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvtier.bridge import Encoding, Options
from kvtier.events import BlockTokens, Event, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem, split_hashes
from kvtier.types import ROOT_PARENT, EventType, Tier, tiers_of
from kvtier.wire import split_keys

MEDIA: Final[Mapping[Tier, str]] = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
"""The names that Dynamo maps to its tiers. llm-d takes any name, in lower case, and weighs gpu and cpu."""
EVENT_BLOCKS: Final = 1024
"""Most blocks of one event."""
_NUMBER_BYTES: Final = 8


def first_bits(name: bytes) -> int:
    """The first 64 bits of a block's name: the form that every router reads."""
    return int.from_bytes(name[:_NUMBER_BYTES], "big")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """A chain of blocks, each the parent of the next, that a medium has from now on.

    ``parent_block_hash``: of the first block's parent; None = the block is a root. ``token_ids``: the tokens of all
    blocks in order, or none. ``extra_keys``: one per block. ``cache_salt`` is SGLang's field, which Dynamo reads; the
    array encoding omits it.
    """

    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: Sequence[Sequence[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that a medium no longer has."""

    block_hashes: Sequence[int | bytes]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """No group has any block in any medium."""


VllmEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
Step: TypeAlias = list[VllmEvent]
"""Events that belong in one batch, in order."""


def batch_of(events: Sequence[VllmEvent], encoding: Encoding, seconds: float, rank: int) -> list[Any]:
    """A batch for msgpack. AIBrix requires a number as the rank, Dynamo requires its presence."""
    return [seconds, list(events) if encoding is Encoding.MAP else [_as_array(event) for event in events], rank]


def _as_array(event: VllmEvent) -> list[Any]:
    fields = msgspec.structs.astuple(event)
    return [type(event).__name__, *(fields[:-1] if isinstance(event, BlockStored) else fields)]


@dataclass(slots=True, frozen=True)
class PublishedBlock:
    """A block in published events. ``name``: its hash. ``parent`` (its key), ``parent_name``: None = the block is a
    root. ``token_ids``: None = unknown, or not published. ``items``: digests of the multimodal items, in hex."""

    key: bytes
    parent: bytes | None
    name: bytes
    parent_name: bytes | None
    residency: int
    token_ids: array[int] | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    items: tuple[str, ...] = ()


class Change(NamedTuple):
    """A change of a block's tiers. ``before``, ``after``: sets of tiers; 0 = the block is absent."""

    block: PublishedBlock
    before: int
    after: int


@dataclass(slots=True)
class PublishedGroup:
    """The blocks of a window group, by key."""

    number: int
    window_tokens: int = 0
    tokens_per_block: int = 0
    blocks: dict[bytes, PublishedBlock] = field(default_factory=dict)

    def apply(self, item: Event | SnapshotSlice, *, tokens: bool) -> list[Change]:
        """Applies an item and returns its changes: none if it was applied before."""
        self.window_tokens = item.window_tokens
        self.tokens_per_block = item.tokens_per_block or self.tokens_per_block  # only some events have it
        kind = EventType.STORED if isinstance(item, SnapshotSlice) else item.type
        known, keys = self.blocks, split_keys(item.packed_keys)
        if kind is EventType.STORED:
            return self._put(_stored(item, tokens, self.tokens_per_block))
        if kind is EventType.UPDATED:
            rows = zip(keys, item.residency, strict=True)
            return self._put(replace(known[key], residency=residency) for key, residency in rows if key in known)
        gone = [known.pop(key) for key in (keys if kind is EventType.REMOVED else list(known)) if key in known]
        return [Change(block, block.residency, 0) for block in gone]

    def _put(self, blocks: Iterable[PublishedBlock]) -> list[Change]:
        changes = []
        for block in blocks:
            known = self.blocks.get(block.key)
            before = known.residency if known is not None else 0
            self.blocks[block.key] = block
            if before != block.residency:
                changes.append(Change(block, before, block.residency))
        return changes

    def difference(self, new: PublishedGroup) -> tuple[list[Change], list[Change]]:
        """The changes from this group to the new one, in the order to publish. Returns the blocks that are gone or
        whose key now means another block; then blocks that are new or in other tiers."""
        kept: dict[bytes, int] = {}
        gone: list[Change] = []
        for key, block in self.blocks.items():
            if key in new.blocks and replace(new.blocks[key], residency=block.residency) == block:
                kept[key] = block.residency
            else:
                gone.append(Change(block, block.residency, 0))
        changes = (Change(block, kept.get(key, 0), block.residency) for key, block in new.blocks.items())
        return gone, [change for change in changes if change.before != change.after]


class VllmEvents:
    """The events of one cache in vLLM's form, from a watch that begins with a snapshot. After a gap, start a new watch
    with a snapshot: the end of the snapshot yields the missed changes."""

    def __init__(
        self,
        options: Options,
        *,
        media: Mapping[Tier, str] = MEDIA,
        hash_of: Callable[[bytes], int | bytes] = first_bits,
    ) -> None:
        """``media``: the published tiers. ``hash_of``: a block's hash in events, from its name."""
        self._options = options
        self._media = media
        self._hash_of = hash_of
        self._groups: dict[int, PublishedGroup] = {}
        self._snapshot: dict[int, PublishedGroup] | None = None
        self._begun = False

    @property
    def blocks(self) -> int:
        return sum(len(group.blocks) for group in self._groups.values())

    def of(self, item: WatchItem) -> Iterator[Step]:
        """The steps to publish for an item."""
        ends = isinstance(item, SnapshotEnd)
        if ends and not self._begun:
            self._begun = True
            yield [AllBlocksCleared()]  # an earlier bridge at this address may have published other blocks
        for group, changes in self.changes(item):
            if ends:
                yield from ([event] for event in self.events_of(group, changes))
                continue
            cleared = isinstance(item, Event) and item.type in (EventType.CREATED, EventType.CLEARED)
            yield [*self.events_of(group, changes), *([AllBlocksCleared()] if cleared and not self.blocks else [])]

    def changes(self, item: WatchItem) -> Iterator[tuple[PublishedGroup, list[Change]]]:
        """Applies an item. Yields its changes in the order to publish; the end of a snapshot has the differences."""
        match item:
            case SnapshotStart():
                self._snapshot = {}
            case SnapshotEnd():
                new, self._snapshot = self._snapshot or {}, None
                old, self._groups = self._groups, new
                for number in old.keys() | new.keys():
                    group = new.setdefault(number, PublishedGroup(number))
                    for changes in old.get(number, PublishedGroup(number)).difference(group):
                        yield group, changes
            case Event() | SnapshotSlice() if self._options.group in (None, item.group):
                groups = self._groups if self._snapshot is None else self._snapshot
                group = groups.setdefault(item.group, PublishedGroup(item.group))
                changes = group.apply(item, tokens=self._options.tokens)
                if self._snapshot is None and changes:
                    yield group, changes
            case _:
                pass

    def everything(self) -> Iterator[Step]:
        """The present state, for a reader with no state or a wrong one."""
        yield [AllBlocksCleared()]
        for group in self._groups.values():
            changes = [Change(block, 0, block.residency) for block in group.blocks.values()]
            yield from ([event] for event in self.events_of(group, changes))

    def events_of(self, group: PublishedGroup, changes: Sequence[Change]) -> Iterator[VllmEvent]:
        """Events of stored blocks, chain by chain and each in all its media, then of removed blocks, children first.
        Readers drop a child whose parent they do not know, and the parent can be in another medium."""
        added = {change.block.key: change.after & ~change.before for change in changes}
        lost = {change.block.key: change.before & ~change.after for change in changes}
        blocks = parents_first(change.block for change in changes)
        for run in _runs(blocks, added):
            for tier in tiers_of(added[run[0].key]):
                if tier in self._media:
                    yield self._chain(group, run, self._media[tier])
        for tier in reversed(list(self._media)):
            old = [self._hash_of(block.name) for block in reversed(blocks) if lost[block.key] & tier.bit]
            for place in range(0, len(old), EVENT_BLOCKS):
                yield BlockRemoved(old[place : place + EVENT_BLOCKS], self._media[tier], group.number)

    def _chain(self, group: PublishedGroup, run: Sequence[PublishedBlock], medium: str) -> BlockStored:
        first = run[0]
        lora_name = None if first.lora_id is None else self._options.lora_names.get(first.lora_id, str(first.lora_id))
        return BlockStored(
            block_hashes=[self._hash_of(block.name) for block in run],
            parent_block_hash=None if first.parent_name is None else self._hash_of(first.parent_name),
            token_ids=[token for block in run for token in block.token_ids or ()],
            block_size=group.tokens_per_block,
            lora_id=first.lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=None if first.token_ids is None else [_extra_keys(block, lora_name) for block in run],
            group_idx=group.number,
            kv_cache_spec_kind="sliding_window" if group.window_tokens else "full_attention",
            kv_cache_spec_sliding_window=group.window_tokens or None,
            cache_salt=first.cache_salt,
        )


def parents_first(blocks: Iterable[PublishedBlock]) -> list[PublishedBlock]:
    """The same blocks, each after its parent. Chains stay together where possible."""
    waiting = {block.key: block for block in blocks}
    ordered: list[PublishedBlock] = []
    for block in list(waiting.values()):
        path = []
        above: PublishedBlock | None = block if block.key in waiting else None
        while above is not None:
            path.append(waiting.pop(above.key))
            above = waiting.get(above.parent) if above.parent is not None else None
        ordered.extend(reversed(path))
    return ordered


def _runs(blocks: Iterable[PublishedBlock], added: Mapping[bytes, int]) -> Iterator[list[PublishedBlock]]:
    """Cuts ordered blocks into chains that each fit one event."""
    run: list[PublishedBlock] = []
    for block in blocks:
        if run and (len(run) == EVENT_BLOCKS or not _continues(run[-1], block, added)):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _continues(above: PublishedBlock, block: PublishedBlock, added: Mapping[bytes, int]) -> bool:
    def alike(one: PublishedBlock) -> tuple[object, ...]:
        return added[one.key], one.token_ids is None, one.lora_id, one.cache_salt

    return block.parent == above.key and alike(above) == alike(block)


def _extra_keys(block: PublishedBlock, lora_name: str | None) -> list[str] | None:
    """The parts of a block's identity besides token ids, in vLLM's order: adapter, items, and the salt of a root."""
    salt = block.cache_salt if block.parent is None else None
    return [key for key in (lora_name, *block.items, salt) if key is not None] or None


def _stored(item: Event | SnapshotSlice, with_tokens: bool, tokens_per_block: int) -> Iterator[PublishedBlock]:
    """The blocks of an item. With ``event_hash``, blocks without a hash, and their children, are left out. Partial
    blocks, which vLLM does not have, are left out if the item has tokens."""
    keys, parents = split_keys(item.packed_keys), split_keys(item.packed_parents)
    names, parent_names = keys, parents
    if item.event_hash:
        names, parent_names = item.hashes, split_hashes(item.packed_parent_hashes, len(keys))
    tokens: Sequence[BlockTokens | None] = item.tokens or [None] * len(keys)
    rows = zip(keys, parents, names, parent_names, item.residency, tokens, strict=True)
    for key, parent, name, parent_name, residency, prompt in rows:
        root = parent == ROOT_PARENT
        partial = prompt is not None and 0 < len(prompt.token_ids) < tokens_per_block
        if partial or not any(name) or not (root or any(parent_name)):
            continue
        block = PublishedBlock(key, None if root else parent, name, None if root else parent_name, residency)
        if with_tokens and prompt is not None and prompt.token_ids:
            items = tuple(digest.hex() for digest, _ in prompt.items)
            ids = array("I", prompt.token_ids)
            block = replace(block, token_ids=ids, lora_id=prompt.lora_id, cache_salt=prompt.cache_salt, items=items)
        yield block
