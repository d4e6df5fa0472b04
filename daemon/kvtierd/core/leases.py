"""Whose a lease is: every lease of a cache, by its id and by its session.

What leases hold is their groups' business (``core/group.py``); here only their ids are given, and their owners known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtierd.core.errors import ForeignLease, UnknownLease
from kvtierd.core.group import GroupState
from kvtierd.core.ids import LeaseId, SessionId, Tier
from kvtierd.core.outcome import Holder
from kvtierd.core.tickets import Lease


class Leases:
    """The leases that have not ended. Ids rise and are never used twice."""

    __slots__ = ("_last", "_of_session", "_unstamped", "live")

    def __init__(self) -> None:
        self.live: Final[dict[LeaseId, Lease]] = {}
        """The oldest first."""
        self._of_session: dict[SessionId, dict[LeaseId, None]] = {}
        self._last = 0
        self._unstamped: list[Lease] = []

    def grant(self, session: SessionId, state: GroupState, tier: Tier) -> Lease:
        """A new one, which holds nothing yet."""
        self._last += 1
        lease = Lease(LeaseId(self._last), session, state.group, tier)
        self.live[lease.id] = lease
        self._unstamped.append(lease)
        self._of_session.setdefault(session, {})[lease.id] = None
        return lease

    def stamp(self, now: int) -> None:
        """The end of a call: what was granted in it was granted ``now``."""
        for lease in self._unstamped:
            lease.granted_at = now
        self._unstamped.clear()

    def forget(self, lease: Lease) -> None:
        """It has ended, and holds nothing any more."""
        del self.live[lease.id]
        of_session = self._of_session[lease.session]
        del of_session[lease.id]
        if not of_session:
            del self._of_session[lease.session]

    def owned(self, session: SessionId, lease: LeaseId) -> Lease:
        """Raises :class:`UnknownLease`, :class:`ForeignLease`."""
        found = self.live.get(lease)
        if found is None:
            raise UnknownLease(lease)
        if found.session != session:
            raise ForeignLease(lease)
        return found

    def of(self, session: SessionId) -> list[Lease]:
        """The session's, the oldest first."""
        return [self.live[lease] for lease in self._of_session.get(session, ())]

    def count(self, session: SessionId) -> int:
        """How many the session has."""
        return len(self._of_session.get(session, ()))


def holders_of(leases: Iterable[Lease]) -> tuple[Holder, ...]:
    """Sessions by the slots that they hold, most first."""
    held: dict[SessionId, int] = {}
    for lease in leases:
        held[lease.session] = held.get(lease.session, 0) + lease.slots
    return tuple(sorted((Holder(s, n) for s, n in held.items() if n), key=lambda holder: -holder.slots))
