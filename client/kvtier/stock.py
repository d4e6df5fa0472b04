"""Blank slots that a client has before it needs them: a commit brings those of the next put along.

So a client that puts again and again makes one call a put. The daemon decides whether it may have them; here is decided
how many are asked for, who gets them, and when they go back.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvtier.lease import WriteLease
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.cache import Cache

IDLE_S: Final = 1.0
"""Nothing is kept for longer than that without a put, and nothing is asked for by puts that are further apart."""
SHARE: Final = 16
"""At most one slot of so many of a tier is kept."""

Place = tuple[int, Tier]
"""Window group and tier."""


class Stock:
    """Of one cache. On the client's loop only, as everything that takes and gives back leases."""

    def __init__(self, give_back: Callable[[Sequence[WriteLease]], None]) -> None:
        """``give_back`` releases leases and does not wait for it."""
        self._give_back = give_back
        self._leases: defaultdict[Place, list[WriteLease]] = defaultdict(list)
        self._asked: Counter[Place] = Counter()
        self._put_at: dict[Place, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, cache: Cache, tier: Tier, count: int, *, exactly: bool = False) -> WriteLease | None:
        """A lease with enough blank slots, now the caller's. Where there is none, all that there is there goes back:
        the caller reserves, and must not be short of what is kept here."""
        place = cache.group, tier
        leases = self._leases[place]
        live = [lease for lease in leases if lease.binding.session == cache.session_number]
        fitting = [lease for lease in live if len(lease) == count or (len(lease) > count and not exactly)]
        if not fitting:
            self._return(self._leases.pop(place))
            return None
        found = min(fitting, key=len)
        leases.remove(found)
        return found

    def ask(self, cache: Cache, tier: Tier, count: int) -> int:
        """How many slots the commit of a put of so many blocks asks for; what comes of it is told to :meth:`add`."""
        place, now = (cache.group, tier), asyncio.get_running_loop().time()
        before, self._put_at[place] = self._put_at.get(place), now
        kept = sum(map(len, self._leases[place])) + self._asked[place]
        if before is None or now - before > IDLE_S or kept + count > cache.slots(tier) // SHARE:
            return 0
        self._asked[place] += count
        return count

    def add(self, cache: Cache, tier: Tier, asked: int, lease: WriteLease | None) -> None:
        """What was asked for was granted, or not."""
        place = cache.group, tier
        self._asked[place] -= asked
        if lease is not None:
            self._leases[place].append(lease)
            if self._timer is None:
                self._look_again(IDLE_S)

    def clear(self) -> list[WriteLease]:
        """All that there is, now the caller's."""
        leases = [lease for kept in self._leases.values() for lease in kept]
        self._leases.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return leases

    def _look_again(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """What no put has used for a while goes back."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        idle = [place for place in self._leases if now - self._put_at[place] >= IDLE_S]
        self._return([lease for place in idle for lease in self._leases.pop(place)])
        due = [self._put_at[place] + IDLE_S - now for place, kept in self._leases.items() if kept]
        if due:
            self._look_again(min(due))

    def _return(self, leases: Sequence[WriteLease]) -> None:
        if leases:
            self._give_back(leases)
