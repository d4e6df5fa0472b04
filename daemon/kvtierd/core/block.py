"""Blocks and their copies.

A block is a metadata handle identified by (window group, key), never an address. Its bytes live in copies, at most one
copy a tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvtierd.core.ids import TIERS, Key, SlotId, Traits, shared

_ORDER_BITS: Final = 52
"""Bits of a rank below the priority. A rank stays under 2^60: a larger Python integer takes 16 bytes more."""
_ORDER: Final = (1 << _ORDER_BITS) - 1

_DEPTHS: Final = [0]
"""Integer objects by depth, shared by the blocks of a depth: an own object would cost 32 bytes a block."""


def _below(depth: int) -> int:
    depth += 1
    if depth == len(_DEPTHS):
        _DEPTHS.append(depth)
    return _DEPTHS[depth]


class Phase(IntEnum):
    """The phase of a copy; FILLING and LEAVING are set when a move is planned. An absent copy has no phase."""

    FILLING = 0
    READY = 1
    LEAVING = 2
    """Valid, and dropped when the copy downwards that reads it has arrived. A hit makes it READY again; the copy
    downwards goes on."""


FILLING: Final = Phase.FILLING
READY: Final = Phase.READY
LEAVING: Final = Phase.LEAVING

DOWNWARDS: Final = 1
UPWARDS: Final = 1 << 16
"""A copy in flight adds one of these to the ``reads`` of its source. Fewer than ``UPWARDS`` copies read one source at a
time, so the two counts never mix."""


class Copy:
    """
    absent --start_copy--> FILLING --arrive--> READY --leave--> LEAVING
      | ^                     |                ^ | ^              | |
      | +---abandon, detach---+                | | +-----stay-----+ |
      +---------insert, recover----------------+ +------detach------+--> absent

    A block's bytes in one tier. Arrows name methods of ``GroupState``; ``recover`` is in ``core/recovery.py``. A
    detached copy lives until its last hold, read and fill end. While ``holds`` or ``reads`` is positive, its slot is
    neither reused nor given up.
    """

    __slots__ = ("holds", "listed", "phase", "ranked", "reads", "slot")

    def __init__(self, slot: SlotId, phase: Phase) -> None:
        self.slot = slot
        self.phase = phase
        self.ranked = 0
        """Rank at which the copy stands on its candidate lists."""
        self.holds = 0
        """Number of leases and fetches that hold the copy, plus one while it is pinned."""
        self.reads = 0
        """Copies in flight that read this copy: the sum of ``DOWNWARDS`` or ``UPWARDS`` for each."""
        self.listed = 0
        """Candidate lists that the copy stands on, as a bit set."""

    @property
    def valid(self) -> bool:
        """Whether the bytes are the block's."""
        return self.phase is not FILLING

    @property
    def still(self) -> bool:
        """Whether the copy is READY, unheld and unread."""
        return self.phase is READY and self.holds == 0 and self.reads == 0

    @property
    def demoting(self) -> bool:
        """Whether the copy is READY, unheld and read by exactly one copy downwards."""
        return self.phase is READY and self.holds == 0 and self.reads == DOWNWARDS

    @property
    def readers(self) -> int:
        """Number of copies in flight that read this copy."""
        return self.reads // UPWARDS + self.reads % UPWARDS


@dataclass(slots=True, frozen=True, eq=False)
class Use:
    """The last use of some blocks, shared by all that a request used alike: their ``number``th, ``at`` nanoseconds.

    ``kind``: by the number and by the length of the request, for :class:`kvtierd.core.returns.ReturnTimes`.
    """

    number: int
    kind: int
    at: int


class Block:
    """
    insert, recover --> indexed --remove--> unindexed --last hold, read and fill end--> gone
                          |
                          +--last valid copy lost--> hollow --descendants removed--> unindexed

    One block of a window group. A hollow block counts as absent: ``core/removal.py`` keeps it indexed until its
    descendants have gone. There are millions of blocks, so a block has no container that most blocks do without.
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
        "use",
    )

    def __init__(self, key: Key, parent_key: Key | None, parent: Block | None, traits: Traits) -> None:
        self.key = key
        self.parent_key = parent_key
        """The parent that the committer named."""
        self.parent = parent
        """None for a root, and for every block of a sliding or flat group."""
        self.first_child: Block | None = None
        self.next_sibling: Block | None = None
        self.previous_sibling: Block | None = None
        self.traits = shared(traits)
        """Current traits, ``own_priority`` included."""
        self.rank = traits.priority << _ORDER_BITS
        """Eviction order in the group, lowest first: priority, then uses as the policy counts them. Unique."""
        self.copies: list[Copy | None] = [None] * len(TIERS)
        self.depth: int = _below(parent.depth) if parent is not None else 0
        self.claims = 0
        """Fetches that matched the block and wait for room. A claimed block gives up no copy."""
        self.disk_children = 0
        """Number of indexed children with a copy on disk or on the way there."""
        self.priority = traits.priority
        """Effective priority: the highest of the own and the children's, so no parent ranks under a child."""
        self.residency = 0
        """Tiers whose copy is valid, as a bit set."""
        self.indexed = False
        self.use: Use | None = None
        """The last use by a request, as far as it is known."""

    def __str__(self) -> str:
        return self.key.hex()

    def retain(self, priority: int, duration_ms: int, deadline_ns: int) -> None:
        """Replaces the block's own priority, duration and deadline. The label stays."""
        self.traits = shared(Traits(priority, duration_ms, deadline_ns, self.traits.label))

    @property
    def hollow(self) -> bool:
        """Whether no copy is valid: the block is about to go, or gone."""
        return self.residency == 0

    @property
    def own_priority(self) -> int:
        return self.traits[0]

    @property
    def order(self) -> int:
        """The rank without the priority."""
        return self.rank & _ORDER

    @property
    def held(self) -> bool:
        return any(copy is not None and copy.holds for copy in self.copies)

    def used(self, order: int) -> None:
        """Sets the order inside the priority. ``order``: unique among the blocks of the group."""
        self.rank = self.priority << _ORDER_BITS | order

    def reprioritise(self, priority: int) -> None:
        self.priority = priority
        self.used(self.order)

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
        """Unlinks the block from its relatives, for good."""
        self.parent = self.first_child = self.next_sibling = self.previous_sibling = None

    def ancestors(self) -> Iterator[Block]:
        """Yields the ancestors, the parent first."""
        block = self.parent
        while block is not None:
            yield block
            block = block.parent
