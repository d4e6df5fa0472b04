"""What an outcome says of slots and blocks, row by row, as tests look at it."""

from collections.abc import Iterator
from typing import NamedTuple

from kvtierd.core.events import BlockChanges
from kvtierd.core.ids import GroupId, Key, SessionId, SlotId, Tier, Traits
from kvtierd.core.outcome import Outcome
from kvtierd.core.transfers import ListingRow


class SlotRef(NamedTuple):
    group: GroupId
    tier: Tier
    slot: SlotId


class Content(NamedTuple):
    """The block of a memory slot from now on; ``key`` None = none that look-ups may find."""

    ref: SlotRef
    key: Key | None
    parent: Key | None
    traits: Traits


class Ownership(NamedTuple):
    """A slot's new owner; None = nobody."""

    ref: SlotRef
    session: SessionId | None


def begun(outcome: Outcome) -> list[SlotRef]:
    return [SlotRef(its.group, its.tier, slot) for its in outcome.slots for slot in its.begun]


def owners(outcome: Outcome) -> list[Ownership]:
    return [
        Ownership(SlotRef(its.group, its.tier, slot), who) for its in outcome.slots for slot, who in its.owners.items()
    ]


def contents(outcome: Outcome) -> list[Content]:
    """Of all that are filled, and of slots that lost their block while held or copied."""
    found: list[Content] = []
    for its in outcome.slots:
        for slot, block in its.filled.items():
            found.append(Content(SlotRef(its.group, its.tier, slot), block.key, block.parent_key, block.traits))
        found += [Content(SlotRef(its.group, its.tier, slot), None, None, Traits(0)) for slot in its.disowned]
    return found


def filled(outcome: Outcome) -> list[SlotRef]:
    return [SlotRef(its.group, its.tier, slot) for its in outcome.slots for slot in its.filled]


def restated(outcome: Outcome) -> list[Content]:
    """Of slots that hold what they held, but for the block's retention."""
    return [
        Content(SlotRef(its.group, its.tier, slot), block.key, block.parent_key, block.traits)
        for its in outcome.slots
        for slot, block in its.restated.items()
    ]


def changes(of: BlockChanges) -> Iterator[ListingRow]:
    return map(ListingRow, of.keys, of.parents, of.residencies, of.priorities, of.labels, of.parent_labels)
