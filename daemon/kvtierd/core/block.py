"""Blocks and their copies.

A block is a metadata handle identified by (window group, key), never an address. Its bytes live in copies, at most one
a tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from kvtierd.core.ids import TIERS, Key, SlotId, Traits, shared

_ORDER_BITS: Final = 52
"""So that a rank, a priority above these, stays under 2^60, beyond which a Python integer takes 16 bytes more."""
_ORDER: Final = (1 << _ORDER_BITS) - 1

_DEPTHS: Final = [0]
"""One object for all blocks of a depth: an integer of their own would be 32 bytes each."""


def _below(depth: int) -> int:
    depth += 1
    if depth == len(_DEPTHS):
        _DEPTHS.append(depth)
    return _DEPTHS[depth]


class Phase(IntEnum):
    """Where a copy is in its life; set when a move is planned. No copy at all: absent."""

    FILLING = 0
    READY = 1
    LEAVING = 2
    """READY, and it goes as soon as the copy downwards that reads it has arrived. A hit turns it back into READY; the
    copy goes on."""


FILLING: Final = Phase.FILLING
READY: Final = Phase.READY
LEAVING: Final = Phase.LEAVING


DOWNWARDS: Final = 1
UPWARDS: Final = 1 << 16
"""What a copy in flight adds to what it reads. There are fewer at once than would run from one kind into the other."""


class Copy:
    """A block's bytes in one tier.

    ``holds``: leases on it, and one more while it is pinned. ``reads``: copies in flight that read it, ``DOWNWARDS`` or
    ``UPWARDS`` for each. While either is positive its slot is neither reused nor given up. ``listed``: the candidate
    lists it stands on, as a bit set, at the rank ``ranked``.
    """

    __slots__ = ("holds", "listed", "phase", "ranked", "reads", "slot")

    def __init__(self, slot: SlotId, phase: Phase) -> None:
        self.slot = slot
        self.phase = phase
        self.ranked = 0
        self.holds = 0
        self.reads = 0
        self.listed = 0

    @property
    def valid(self) -> bool:
        """Its bytes are the block's."""
        return self.phase is not FILLING

    @property
    def still(self) -> bool:
        """Valid, and nobody holds it, reads it or is moving it."""
        return self.phase is READY and self.holds == 0 and self.reads == 0

    @property
    def sinking(self) -> bool:
        """Valid, nobody holds it, and all that reads it is one copy downwards."""
        return self.phase is READY and self.holds == 0 and self.reads == DOWNWARDS

    @property
    def readers(self) -> int:
        """How many copies in flight read it."""
        return self.reads // UPWARDS + self.reads % UPWARDS


class Block:
    """One block of a window group. There are millions, so it has no container that most do without.

    ``priority`` is effective: the highest of its own and of its children's, so that no parent ranks under a child.
    ``rank``: eviction order inside a group, lowest first: priority, then uses as the policy counts them; unique.
    ``copies``: by tier. ``residency``: the tiers whose copy is valid, as a bit set. ``claims``: fetches that matched it
    and wait for room; nothing of it is given up meanwhile. ``disk_children``: indexed children with a copy on disk, or
    on the way there. ``traits``: as they are now, ``own_priority`` among them. ``parent``: what it stands on;
    ``parent_key``: what its committer said. A root, and a block of a sliding or flat group, stands on nothing.
    ``indexed``: reachable by its key. A block that is not lives only until its last hold and copy end.
    """

    __slots__ = (
        "claims",
        "copies",
        "depth",
        "disk_children",
        "first_child",
        "indexed",
        "key",
        "next_sibling",
        "parent",
        "parent_key",
        "previous_sibling",
        "priority",
        "rank",
        "residency",
        "traits",
    )

    def __init__(self, key: Key, parent_key: Key | None, parent: Block | None, traits: Traits) -> None:
        self.key = key
        self.parent_key = parent_key
        self.parent = parent
        self.first_child: Block | None = None
        self.next_sibling: Block | None = None
        self.previous_sibling: Block | None = None
        self.traits = shared(traits)
        self.rank = traits.priority << _ORDER_BITS
        self.copies: list[Copy | None] = [None] * len(TIERS)
        self.depth: int = _below(parent.depth) if parent is not None else 0
        self.claims = 0
        self.disk_children = 0
        self.priority = traits.priority
        self.residency = 0
        self.indexed = False

    def __str__(self) -> str:
        return self.key.hex()

    def retain(self, priority: int, duration_ms: int, deadline_ns: int) -> None:
        """Other traits of its own."""
        self.traits = shared(Traits(priority, duration_ms, deadline_ns, self.traits.label))

    @property
    def own_priority(self) -> int:
        return self.traits[0]

    @property
    def order(self) -> int:
        """Its rank inside its priority."""
        return self.rank & _ORDER

    @property
    def held(self) -> bool:
        """Somebody holds a copy of it."""
        return any(copy is not None and copy.holds for copy in self.copies)

    def used(self, order: int) -> None:
        """``order``: another one than that of any block of the group."""
        self.rank = self.priority << _ORDER_BITS | order

    def reprioritise(self, priority: int) -> None:
        """Sets the effective priority."""
        self.priority = priority
        self.rank = self.rank_at(priority)

    def rank_at(self, priority: int) -> int:
        """Its rank, had it this effective priority."""
        return priority << _ORDER_BITS | self.rank & _ORDER

    @property
    def children(self) -> Iterator[Block]:
        child = self.first_child
        while child is not None:
            following = child.next_sibling
            yield child
            child = following

    def add_child(self, child: Block) -> None:
        following = self.first_child
        child.next_sibling = following
        if following is not None:
            following.previous_sibling = child
        self.first_child = child

    def remove_child(self, child: Block) -> None:
        before, after = child.previous_sibling, child.next_sibling
        if before is not None:
            before.next_sibling = after
        else:
            self.first_child = after
        if after is not None:
            after.previous_sibling = before
        child.previous_sibling = child.next_sibling = None

    def part(self) -> None:
        """From its relatives, for good."""
        self.parent = self.first_child = self.next_sibling = self.previous_sibling = None

    def ancestors(self) -> Iterator[Block]:
        """From the parent up."""
        block = self.parent
        while block is not None:
            yield block
            block = block.parent
