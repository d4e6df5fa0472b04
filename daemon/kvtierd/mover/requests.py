"""Requests that may wait: from the core's ticket to its answer, or to nobody's being there to hear it.

Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtierd.core.errors import InvariantViolation, UnknownLease
from kvtierd.core.ids import LeaseId, SessionId, TicketId, Tier
from kvtierd.core.manager import ChainRequest
from kvtierd.core.outcome import Grant, Outcome
from kvtierd.mover.carrying import Carrier, OpenCache
from kvtierd.mover.errors import Refused
from kvtierd.mover.tickets import Answer, Waiting, cancelled


class Requests:
    """See the module. A caller that is cancelled while it waits leaves nothing held."""

    def __init__(self, carrier: Carrier, clock: Callable[[], int]) -> None:
        self._carrier = carrier
        self._clock = clock

    async def answers(
        self,
        cache: OpenCache,
        waiting: Sequence[Waiting],
        outcome: Outcome,
        timeout_s: float | None,
    ) -> list[Answer]:
        """Of all that wait, in order; ``outcome`` may hold some of them."""
        self.begin(cache, waiting, outcome, timeout_s)
        try:
            for one in waiting:
                await one.wake
        except BaseException:
            self.withdraw(cache, waiting)
            raise
        return [one.answer for one in waiting if one.answer is not None]

    async def acquired(
        self,
        cache: OpenCache,
        session: SessionId,
        tier: Tier,
        chains: Sequence[ChainRequest],
        tickets: Sequence[TicketId],
        outcome: Outcome,
        timeout_s: float | None,
    ) -> list[Answer]:
        """Of the tickets of an acquire, one a chain."""
        waiting = [
            cache.tickets.open(ticket, session, tier, len(wanted.keys))
            for ticket, wanted in zip(tickets, chains, strict=True)
        ]
        return await self.answers(cache, waiting, outcome, timeout_s)

    def begin(self, cache: OpenCache, waiting: Sequence[Waiting], outcome: Outcome, timeout_s: float | None) -> None:
        """Applies the outcome that the tickets came with. They are answered within ``timeout_s``."""
        self._carrier.apply(cache, outcome)
        if timeout_s is not None:
            for one in waiting:
                cache.tickets.set_deadline(one, timeout_s, lambda one: self._expire(cache, one))

    def withdraw(self, cache: OpenCache, waiting: Sequence[Waiting]) -> None:
        """Nobody will hear the answers. Those given already are undone, the others prevented.

        One ticket's withdrawal may answer the next: each is looked at when its turn has come.
        """
        for one in waiting:
            if cache.removed:
                return
            match one.answer:
                case None:
                    cache.tickets.forget(one)
                    self._carrier.apply(cache, cache.manager.cancel(one.ticket, self._clock()))
                case Grant() as grant:
                    for lease in grant.leases:
                        self._return(cache, one.session, lease)

    def refuse_waiting(self, cache: OpenCache) -> None:
        """Whoever waits for the cache is told that it is over."""
        for waiting in cache.tickets.unanswered():
            if waiting.answer is None:
                cache.tickets.answer(cancelled(waiting))
                self._carrier.apply(cache, cache.manager.cancel(waiting.ticket, self._clock()))

    def _return(self, cache: OpenCache, session: SessionId, lease: LeaseId) -> None:
        try:
            outcome = cache.manager.release(session, [lease], self._clock())
        except UnknownLease:
            return  # it ended with its session: a killed client's call is cancelled too
        self._carrier.apply(cache, outcome)

    def _expire(self, cache: OpenCache, waiting: Waiting) -> None:
        self._carrier.advance(cache, lambda now: cache.manager.expire(waiting.ticket, now))


def granted(waiting: Waiting) -> Grant:
    """What a request that is answered got. Raises :class:`Refused`."""
    if not isinstance(waiting.answer, Grant):
        if waiting.answer is None:
            raise InvariantViolation(f"ticket {waiting.ticket} woke its waiter without an answer")
        raise Refused(waiting.answer)
    return waiting.answer
