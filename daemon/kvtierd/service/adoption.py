"""What a restarted daemon makes of an adopted arena: blocks, merged with those on disk, and leases to honour.

Nothing is believed that is not proven: a slot counts if its generation is even, its record is whole and names this
generation, and (in a full-attention group) its block's ancestors count as well. Every other slot's generation turns
odd, so that whoever still looks at it finds out.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.abi.slot_records import SlotRecord
from kvtierd.core.ids import GroupId, Key, SessionId, SlotId, Tier
from kvtierd.core.manager import Recovered
from kvtierd.core.policy import GroupShape
from kvtierd.core.tickets import LeftLease
from kvtierd.core.traits import Label, Traits
from kvtierd.tiers.arena import Arena


@dataclass(slots=True, frozen=True)
class OldLife:
    """``live``: sessions of it whose processes live; ``dead``: those whose processes are known to have ended.
    ``keeper``: under whose name is held what any of them may read: the owner table names only the last of several
    readers, so all of it is, until none of them is left. An earlier life's keeper is neither live nor dead."""

    live: frozenset[SessionId]
    dead: frozenset[SessionId]
    keeper: SessionId


@dataclass(slots=True, frozen=True)
class Adopted:
    """``recovered``: as ``BlockManager.open`` wants it."""

    recovered: dict[GroupId, list[Recovered]] = field(default_factory=dict)
    left: list[LeftLease] = field(default_factory=list)

    @property
    def in_memory(self) -> int:
        return sum(one.host is not None or one.device is not None for all in self.recovered.values() for one in all)


_InMemory = dict[Key, dict[Tier, tuple[SlotId, SlotRecord]]]


def adopt(
    arena: Arena, shapes: Sequence[GroupShape], on_disk: Mapping[GroupId, Sequence[Recovered]], old: OldLife
) -> Adopted:
    """Changes the arena so that what is not in the answer is void, and nobody's. What is keeps its old owner until the
    lease is granted again: a daemon that dies before that must not have forgotten it."""
    adopted = Adopted()
    for shape in shapes:
        group = shape.group
        in_memory = _in_memory(arena, group)
        disk = on_disk.get(group, ())
        merged = _in_order(_merged(in_memory, disk), sliding=shape.sliding)
        adopted.recovered[group] = merged
        for tier in arena.tiers:
            kept = {slot: one.key for one in merged if (slot := one.places.get(tier)) is not None}
            adopted.left.extend(_left(arena, tier, group, kept, old))
            _void_the_rest(arena, tier, group, kept)
    return adopted


def _in_memory(arena: Arena, group: GroupId) -> _InMemory:
    found: _InMemory = {}
    for tier in arena.tiers:
        for slot, record in arena.contents(tier, group):
            found.setdefault(Key(record.key), {}).setdefault(tier, (slot, record))
    return found


def _merged(in_memory: _InMemory, disk: Sequence[Recovered]) -> list[Recovered]:
    """Least recently used first: what stands on disk alone was used before what stands in memory."""
    with_copies = []
    for one in disk:
        copies = in_memory.pop(one.key, {})
        same = {tier: (slot, record) for tier, (slot, record) in copies.items() if record.parent == one.parent}
        with_copies.append((max((r.order for _, r in same.values()), default=0), _with_copies(one, same)))
    for key, copies in in_memory.items():
        _, newest = max(copies.values(), key=lambda copy: copy[1].order)
        if len(copies) > 1:
            copies = {tier: (slot, record) for tier, (slot, record) in copies.items() if record.parent == newest.parent}
        parent = None if newest.parent is None else Key(newest.parent)
        with_copies.append((newest.order, _with_copies(Recovered(None, key, parent, _traits(newest)), copies)))
    with_copies.sort(key=lambda pair: pair[0])  # stable: the disk's own order among those only there
    return [one for _, one in with_copies]


def _with_copies(one: Recovered, copies: Mapping[Tier, tuple[SlotId, SlotRecord]]) -> Recovered:
    device, host = copies.get(Tier.DEVICE), copies.get(Tier.HOST)
    return one._replace(device=None if device is None else device[0], host=None if host is None else host[0])


def _traits(record: SlotRecord) -> Traits:
    label = Label(record.event_hash) if record.event_hash else None
    return Traits(record.priority, record.duration_ms, record.deadline_ns, label)


def _in_order(blocks: list[Recovered], *, sliding: bool) -> list[Recovered]:
    """Those whose ancestors are all there, parents before children, otherwise in the order given. In a sliding group
    every block stands for itself."""
    if sliding:
        return blocks
    present = {one.key for one in blocks}
    children: dict[Key, list[int]] = {}
    ready: list[int] = []
    for position, one in enumerate(blocks):
        if one.parent is None:
            ready.append(position)
        elif one.parent in present:
            children.setdefault(one.parent, []).append(position)
    order: list[Recovered] = []
    while ready:
        one = blocks[heapq.heappop(ready)]
        order.append(one)
        for child in children.get(one.key, ()):
            heapq.heappush(ready, child)
    return order


def _left(arena: Arena, tier: Tier, group: GroupId, kept: Mapping[SlotId, Key], old: OldLife) -> list[LeftLease]:
    """Leases over everything that a live process may still touch: blank slots are their one writer's, the rest the
    keeper's. Of the other slots nobody is the owner any more."""
    blank: dict[SessionId, list[SlotId]] = {}
    read: list[Key] = []
    for slot, owner in arena.owned(tier, group).items():
        if not old.live:
            arena.set_owner(tier, group, slot, None)
        elif slot in kept:
            read.append(kept[slot])
        elif arena.generation(tier, group, slot) % 2 == 0:
            blank.setdefault(old.keeper, []).append(slot)
        elif owner in old.dead:
            arena.set_owner(tier, group, slot, None)
        else:
            blank.setdefault(owner if owner in old.live else old.keeper, []).append(slot)
    leases = [LeftLease(session, group, tier, blank=tuple(slots)) for session, slots in blank.items()]
    return [*leases, LeftLease(old.keeper, group, tier, keys=tuple(read))] if read else leases


def _void_the_rest(arena: Arena, tier: Tier, group: GroupId, kept: Collection[SlotId]) -> None:
    for slot in arena.ready_slots(tier, group):
        if slot not in kept:
            arena.begin_write(tier, group, slot)


NOBODY: Final = OldLife(frozenset(), frozenset(), SessionId(0))
