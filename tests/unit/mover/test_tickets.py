"""One answer a ticket, and no timer left of it."""

import asyncio

import pytest

from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import SessionId, TicketId, Tier
from kvtierd.core.outcome import Grant
from kvtierd.mover.tickets import Tickets, cancelled


async def test_an_answer_wakes_the_waiter_and_ends_its_deadline() -> None:
    tickets = Tickets(asyncio.get_running_loop())
    waiting = tickets.open(TicketId(1), SessionId(1), Tier.HOST, 2)
    tickets.set_deadline(waiting, 60.0, lambda waiting: pytest.fail("the deadline of an answered ticket"))
    grant = Grant(TicketId(1), None)
    tickets.answer(grant)
    await waiting.wake
    assert waiting.answer is grant
    assert waiting.deadline is not None and waiting.deadline.cancelled()
    assert tickets.unanswered() == []


async def test_a_second_answer_is_the_cores_bug() -> None:
    tickets = Tickets(asyncio.get_running_loop())
    waiting = tickets.open(TicketId(1), SessionId(1), Tier.HOST, 2)
    tickets.answer(cancelled(waiting))
    with pytest.raises(InvariantViolation):
        tickets.answer(Grant(TicketId(1), None))
