"""kvtier's events in vLLM's words.

What differs, and how it is bridged:

- Theirs say which *medium* has a block, ours which tiers a block is in afterwards. A block that moves is stored in the
  new medium first and then removed from the old one, in one step: at no moment does a reader think that it is gone.
- What a snapshot says is compared with what was published before it: only differences are told, so that a reader keeps
  what is still true while we find our way back after a gap.
- Their ``AllBlocksCleared`` is of everything, ours of one window group; and some readers skip it, others clear only
  what was on the GPU. All blocks of the group are therefore removed one by one, and where nothing at all is left
  ``AllBlocksCleared`` follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.bridge.residents import Change, Group, Resident, parents_first
from kvtier.bridge.vllm_form import (
    CLEARED,
    FULL_ATTENTION,
    SLIDING_WINDOW,
    BlockHash,
    BlockRemoved,
    BlockStored,
    VllmEvent,
)
from kvtier.events import Event, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import EventType, Tier, tiers_of

MEDIA: Final[Mapping[Tier, str]] = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
"""Names that Dynamo maps to its tiers. llm-d takes any, in lower case, and weighs gpu and cpu."""

EVENT_BLOCKS: Final = 1024
"""Most blocks of an event."""

_NUMBER_BYTES: Final = 8

Step = list[VllmEvent]
"""Events that belong into one batch, in order."""


@dataclass(slots=True, frozen=True)
class Naming:
    """How a reader is told of blocks.

    ``as_numbers``: hashes as unsigned 64-bit numbers, the first eight bytes of longer ones, big-endian; else as bytes.
    ``tokens``: whether token ids are published. ``lora_names``: by LoRA id; another adapter's name is its id, so that
    nobody takes its blocks for the base model's. ``group``: only this window group; None = all.
    """

    as_numbers: bool = True
    tokens: bool = False
    media: Mapping[Tier, str] = field(default_factory=lambda: MEDIA)
    lora_names: Mapping[int, str] = field(default_factory=dict)
    group: int | None = None

    def hash(self, name: bytes) -> BlockHash:
        return int.from_bytes(name[:_NUMBER_BYTES], "big") if self.as_numbers else name

    def lora(self, block: Resident) -> tuple[int | None, str | None]:
        """Id and name; None for the base model."""
        lora_id = block.tokens.lora_id if block.tokens is not None else None
        return lora_id, None if lora_id is None else self.lora_names.get(lora_id, str(lora_id))


class VllmEvents:
    """Of one cache, whose watch begins with a snapshot. What is kept of a block is what :meth:`everything` must tell.

    After a gap, have a new watch with a snapshot follow: what was missed is told at its end.
    """

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._groups: dict[int, Group] = {}
        self._arriving: dict[int, Group] | None = None
        """What a snapshot under way has said so far."""
        self._begun = False

    @property
    def blocks(self) -> int:
        """That are told of."""
        return sum(len(group.blocks) for group in self._groups.values())

    def of(self, item: WatchItem) -> Iterator[Step]:
        """An item in vLLM's words."""
        match item:
            case SnapshotStart():
                self._arriving = {}
            case SnapshotEnd():
                yield from self._arrived()
            case Event() | SnapshotSlice() if self._naming.group in (None, item.group):
                groups = self._groups if self._arriving is None else self._arriving
                group = groups.setdefault(item.group, Group(item.group))
                changes = group.apply(item, tokens=self._naming.tokens)
                if self._arriving is None and changes:
                    cleared = isinstance(item, Event) and item.type in (EventType.CREATED, EventType.CLEARED)
                    yield [*self._told(group, changes), *([CLEARED] if cleared and not self.blocks else [])]
            case _:
                pass

    def everything(self) -> Iterator[Step]:
        """What a reader that knows nothing, or the wrong things, must be told to know all."""
        yield [CLEARED]
        for group in self._groups.values():
            changes = [Change(block, 0, block.residency) for block in group.blocks.values()]
            yield from ([event] for event in self._told(group, changes))

    def _arrived(self) -> Iterator[Step]:
        arrived, self._arriving = self._arriving or {}, None
        if not self._begun:
            self._begun = True
            yield [CLEARED]  # of what an earlier bridge may have said under this address
        for number in self._groups.keys() | arrived.keys():
            group = self._groups.setdefault(number, Group(number))
            difference = group.becomes(arrived.get(number, Group(number)))
            # Stored before removed, as everywhere; of so many a batch may well end between them.
            for changes in (difference.replaced, difference.present, difference.gone):
                yield from ([event] for event in self._told(group, changes))

    def _told(self, group: Group, changes: Sequence[Change]) -> Iterator[VllmEvent]:
        added = {change.block.key: change.after & ~change.before for change in changes}
        lost = {change.block.key: change.before & ~change.after for change in changes}
        blocks = parents_first(change.block for change in changes)
        yield from self._stored(group, blocks, added)
        for tier in reversed(Tier):
            old = [block for block in reversed(blocks) if lost[block.key] & tier.bit]
            for place in range(0, len(old), EVENT_BLOCKS):
                hashes = [self._naming.hash(block.name) for block in old[place : place + EVENT_BLOCKS]]
                yield BlockRemoved(hashes, self._naming.media[tier], group.number)

    def _stored(self, group: Group, blocks: Iterable[Resident], added: Mapping[bytes, int]) -> Iterator[BlockStored]:
        """Chain by chain, each in all its media, and not medium by medium: a child can be in another than its parent,
        and readers drop a child whose parent they have not heard of."""
        run: list[Resident] = []
        for block in blocks:
            goes_on = run and added[block.key] == added[run[-1].key] and _continues(run[-1], block)
            if not goes_on or len(run) == EVENT_BLOCKS:
                yield from self._in_media(group, run, added)
                run = []
            run.append(block)
        yield from self._in_media(group, run, added)

    def _in_media(self, group: Group, run: Sequence[Resident], added: Mapping[bytes, int]) -> Iterator[BlockStored]:
        if run:
            for tier in tiers_of(added[run[0].key]):
                yield self._chain(group, run, self._naming.media[tier])

    def _chain(self, group: Group, run: Sequence[Resident], medium: str) -> BlockStored:
        name, first = self._naming.hash, run[0]
        lora_id, lora_name = self._naming.lora(first)
        return BlockStored(
            block_hashes=[name(block.name) for block in run],
            parent_block_hash=None if first.parent_name is None else name(first.parent_name),
            token_ids=[token for block in run if block.tokens is not None for token in block.tokens.token_ids],
            block_size=group.tokens_per_block,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=None if first.tokens is None else [_extra_keys(block, lora_name) for block in run],
            group_idx=group.number,
            kv_cache_spec_kind=SLIDING_WINDOW if group.window_tokens else FULL_ATTENTION,
            kv_cache_spec_sliding_window=group.window_tokens or None,
            cache_salt=None if first.tokens is None else first.tokens.cache_salt,
        )


def _continues(above: Resident, block: Resident) -> bool:
    """Whether one event can tell of both, one after the other."""
    if block.parent != above.key:
        return False
    if block.tokens is None or above.tokens is None:
        return block.tokens is above.tokens
    return (block.tokens.lora_id, block.tokens.cache_salt) == (above.tokens.lora_id, above.tokens.cache_salt)


def _extra_keys(block: Resident, lora_name: str | None) -> list[str] | None:
    """What besides token ids makes the block what it is, in vLLM's order: adapter, items, and the salt at a root."""
    if block.tokens is None:
        return None
    salt = block.tokens.cache_salt if block.parent is None else None
    return [key for key in (lora_name, *block.tokens.items, salt) if key is not None] or None
