"""What the core tells its caller to do.

Every mutating call of the core returns one :class:`Outcome`. The caller carries out all of it in the same loop turn,
with no ``await`` between the call and the last of it, in this order: of all ``slots`` what is ``begun``, then the
``owners``, ``events``, ``moves``, of all ``slots`` what is ``filled`` and ``disowned``, and what is ``restated``, then
(what ``events`` say of) the key index, ``grants`` and ``refusals``.

What there is one of for each block is a named tuple, or a place in a column: a frozen dataclass takes four times as
long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvtierd.core.block import Block
from kvtierd.core.events import Cause, Event
from kvtierd.core.ids import GroupId, Key, LeaseId, MoveId, SessionId, SlotId, TicketId, Tier
from kvtierd.core.traits import Traits


class SlotRef(NamedTuple):
    """One slot, named so that it cannot be mistaken for another tier's or group's."""

    group: GroupId
    tier: Tier
    slot: SlotId


class Content(NamedTuple):
    """What a slot of memory holds from now on, for a restarted daemon to know. ``key`` None: nothing that anybody
    should find again, though its bytes still stand for those who hold them."""

    ref: SlotRef
    key: Key | None
    parent: Key | None
    traits: Traits


class SlotChanges:
    """What becomes of the slots of one group in one tier of memory.

    ``begun``: their bytes are, or are about to be, no block's: their generations are odd until they are filled.
    ``filled``: their bytes are these blocks'. ``disowned``: their bytes are no block's that anybody should find again,
    though they still stand for those who hold or copy them. ``restated``: they hold what they held, but the block's
    retention has changed. ``owners``: who leases them from now on; None = nobody.
    """

    __slots__ = ("begun", "disowned", "filled", "group", "owners", "restated", "tier")

    def __init__(
        self,
        group: GroupId,
        tier: Tier,
        begun: dict[SlotId, None],
        filled: dict[SlotId, Block],
        disowned: dict[SlotId, None],
        restated: dict[SlotId, Block],
        owners: dict[SlotId, SessionId | None],
    ) -> None:
        self.group = group
        self.tier = tier
        self.begun = begun
        self.filled = filled
        self.disowned = disowned
        self.restated = restated
        self.owners = owners


class MoveItem(NamedTuple):
    """One block of a move. ``dst`` is None where a disk slot is retired: its index record goes, nothing is copied.

    A record on disk keeps its ``traits``.
    """

    key: Key
    parent: Key | None
    traits: Traits
    src: SlotId
    dst: SlotId | None


@dataclass(slots=True, frozen=True)
class Move:
    """A planned copy of blocks along one edge. Its slots belong to it until its result is reported."""

    id: MoveId
    group: GroupId
    src: Tier
    dst: Tier | None
    cause: Cause
    items: tuple[MoveItem, ...]


@dataclass(slots=True, frozen=True)
class MoveResult:
    """How a move ended. Indices are into ``Move.items``; an item in neither set succeeded.

    ``failed``: the copy did not happen; source and destination hold what they held, the destination's bytes are void.
    ``corrupt``: the source's bytes failed verification and must never be served.
    """

    id: MoveId
    failed: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    queue_ns: int = 0
    copy_ns: int = 0


class RefusalReason(Enum):
    TIER_FULL = "tier_full"
    """All that nobody holds could not make room. Retry after others have released."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    TIER_OFFLINE = "tier_offline"
    TOO_SHORT = "too_short"
    """The stored prefix is, or became, shorter than the caller's minimum."""


@dataclass(slots=True, frozen=True)
class Holder:
    session: SessionId
    slots: int


@dataclass(slots=True, frozen=True)
class GroupGrant:
    """What is held of a prefix in one group: its blocks from ``first_block`` on, in ``slots`` of the tier asked for."""

    group: GroupId
    first_block: int
    lease: LeaseId | None
    slots: tuple[SlotId, ...]
    found_in: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Grant:
    """A ticket's answer.

    ``lease`` is None where nothing is held (a move, or an acquire that found nothing). ``slots`` are in the tier asked
    for. ``found_in``: for an acquire, each block's residency set at the moment of the match; ``blocks``: the length of
    the prefix held. ``groups``: for an acquire over all groups, what is held in each; ``lease``, ``slots`` and
    ``found_in`` are empty then. ``results`` for a move: True for each requested block that is READY in the tier asked
    for; ``failed``: places of those of the others whose copies failed.
    """

    ticket: TicketId
    lease: LeaseId | None
    slots: tuple[SlotId, ...] = ()
    found_in: tuple[int, ...] = ()
    matched: int = 0
    results: tuple[bool, ...] = ()
    failed: frozenset[int] = frozenset()
    blocks: int = 0
    groups: tuple[GroupGrant, ...] = ()

    @property
    def leases(self) -> tuple[LeaseId, ...]:
        """All that it leases."""
        of_groups = (part.lease for part in self.groups)
        return tuple(lease for lease in (self.lease, *of_groups) if lease is not None)


@dataclass(slots=True, frozen=True)
class Refusal:
    ticket: TicketId
    reason: RefusalReason
    tier: Tier
    wanted: int
    free: int
    holders: tuple[Holder, ...] = ()
    matched: int = 0


@dataclass(slots=True, frozen=True)
class Outcome:
    moves: tuple[Move, ...] = ()
    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    slots: tuple[SlotChanges, ...] = ()
    """One of each group and tier of memory whose slots anything becomes of."""
    events: tuple[Event, ...] = ()
