"""Blocks and their copies.

A block is a metadata handle identified by (window group, key), never an address. Its bytes live in copies, at most one
a tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING

from kvtierd.core.ids import BlockId, Key, SlotId, Tier

if TYPE_CHECKING:
    from kvtierd.core.tickets import FetchTicket


class Phase(IntEnum):
    """Where a copy is in its life; set when a move is planned. No copy at all: absent."""

    FILLING = 0
    READY = 1
    LEAVING = 2
    """READY, and it goes as soon as the copy downwards that reads it has arrived. A hit turns it back into READY; the
    copy goes on."""


class Copy:
    """A block's bytes in one tier.

    ``holds``: leases on it. ``reads``: copies in flight that read it. While either is positive its slot is neither
    reused nor given up. ``waiters``: fetches waiting for it to become READY.
    ``listed``: the candidate lists it stands on, as a bit set.
    """

    __slots__ = ("holds", "listed", "phase", "reads", "sinks", "slot", "waiters")

    def __init__(self, slot: SlotId, phase: Phase) -> None:
        self.slot = slot
        self.phase = phase
        self.holds = 0
        self.reads = 0
        self.sinks = 0
        self.listed = 0
        self.waiters: list[FetchTicket] = []

    @property
    def valid(self) -> bool:
        """Its bytes are the block's."""
        return self.phase is not Phase.FILLING

    @property
    def still(self) -> bool:
        """Valid, and nobody holds it, reads it or is moving it."""
        return self.phase is Phase.READY and self.holds == 0 and self.reads == 0

    @property
    def sinking(self) -> bool:
        """Valid, nobody holds it, and all that reads it is one copy downwards."""
        return self.phase is Phase.READY and self.holds == 0 and self.reads == self.sinks == 1


class Block:
    """One block of a window group.

    ``priority`` is effective: the highest of its own and of its children's, so that no parent ranks under a child.
    ``claims``: fetches that matched it and wait for room; nothing of it is given up meanwhile.
    ``disk_children``: indexed children with a copy on disk, or on the way there.
    ``duration_ms`` and ``deadline_ns``: of its own priority; 0 = for ever, and 0 = its clock stands.
    ``indexed``: reachable by its key. A block that is not lives only until its last hold and copy end.
    """

    __slots__ = (
        "child_priorities",
        "children",
        "claims",
        "copies",
        "deadline_ns",
        "depth",
        "disk_children",
        "duration_ms",
        "id",
        "indexed",
        "key",
        "last_use",
        "own_priority",
        "parent",
        "priority",
    )

    def __init__(self, id: BlockId, key: Key, parent: Block | None, priority: int) -> None:
        self.id = id
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: dict[Block, None] = {}
        self.own_priority = priority
        self.duration_ms = 0
        self.deadline_ns = 0
        self.priority = priority
        self.child_priorities: dict[int, int] = {}
        self.last_use = 0
        self.copies: list[Copy | None] = [None, None, None]
        self.claims = 0
        self.disk_children = 0
        self.indexed = False

    @property
    def residency(self) -> int:
        """The tiers whose copy is valid, as a bit set."""
        mask = 0
        bit = 1
        for copy in self.copies:
            if copy is not None and copy.phase is not Phase.FILLING:
                mask |= bit
            bit <<= 1
        return mask

    @property
    def parent_key(self) -> Key | None:
        return self.parent.key if self.parent is not None else None

    def rank(self) -> int:
        """Eviction order, lowest first: priority, then last use. Comparable only inside a group."""
        return self.priority << 56 | self.last_use

    def ancestors(self) -> Iterator[Block]:
        """From the parent up."""
        block = self.parent
        while block is not None:
            yield block
            block = block.parent

    def copy(self, tier: Tier) -> Copy | None:
        return self.copies[tier]
