"""Requests that wait for the core's answer. Loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import CacheId, SessionId, TicketId, Tier
from kvtierd.core.outcome import Grant, Refusal, RefusalReason

Answer = Grant | Refusal


@dataclass(slots=True, eq=False)
class Waiting:
    """One ticket and its waiter.

    ``answer`` is set in the turn in which the core gives it, even if the waiter has gone. ``wake`` tells the waiter to
    look, and is cancelled together with it.
    """

    ticket: TicketId
    session: SessionId
    tier: Tier
    wanted: int
    wake: asyncio.Future[None]
    answer: Answer | None = None
    deadline: asyncio.TimerHandle | None = None


class Tickets:
    """The unanswered tickets of one cache."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[TicketId, Waiting] = {}

    def open(self, ticket: TicketId, session: SessionId, tier: Tier, wanted: int) -> Waiting:
        """To be called before the outcome that may hold the ticket's answer is applied."""
        waiting = Waiting(ticket, session, tier, wanted, self._loop.create_future())
        self._waiting[ticket] = waiting
        return waiting

    def set_deadline(self, waiting: Waiting, seconds: float, expire: Callable[[Waiting], None]) -> None:
        if waiting.answer is None:
            waiting.deadline = self._loop.call_later(max(0.0, seconds), expire, waiting)

    def answer(self, answer: Answer) -> None:
        """The core answers each ticket once, and none that was withdrawn."""
        waiting = self._waiting.get(answer.ticket)
        if waiting is None:
            raise InvariantViolation(f"the core answers ticket {answer.ticket}, which has no waiter")
        waiting.answer = answer
        self.forget(waiting)
        if not waiting.wake.done():
            waiting.wake.set_result(None)

    def forget(self, waiting: Waiting) -> None:
        """No answer is expected any more."""
        self._waiting.pop(waiting.ticket, None)
        if waiting.deadline is not None:
            waiting.deadline.cancel()

    def unanswered(self, session: SessionId | None = None) -> list[Waiting]:
        """Of one session, or of all."""
        return [w for w in self._waiting.values() if session is None or w.session == session]


def cancelled(waiting: Waiting) -> Refusal:
    """The answer to a ticket that is withdrawn while its caller still waits."""
    return Refusal(waiting.ticket, RefusalReason.CANCELLED, waiting.tier, waiting.wanted, free=0)


class MoverError(Exception):
    """Everything the mover raises on its own account; the core's errors pass through it."""


class Refused(MoverError):
    """The core's answer to a ticket was no."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.tier}: {refusal.reason.value} ({refusal.wanted} wanted, {refusal.free} free)")
        self.refusal = refusal


class UnknownCache(MoverError):
    """The cache is not open, or is being closed."""

    def __init__(self, cache: CacheId) -> None:
        super().__init__(f"cache {cache} is not open")
        self.cache = cache


class ShuttingDown(MoverError):
    """The daemon takes no new requests."""
