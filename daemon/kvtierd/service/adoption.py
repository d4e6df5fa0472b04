"""What a restarted daemon makes of an adopted arena: blocks, merged with those on disk, and leases to honour.

Nothing is believed that is not proven: a slot counts if its generation is even, its record is whole and names this
generation, and (in a full-attention group) its block's ancestors count as well. Every other slot's generation turns
odd, so that whoever still looks at it finds out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Final, Protocol

from kvtier.abi.slot_records import SlotContents
from kvtierd.core.ids import GroupId, Key, Label, SessionId, SlotId, Tier, Traits
from kvtierd.core.leases import LeftLease
from kvtierd.core.policy import GroupShape
from kvtierd.core.recovery import Recovered, reachable


@dataclass(slots=True, frozen=True)
class OldLife:
    """``live``: sessions of it whose processes live; ``dead``: those whose processes are known to have ended.
    ``keeper``: under whose name is held what any of them may read: the owner table names only the last of several
    readers, so all of it is, until none of them is left. An earlier life's keeper is neither live nor dead."""

    live: frozenset[SessionId]
    dead: frozenset[SessionId]
    keeper: SessionId


class KeptMemory(Protocol):
    """What is asked of an arena; see :class:`kvtierd.tiers.arena.Arena`."""

    @property
    def tiers(self) -> tuple[Tier, ...]: ...

    def contents(self, tier: Tier, group: GroupId) -> SlotContents: ...

    def ready_slots(self, tier: Tier, group: GroupId) -> list[SlotId]: ...

    def generation(self, tier: Tier, group: GroupId, slot: SlotId) -> int: ...

    def owned(self, tier: Tier, group: GroupId) -> dict[SlotId, SessionId]: ...

    def set_owners(self, tier: Tier, group: GroupId, owners: Mapping[SlotId, SessionId | None]) -> None: ...

    def begin_writes(self, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> object: ...


@dataclass(slots=True, frozen=True)
class Adopted:
    """``recovered``: as ``BlockManager.open`` wants it."""

    recovered: dict[GroupId, list[Recovered]] = field(default_factory=dict)
    left: list[LeftLease] = field(default_factory=list)

    @property
    def in_memory(self) -> int:
        return sum(one.host is not None or one.device is not None for all in self.recovered.values() for one in all)


def adopt(
    arena: KeptMemory, shapes: Sequence[GroupShape], on_disk: Mapping[GroupId, Sequence[Recovered]], old: OldLife
) -> Adopted:
    """Changes the arena so that what is not in the answer is void, and nobody's. What is keeps its old owner, or gets
    the keeper, until the lease is granted again: a daemon that dies before that must not have forgotten it."""
    adopted = Adopted()
    for shape in shapes:
        group = shape.group
        merged = _merged(_in_memory(arena, group), on_disk.get(group, ()))
        if not shape.sliding:
            order = reachable([one.key for one in merged], [one.parent for one in merged])
            merged = [merged[place] for place in order]
        adopted.recovered[group] = merged
        for tier in arena.tiers:
            kept = _kept(merged, tier)
            adopted.left.extend(_left(arena, tier, group, kept, old))
            _void_the_rest(arena, tier, group, kept)
    return adopted


def _in_memory(arena: KeptMemory, group: GroupId) -> dict[Key, Recovered]:
    """What memory holds, least recently noted first. Of two copies that do not agree on the parent the newer counts."""
    rows: list[tuple[int, Recovered]] = []
    for tier in arena.tiers:
        found = arena.contents(tier, group)
        keys, parents = map(Key, found.keys), (None if parent is None else Key(parent) for parent in found.parents)
        slots, none = map(SlotId, found.slots), repeat(None)
        on_device, on_host = (slots, none) if tier is Tier.DEVICE else (none, slots)
        blocks = map(Recovered, none, keys, parents, _traits(found), on_device, on_host)
        rows.extend(zip(found.orders, blocks, strict=True))
    rows.sort(key=itemgetter(0))
    newest: dict[Key, Recovered] = {}
    for _, one in rows:
        other = newest.pop(one.key, None)
        newest[one.key] = one if other is None or other.parent != one.parent else _both(one, other)
    return newest


def _both(one: Recovered, other: Recovered) -> Recovered:
    """The same block in two tiers."""
    device = one.device if one.device is not None else other.device
    return one._replace(device=device, host=one.host if one.host is not None else other.host)


def _traits(found: SlotContents) -> Iterator[Traits]:
    labels = (Label(event_hash) if event_hash else None for event_hash in found.event_hashes)
    return map(Traits, found.priorities, found.durations_ms, found.deadlines_ns, labels)


def _merged(in_memory: dict[Key, Recovered], disk: Sequence[Recovered]) -> list[Recovered]:
    """Least recently used first: what stands on disk alone was used before what stands in memory."""
    alone = []
    for one in disk:
        copies = in_memory.get(one.key)
        if copies is None:
            alone.append(one)
        elif copies.parent == one.parent:
            # The disk learns of a new retention later than memory, and has all of the label.
            in_memory[one.key] = copies._replace(slot=one.slot, traits=copies.traits._replace(label=one.traits.label))
        else:
            del in_memory[one.key]
            alone.append(one)
    return [*alone, *in_memory.values()]


def _kept(merged: Sequence[Recovered], tier: Tier) -> dict[SlotId, Key]:
    if tier is Tier.DEVICE:
        return {one.device: one.key for one in merged if one.device is not None}
    return {one.host: one.key for one in merged if one.host is not None}


def _left(arena: KeptMemory, tier: Tier, group: GroupId, kept: Mapping[SlotId, Key], old: OldLife) -> list[LeftLease]:
    """Leases over everything that a live process may still touch: blank slots are their one writer's, the rest the
    keeper's. Of the other slots nobody is the owner any more."""
    blank: dict[SessionId, list[SlotId]] = {}
    read: list[Key] = []
    for slot, owner in arena.owned(tier, group).items():
        if not old.live:
            arena.set_owners(tier, group, {slot: None})
        elif slot in kept:
            read.append(kept[slot])
        elif arena.generation(tier, group, slot) % 2 == 0:
            # Several may read it, and its generation is about to be that of one writer's slot.
            arena.set_owners(tier, group, {slot: old.keeper})
            blank.setdefault(old.keeper, []).append(slot)
        elif owner in old.dead:
            arena.set_owners(tier, group, {slot: None})
        else:
            blank.setdefault(owner if owner in old.live else old.keeper, []).append(slot)
    leases = [LeftLease(session, group, tier, blank=tuple(slots)) for session, slots in blank.items()]
    return [*leases, LeftLease(old.keeper, group, tier, keys=tuple(read))] if read else leases


def _void_the_rest(arena: KeptMemory, tier: Tier, group: GroupId, kept: Collection[SlotId]) -> None:
    arena.begin_writes(tier, group, set(arena.ready_slots(tier, group)).difference(kept))


NOBODY: Final = OldLife(frozenset(), frozenset(), SessionId(0))
