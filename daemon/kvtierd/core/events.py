"""Events: the changes of blocks, in one order.

Type and field names are TensorRT-LLM's (created, stored, removed, updated), with ``cleared`` besides. An event carries
many blocks of one type, cache, group and cause. ``stored`` and ``updated`` carry each block's residency AFTER the
change, so that applying an event twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvtier.abi.words import Cause as Cause  # noqa: PLC0414  re-exported
from kvtier.abi.words import EventType as EventType  # noqa: PLC0414  re-exported
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, Label, Tier

STORED: Final = EventType.STORED
REMOVED: Final = EventType.REMOVED
UPDATED: Final = EventType.UPDATED

COMMIT: Final = Cause.COMMIT
WRITE_THROUGH: Final = Cause.WRITE_THROUGH
CAPACITY: Final = Cause.CAPACITY
WATERMARK: Final = Cause.WATERMARK
DEMAND: Final = Cause.DEMAND
RECOVERED: Final = Cause.RECOVERED


@dataclass(slots=True, eq=False)
class BlockChanges:
    """The blocks of an event after a change, in columns, one place a block. A removed block has residency 0. A stored
    block with a parent object has a parent label, so no block of a sliding or flat group has one."""

    keys: list[Key] = field(default_factory=list)
    parents: list[Key | None] = field(default_factory=list)
    residencies: list[int] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    labels: list[Label | None] = field(default_factory=list)
    parent_labels: list[Label | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)


NO_CHANGES: Final = BlockChanges()


@dataclass(slots=True, frozen=True)
class BlockEvent:
    """An event of a window group. ``time_ns``: the wall clock that the core's caller passed in.

    ``moved_from`` … ``copy_ns`` are set if a move caused the event; ``moved_from`` alone if blocks only left that tier.
    ``capacity``: the group's slots by tier, highest tier first; only for ``created``.
    """

    id: EventId
    type: EventType
    cause: Cause
    cache: CacheId
    group: GroupId
    time_ns: int
    blocks: BlockChanges = NO_CHANGES
    moved_from: Tier | None = None
    moved_to: Tier | None = None
    moved_bytes: int = 0
    queue_ns: int = 0
    copy_ns: int = 0
    capacity: tuple[tuple[Tier, int], ...] = ()


class EventSequencer:
    """Assigns event ids, contiguous in an epoch. All caches of a daemon share one sequencer."""

    def __init__(self, last: int = 0) -> None:
        self._last = last

    @property
    def last(self) -> EventId:
        return EventId(self._last)

    def take(self) -> EventId:
        self._last += 1
        return EventId(self._last)
