"""The clients: what they asked, what they were promised, and whether it is so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtierd.core.ids import Key, LeaseId, SessionId, SlotId, TicketId, Tier
from kvtierd.core.outcome import Grant, Refusal
from tests.simulation.memory import Content, Memory
from tests.simulation.violation import require

SESSIONS: Final = 3


@dataclass(slots=True, frozen=True)
class Request:
    """A call that has not been answered."""

    id: TicketId
    session: SessionId
    tier: Tier


@dataclass(slots=True, frozen=True)
class SlotsRequest(Request):
    count: int


@dataclass(slots=True, frozen=True)
class PrefixRequest(Request):
    """``found_in``: residencies of the prefix that was stored when the call was made.

    ``readable``: how much of it no failing edge was needed for.
    """

    keys: tuple[Key, ...]
    min_blocks: int
    found_in: tuple[int, ...]
    readable: int


@dataclass(slots=True, frozen=True)
class MoveRequest(Request):
    keys: tuple[Key, ...]


@dataclass(slots=True, eq=False)
class Holding:
    """A lease. ``blank``: what its client last wrote into each slot. ``blocks``: what it was told each slot holds."""

    id: LeaseId
    session: SessionId
    tier: Tier
    blank: dict[SlotId, Content] = field(default_factory=dict)
    blocks: dict[SlotId, Key] = field(default_factory=dict)


class Clients:
    """All sessions, attached or orphaned, their requests and leases. A session that ended may begin anew."""

    def __init__(self, memories: Mapping[Tier, Memory]) -> None:
        self._memories = memories
        self.requests: dict[TicketId, Request] = {}
        self.leases: dict[LeaseId, Holding] = {}
        self.sessions = tuple(SessionId(number) for number in range(1, SESSIONS + 1))
        self.orphaned: set[SessionId] = set()
        self._scribbles = 0

    # -- what they do ------------------------------------------------------------------------------------------------

    def scribble(self, holding: Holding, slot: SlotId) -> None:
        """Any client may write its blank slots whenever it likes, and one whose connection broke still does."""
        self._scribbles += 1
        self.write(holding, slot, b"scribble %d" % self._scribbles)

    def write(self, holding: Holding, slot: SlotId, content: Content) -> None:
        holding.blank[slot] = content
        self._memories[holding.tier].contents[slot] = content

    def committed(self, holding: Holding, slot: SlotId, key: Key) -> None:
        del holding.blank[slot]
        holding.blocks[slot] = key

    def forget_requests(self, session: SessionId) -> None:
        """The session's calls are cancelled: none of them may be answered."""
        for request in [request for request in self.requests.values() if request.session == session]:
            del self.requests[request.id]

    def forget(self, session: SessionId) -> None:
        self.forget_requests(session)
        self.orphaned.discard(session)
        for holding in [holding for holding in self.leases.values() if holding.session == session]:
            del self.leases[holding.id]

    def leased(self, tier: Tier) -> set[SlotId]:
        slots: set[SlotId] = set()
        for holding in self.leases.values():
            if holding.tier is tier:
                slots |= holding.blank.keys() | holding.blocks.keys()
        return slots

    # -- what they are told ------------------------------------------------------------------------------------------

    def take_answer(self, answer: Grant | Refusal) -> Request:
        request = self.requests.pop(answer.ticket, None)
        require(request is not None, f"ticket {answer.ticket} is answered, though it is answered or cancelled already")
        assert request is not None
        return request

    def take_slots(self, request: SlotsRequest, grant: Grant) -> None:
        require(grant.lease is not None, "a reservation is granted without a lease")
        require(len(set(grant.slots)) == request.count, f"{request.count} slots are asked, {grant.slots} granted")
        require(self.leased(request.tier).isdisjoint(grant.slots), "a leased slot is granted again")
        holding = self._lease(request, grant)
        memory = self._memories[request.tier]
        holding.blank = {slot: memory.contents[slot] for slot in grant.slots}

    def take_prefix(self, request: PrefixRequest, grant: Grant) -> None:
        blocks = len(grant.slots)
        stored = len(request.found_in)
        require(request.readable <= grant.matched <= stored, "an acquire's match is not what was stored")
        require(grant.found_in == request.found_in[:blocks], "an acquire says wrongly where its blocks were")
        require(request.min_blocks <= blocks <= grant.matched, f"{blocks} blocks are granted")
        require((grant.lease is None) == (blocks == 0), "a lease holds nothing, or nothing is leased")
        if grant.lease is not None:
            holding = self._lease(request, grant)
            holding.blocks = dict(zip(grant.slots, request.keys, strict=False))
            require(len(holding.blocks) == blocks, "a slot is granted for two blocks")

    def take_refusal(self, request: Request, refusal: Refusal) -> None:
        require(refusal.tier is request.tier, "a refusal names another tier")
        require(all(holder.slots > 0 for holder in refusal.holders), "a refusal names a holder of nothing")

    def verify_turn(self, request: SlotsRequest) -> None:
        """After all answers of an outcome: nobody who asked for slots of the tier earlier still waits."""
        older = [r for r in self.requests.values() if isinstance(r, SlotsRequest) and r.tier is request.tier]
        require(all(r.id > request.id for r in older), f"{request.tier}: an older reservation was overtaken")

    def _lease(self, request: Request, grant: Grant) -> Holding:
        assert grant.lease is not None
        require(grant.lease not in self.leases, f"lease {grant.lease} is given twice")
        holding = self.leases[grant.lease] = Holding(grant.lease, request.session, request.tier)
        return holding

    # -- whether it is so --------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Leased slots hold what their clients were told or wrote, and have an owner."""
        for holding in self.leases.values():
            memory = self._memories[holding.tier]
            for slot, key in holding.blocks.items():
                require(
                    memory.contents[slot] == key, f"{holding.tier} slot {slot} is leased and lost its block's bytes"
                )
                require(memory.ready(slot), f"{holding.tier} slot {slot} is leased, READY and its generation odd")
                require(memory.owners[slot] is not None, f"{holding.tier} slot {slot} is leased and has no owner")
            for slot, content in holding.blank.items():
                require(memory.contents[slot] == content, f"{holding.tier} slot {slot} is leased and was written")
                require(not memory.ready(slot), f"{holding.tier} slot {slot} is blank, its generation even")
                require(memory.owners[slot] == holding.session, f"{holding.tier} slot {slot} has another owner")
