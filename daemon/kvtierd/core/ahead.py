"""Slots leased ahead: blank ones that a session has before it needs them, so that its next blocks wait for no call.

Nobody else is to notice. They are few, are given out only while most of the tier is not held and nobody waits, and
whoever is short of just them waits, as for a copy in flight: they are used, or come back, soon. Ones that do not are
slots held like any others after :data:`AHEAD_NS`.

Where they would have to be made free first, they are made free and nobody's: see :class:`WindowManager`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtierd.core.ids import Tier
from kvtierd.core.policy import Policy
from kvtierd.core.tickets import Lease

AHEAD_NS: Final = 2_000_000_000
"""Clients keep them half as long."""


class Ahead:
    """Of one window group. ``slots``: how many there are, by tier."""

    __slots__ = ("_leases", "_policy", "slots")

    def __init__(self, tiers: Iterable[Tier], policy: Policy) -> None:
        self._policy = policy
        self._leases: dict[Lease, None] = {}
        """Those with such slots: few, where a cache may have thousands."""
        self.slots = dict.fromkeys(tiers, 0)

    def may_grow(self, tier: Tier, count: int, capacity: int, obtainable: int) -> bool:
        """``obtainable``: slots of the tier that nobody holds, those leased ahead among them."""
        ahead = self.slots[tier] + count
        return ahead <= self._policy.leasable_ahead(capacity) and obtainable - ahead >= capacity // 2

    def grant(self, lease: Lease) -> None:
        lease.ahead = True
        self._leases[lease] = None
        self.slots[lease.tier] += len(lease.blank)

    def settle(self, lease: Lease) -> None:
        """From now on the lease is one like any other; it has the blank slots that it was granted."""
        if lease.ahead:
            lease.ahead = False
            del self._leases[lease]
            self.slots[lease.tier] -= len(lease.blank)

    def settle_old(self, now: int) -> None:
        for lease in list(self._leases):
            if lease.granted_at + AHEAD_NS <= now:
                self.settle(lease)
