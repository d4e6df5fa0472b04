"""What the block manager's verbs take and what they answer at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from kvtierd.core.flights import EdgeRecord
from kvtierd.core.ids import GroupId, Key, SessionId, SlotId, Tier
from kvtierd.core.policy import Edge
from kvtierd.core.slots import SlotState
from kvtierd.core.traits import Label


class BlockResult(IntEnum):
    """One block's answer. Values are the wire's (``kvtier.v1.BlockResult``)."""

    OK = 0
    EXISTS = 1
    PARENT_MISSING = 2
    NOT_FOUND = 3
    HELD = 4
    NO_ROOM = 5
    FAILED = 6
    PARENT_CONFLICT = 7
    NOT_READY = 8
    OVER_CAP = 9


OK: Final = BlockResult.OK
EXISTS: Final = BlockResult.EXISTS
PARENT_MISSING: Final = BlockResult.PARENT_MISSING
PARENT_CONFLICT: Final = BlockResult.PARENT_CONFLICT


@dataclass(slots=True, frozen=True)
class Match:
    """The longest stored prefix: its length and each block's residency set."""

    blocks: int
    residency: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class GroupSpan:
    """What a group holds of a match over several: its blocks from ``first_block`` on, each with its residency set."""

    group: GroupId
    first_block: int
    residency: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class AcrossMatch:
    """The longest prefix that all groups can serve together, and what each has of it."""

    blocks: int
    groups: tuple[GroupSpan, ...]


@dataclass(slots=True, frozen=True)
class Location:
    """``slots``: by tier; None where the residency set lacks it."""

    residency: int
    slots: tuple[SlotId | None, SlotId | None, SlotId | None]


@dataclass(slots=True, frozen=True)
class ListingRow:
    key: Key
    parent: Key | None
    residency: int
    priority: int
    label: Label | None = None
    parent_label: Label | None = None
    pinned: int = 0
    """The tiers where it is pinned, as a bit set."""


@dataclass(slots=True, frozen=True)
class Listing:
    """``next_page``: where to go on; 0 = nowhere."""

    rows: tuple[ListingRow, ...]
    next_page: int


class CommitItem(NamedTuple):
    """``duration_ms``: how long it keeps its priority, counted from its release; 0 = for ever."""

    slot: SlotId
    key: Key
    parent: Key | None
    priority: int
    duration_ms: int = 0
    label: Label | None = None


@dataclass(slots=True, frozen=True)
class ChainRequest:
    """Keys of a chain, the root first. Fewer than ``min_blocks`` of it are of no use.

    ``priorities``: new ones for what is found of it, one a key, or none to leave its retention as it is.
    ``durations_ms``: to go with them, one a key; none: for ever.
    """

    keys: Sequence[Key]
    min_blocks: int = 0
    priorities: Sequence[int] = ()
    durations_ms: Sequence[int] = ()


@dataclass(slots=True, frozen=True)
class DropReport:
    """``dropped``: blocks gone, subtrees included."""

    results: tuple[BlockResult, ...]
    dropped: int


@dataclass(slots=True, frozen=True)
class ResetReport:
    """``kept``: needed by somebody, or what such blocks stand on. ``following``: where to go on, None = nowhere."""

    dropped: int
    kept: int
    following: tuple[GroupId, int] | None = None


@dataclass(slots=True, frozen=True)
class TierCount:
    """Slots by state, which sum to ``capacity``; ``held``: under a lease or a fetch, blank and orphaned ones
    included; ``clean``: free, or with a block that is valid in a lower tier, too."""

    capacity: int
    states: Mapping[SlotState, int]
    held: int
    clean: int


@dataclass(slots=True, frozen=True)
class GroupCounts:
    """One window group. ``pinned``: slots. ``hits``: blocks, by the tier that they were found in at the match."""

    blocks: int
    tiers: Mapping[Tier, TierCount]
    pinned: Mapping[Tier, int]
    hits: Mapping[Tier, int]
    misses: int
    stored: int
    removed: int


@dataclass(slots=True, frozen=True)
class ManagerStats:
    """``held_by``: slots by session. Sums over the groups of the cache, but a block that a request over all groups did
    not find is one miss. Orphaned leases are among the ``leases``. ``disk_lost``: the disk tier is out of service."""

    blocks: int
    tiers: Mapping[Tier, TierCount]
    edges: Mapping[Edge, EdgeRecord]
    hits: Mapping[Tier, int]
    misses: int
    stored: int
    removed: int
    waiting: int
    held_by: Mapping[SessionId, int]
    groups: Mapping[GroupId, GroupCounts]
    leases: int
    orphaned_leases: int
    disk_lost: bool
