"""Leases of a cache by id and by session, and the tickets of waiting requests.

This module assigns lease ids and knows owners. ``core/window.py`` and ``core/acquires.py`` fill a lease when they grant
it; ``core/holds.py`` changes it afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvtierd.core.block import Block, Copy
from kvtierd.core.errors import ForeignLease, UnknownLease
from kvtierd.core.events import Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import GroupId, Key, LeaseId, SessionId, SlotId, TicketId, Tier
from kvtierd.core.outcome import SlotHolder


class LeaseTable:
    """The live leases of a cache. Ids rise and are never used twice."""

    def __init__(self) -> None:
        self.live: Final[dict[LeaseId, SlotLease]] = {}
        """Live leases, oldest first."""
        self._of_session: dict[SessionId, dict[LeaseId, None]] = {}
        self._last = 0
        self.unstamped: list[SlotLease] = []
        """Leases granted since the last :meth:`stamp`."""

    def grant(self, session: SessionId, state: GroupState, tier: Tier) -> SlotLease:
        """Creates a lease that holds nothing yet."""
        self._last += 1
        lease = SlotLease(LeaseId(self._last), session, state.group, tier)
        lease.family.append(lease)
        self.live[lease.id] = lease
        self.unstamped.append(lease)
        self._of_session.setdefault(session, {})[lease.id] = None
        return lease

    def stamp(self, now: int) -> None:
        """Sets the grant time of the leases granted in this call."""
        for lease in self.unstamped:
            lease.granted_at = now
        self.unstamped.clear()

    def forget(self, lease: SlotLease) -> None:
        """Forgets a lease that has ended and holds nothing."""
        del self.live[lease.id]
        lease.family.remove(lease)
        of_session = self._of_session[lease.session]
        del of_session[lease.id]
        if not of_session:
            del self._of_session[lease.session]

    def owned(self, session: SessionId, lease: LeaseId) -> SlotLease:
        """Returns a lease of the session. Raises :class:`UnknownLease` or :class:`ForeignLease`."""
        found = self.live.get(lease)
        if found is None:
            raise UnknownLease(lease)
        if found.session != session:
            raise ForeignLease(lease)
        return found

    def of(self, session: SessionId) -> list[SlotLease]:
        """The session's leases, oldest first."""
        return [self.live[lease] for lease in self._of_session.get(session, ())]

    def count(self, session: SessionId) -> int:
        return len(self._of_session.get(session, ()))


def holders_of(leases: Iterable[SlotLease]) -> tuple[SlotHolder, ...]:
    """Sessions with the number of slots they hold, most slots first."""
    held: dict[SessionId, int] = {}
    for lease in leases:
        held[lease.session] = held.get(lease.session, 0) + lease.slots
    return tuple(sorted((SlotHolder(s, n) for s, n in held.items() if n), key=lambda holder: -holder.slots))


@dataclass(slots=True, eq=False)
class SlotLease:
    """
    grant, join --> live --orphan_session, disown_session--> orphaned <-- restore_lease
    orphaned --reattach_session--> live;  live, orphaned --release, end_session--> ended

    A session's hold on slots of one tier: blank slots to write, blocks to read. ``disown_session`` ends a lease that
    has no blank slot.
    """

    id: LeaseId
    session: SessionId
    group: GroupId
    tier: Tier
    blank: dict[SlotId, None] = field(default_factory=dict)
    held: dict[Block, Copy] = field(default_factory=dict)
    """Blocks with their copies, in the order the lease got them."""
    trails: dict[Key, deque[Block]] = field(default_factory=dict)
    """In a sliding group: committed blocks of each chain that its window or sinks cover, by the last block's key."""
    orphaned: bool = False
    granted_at: int = 0
    """``now`` of the call that granted the lease: wall clock, nanoseconds."""
    family: list[SlotLease] = field(default_factory=list)
    """Leases that joined one another and may hold the same slots. All of them share this list."""

    @property
    def blank_slots(self) -> int:
        return len(self.blank)

    @property
    def held_blocks(self) -> int:
        return len(self.held)

    @property
    def slots(self) -> int:
        return len(self.blank) + len(self.held)

    def all_slots(self) -> set[SlotId]:
        return {*self.blank, *(copy.slot for copy in self.held.values())}

    def writers(self, slot: SlotId) -> list[SlotLease]:
        return [lease for lease in self.family if slot in lease.blank]


@dataclass(slots=True, frozen=True)
class LeftLease:
    """A lease from before a restart, whose process may still use its slots.

    ``blank``: slots that the process may be writing. ``keys``: blocks, READY in the tier, that the process may be
    reading.
    """

    session: SessionId
    group: GroupId
    tier: Tier
    blank: tuple[SlotId, ...] = ()
    keys: tuple[Key, ...] = ()


@dataclass(slots=True, eq=False)
class ReserveTicket:
    """waiting --slots free--> granted;  waiting --expire, no room--> refused;  waiting --withdraw--> gone unanswered

    A request for blank slots, all or nothing.
    """

    id: TicketId
    session: SessionId
    tier: Tier
    count: int
    after: Key | None = None
    """The block that new blocks will follow."""


@dataclass(slots=True, eq=False)
class FetchTicket:
    """Wants blocks READY in a tier: a move, or one group's part of an acquire (``core/acquires.py``).

    waiting (blocks claimed, in a queue) --slots--> taken (``copies``, of which ``pending`` are FILLING) --> answered.
    """

    id: TicketId
    session: SessionId
    tier: Tier
    blocks: list[Block]
    hold: bool = False
    """Whether this is a part of an acquire, which holds its copies and answers for it."""
    alone: bool = False
    """Whether this is the only part of its acquire, so that it need not wait for other parts."""
    found_in: tuple[int, ...] = ()
    wanted: tuple[Block | None, ...] = ()
    """A move's blocks in the order asked; None for a key that is not indexed."""
    cause: Cause | None = None
    """The cause of a move that is not by call."""
    waiting: bool = True
    copies: list[Copy] = field(default_factory=list)
    failed: set[Block] = field(default_factory=set)
    """Blocks whose copies for this request have failed."""
    pending: int = 0
    able: bool = False
    """Whether the slots are free, for a part at the head of its queue."""
    room: int | None = None
    """Slots that a part at the head of its queue can have, if no copy in flight will free more."""


Ticket = ReserveTicket | FetchTicket
