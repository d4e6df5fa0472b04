"""What one transaction of the index is to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtierd.core.ids import Key, SlotId
from kvtierd.core.traits import Traits
from kvtierd.tiers.disk.records import Counters


@dataclass(slots=True)
class Changes:
    """What one transaction does to one group, deletes first."""

    deletes: list[Key] = field(default_factory=list)
    puts: list[tuple[Key, bytes]] = field(default_factory=list)
    restate: list[tuple[Key, Traits]] = field(default_factory=list)
    touches: list[bytes] = field(default_factory=list)
    recency: Counters | None = None
    """Replaces the recency and all touches so far; ``touches`` come after it."""
    quarantine: list[SlotId] = field(default_factory=list)
    lift: list[SlotId] = field(default_factory=list)
    """Slots that hold a new block now, whatever was found in them before."""
