"""Requests over all window groups of a cache, or over one sliding group: one prefix, whose blocks every group needs
READY and held, or nothing in any group.

A request has a part in each group's queue, which waits there like any other request. The request takes its slots in all
groups in one step, when all its parts head their queues and have room. If a group cannot make room or loses a block, or
a copy fails, the whole request is matched again for a shorter prefix: a sliding group needs other blocks for a shorter
prefix, not fewer of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.abi.attention import NOTHING, Needed
from kvtierd.core.block import Block
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Key, SessionId, TicketId, Tier
from kvtierd.core.leases import FetchTicket, Lease, Turn
from kvtierd.core.lookup import Cover, Limit, Usable, longest, match
from kvtierd.core.outcome import Grant, GroupGrant, Recorder, Refusal, RefusalReason
from kvtierd.core.retention import pairs
from kvtierd.core.transfers import ChainRequest
from kvtierd.core.window import WindowManager


class NewLease(Protocol):
    def __call__(self, session: SessionId, state: GroupState, tier: Tier, /) -> Lease: ...


class MakeRefusal(Protocol):
    def __call__(
        self, ticket: AcrossTicket, reason: RefusalReason, wanted: int, free: int, matched: int, /
    ) -> Refusal: ...


@dataclass(slots=True, eq=False)
class Part:
    """One group's part of a request: the blocks that the prefix needs there."""

    window: WindowManager
    fetch: FetchTicket
    turn: Turn
    needed: Needed = NOTHING


@dataclass(slots=True, eq=False)
class AcrossTicket:
    """
    waiting --room in all parts--> filling --all copies ended--> answered;  filling --a copy failed--> waiting
    waiting, filling --expire, refuse--> answered;  waiting, filling --withdraw--> gone unanswered

    A request with a part in each group. ``length``: of the prefix that it now asks for. ``spoiled``: blocks whose
    copies for it have failed; they are not tried again. ``alone``: the request is over one group, so its grant names no
    groups.
    """

    id: TicketId
    session: SessionId
    tier: Tier
    keys: Sequence[Key]
    min_blocks: int
    parts: tuple[Part, ...]
    alone: bool = False
    length: int = 0
    matched: int = 0
    spoiled: set[Block] = field(default_factory=set)

    @property
    def waiting(self) -> bool:
        """Whether its blocks are claimed and it queues for room. Afterwards it holds its blocks, and copies fill its
        slots."""
        return self.parts[0].fetch.waiting

    @property
    def least(self) -> int:
        """Least length of a prefix that is an answer."""
        return max(self.min_blocks, 1)


class AcrossGroups:
    """All multi-group requests of a cache. :meth:`advance` is called until no request can go on."""

    def __init__(
        self, windows: Sequence[WindowManager], recorder: Recorder, new_lease: NewLease, refusal: MakeRefusal
    ) -> None:
        self._windows = windows
        self._recorder = recorder
        self._new_lease = new_lease
        self._refusal = refusal
        self.tickets: dict[TicketId, AcrossTicket] = {}
        self._removed = 0

    @property
    def waiting(self) -> int:
        return sum(ticket.waiting for ticket in self.tickets.values())

    # -- requests ----------------------------------------------------------------------------------------------------

    def match(
        self, id: TicketId, session: SessionId, window: WindowManager | None, tier: Tier, chain: ChainRequest, now: int
    ) -> AcrossTicket:
        """Claims the blocks that the longest usable prefix needs in every group, or in ``window`` alone. :meth:`queue`
        makes room for them later."""
        parts = []
        for each in self._windows if window is None else (window,):
            turn = Turn()
            parts.append(Part(each, FetchTicket(id, session, tier, True, [], turn=turn), turn))
        ticket = AcrossTicket(id, session, tier, chain.keys, chain.min_blocks, tuple(parts), alone=window is not None)
        self.tickets[id] = ticket
        ticket.matched, covers = self._match(ticket, len(chain.keys), self._readable(ticket, now))
        self._claim(ticket, ticket.matched, covers)
        if not chain.counted:
            parts[0].window.uses.asked(len(chain.keys), ticket.matched)
        for part in ticket.parts:
            part.window.uses.acquired(part.fetch.blocks, part.fetch.found_in)
            part.window.retain(part.fetch.blocks, part.needed.pick(pairs(chain.priorities, chain.durations_ms)))
        return ticket

    def queue(self, ticket: AcrossTicket, now: int) -> None:
        """Shortens the request to the prefix that the tier could hold at best in every group, then queues or answers
        it."""
        tier = ticket.tier

        def unheld(block: Block) -> bool:
            copy = block.copies[tier]
            return copy is None or copy.holds == 0

        def within(covers: Sequence[Cover]) -> list[Limit]:
            pairs = zip(covers, ticket.parts, strict=True)
            return [cover.affordable(unheld, part.window.obtainable(tier)) for cover, part in pairs]

        if ticket.matched == 0 and ticket.min_blocks == 0:
            self._grant(ticket)
        elif ticket.matched < ticket.least:
            self.refuse(ticket, RefusalReason.TOO_SHORT)
        elif all(sum(map(unheld, part.fetch.blocks)) <= part.window.obtainable(tier) for part in ticket.parts):
            self._enqueue(ticket)
        else:
            self._shorten(ticket, now, RefusalReason.TIER_FULL, within)

    def expire(self, ticket: AcrossTicket) -> None:
        """Ends a request at its deadline: grants the longest prefix that is READY now, or refuses."""

        def ready(state: GroupState, block: Block) -> bool:
            copy = block.copies[ticket.tier]
            return copy is not None and copy.valid and not state.spoiled(block)

        length, covers = self._match(ticket, ticket.length, ready)
        if length < ticket.least:
            self.refuse(ticket, RefusalReason.DEADLINE)
            return
        self._claim(ticket, length, covers)
        for part in ticket.parts:
            part.window.take(part.fetch)
        self._grant(ticket)

    def withdraw(self, ticket: AcrossTicket) -> None:
        """Withdraws a request whose caller has gone. Drops its claims and holds, and gives no answer."""
        del self.tickets[ticket.id]
        self._let_go(ticket)

    # -- progress ----------------------------------------------------------------------------------------------------

    def refresh(self, now: int) -> None:
        """Matches waiting requests again that have lost a block."""
        removed = sum(window.state.removed for window in self._windows)
        losing = any(window.state.lost or window.state.losing for window in self._windows)
        if removed == self._removed and not losing:
            return
        self._removed = removed
        for ticket in list(self.tickets.values()):
            parts = ticket.parts if ticket.waiting else ()
            if any(part.window.lost(block, ticket.tier) for part in parts for block in part.fetch.blocks):
                self._shorten(ticket, now, RefusalReason.TOO_SHORT)

    def advance(self, now: int) -> bool:
        """Takes the next step that the queues, which have been served, allow. False if there is none."""
        return any(self._advance(ticket, now) for ticket in list(self.tickets.values()))

    def _advance(self, ticket: AcrossTicket, now: int) -> bool:
        if not ticket.waiting:
            if any(part.fetch.pending for part in ticket.parts):
                return False
            self._finish(ticket, now)
            return True
        heads = [part for part in ticket.parts if part.window.heads(part.fetch)]
        if any(part.turn.room is not None for part in heads):
            self._make_do(ticket, now)
            return True
        if len(heads) == len(ticket.parts) and all(part.turn.able for part in heads):
            for part in ticket.parts:
                part.window.take(part.fetch)
            return True
        return False

    def _make_do(self, ticket: AcrossTicket, now: int) -> None:
        """Shortens a request that has a part for which no more room can come."""

        def missing(block: Block) -> bool:
            return block.copies[ticket.tier] is None

        def within(covers: Sequence[Cover]) -> list[Limit]:
            return [
                cover.affordable(missing, max(0, part.turn.room))
                for cover, part in zip(covers, ticket.parts, strict=True)
                if part.turn.room is not None and part.window.heads(part.fetch)
            ]

        self._shorten(ticket, now, RefusalReason.TIER_FULL, within)

    def _finish(self, ticket: AcrossTicket, now: int) -> None:
        """Answers a request whose copies have all ended, or matches it again if a copy failed."""
        failed = {
            block
            for part in ticket.parts
            for block, copy in zip(part.fetch.blocks, part.fetch.copies, strict=True)
            if not part.window.state.stands(block, ticket.tier, copy)
        }
        if not failed:
            self._grant(ticket)
            return
        ticket.spoiled |= failed
        self._shorten(ticket, now, RefusalReason.TOO_SHORT)

    # -- matching ----------------------------------------------------------------------------------------------------

    def _match(self, ticket: AcrossTicket, bound: int, usable: Usable) -> tuple[int, list[Cover]]:
        return match([part.window.state for part in ticket.parts], ticket.keys[:bound], usable)

    def _readable(self, ticket: AcrossTicket, now: int) -> Usable:
        """Accepts blocks that are in the tier, on their way there, or behind a usable edge."""
        windows = {part.window.state: part.window for part in ticket.parts}

        def readable(state: GroupState, block: Block) -> bool:
            return block not in ticket.spoiled and windows[state].readable(block, ticket.tier, now)

        return readable

    def _shorten(
        self,
        ticket: AcrossTicket,
        now: int,
        reason: RefusalReason,
        limits: Callable[[Sequence[Cover]], list[Limit]] = lambda covers: [],
    ) -> None:
        """Queues the request for the longest prefix that it can still have, or refuses it for this reason."""
        length, covers = self._match(ticket, ticket.length, self._readable(ticket, now))
        length = longest(length, [*limits(covers), *(cover.unbroken for cover in covers)])
        if length < ticket.least:
            self.refuse(ticket, reason)
            return
        self._claim(ticket, length, covers)
        self._enqueue(ticket)

    def _claim(self, ticket: AcrossTicket, length: int, covers: Sequence[Cover]) -> None:
        """Claims the blocks that the prefix needs, and drops earlier claims and holds."""
        ticket.length = length
        for part, cover in zip(ticket.parts, covers, strict=True):
            part.needed = cover.state.attention.needs(length)
            part.window.claim(part.fetch, cover.blocks(length))

    # -- queues and answers --------------------------------------------------------------------------------------------

    def _enqueue(self, ticket: AcrossTicket) -> None:
        for part in ticket.parts:
            part.window.dequeue(part.fetch)
            part.window.enqueue(part.fetch)

    def _grant(self, ticket: AcrossTicket) -> None:
        del self.tickets[ticket.id]
        groups = []
        for part in ticket.parts:
            fetch = part.fetch
            lease = None
            if fetch.copies:
                lease = self._new_lease(ticket.session, part.window.state, ticket.tier)
                lease.held = dict(zip(fetch.blocks, fetch.copies, strict=True))
            slots = tuple(copy.slot for copy in fetch.copies)
            group = part.window.state.group
            groups.append(GroupGrant(group, part.needed, lease.id if lease else None, slots, fetch.found_in))
        matched, blocks = ticket.matched, ticket.length
        if ticket.alone:
            (held,) = groups
            sinks = held.needed.sinks
            self._recorder.grant(
                Grant(ticket.id, held.lease, held.slots, held.found_in, matched, blocks=blocks, sinks=sinks)
            )
        else:
            self._recorder.grant(Grant(ticket.id, None, matched=matched, blocks=blocks, groups=tuple(groups)))

    def refuse(self, ticket: AcrossTicket, reason: RefusalReason) -> None:
        """Refuses a request. Drops its claims and holds."""
        del self.tickets[ticket.id]
        self._let_go(ticket)
        free = min(part.window.state.slots[ticket.tier].free for part in ticket.parts)
        self._recorder.refuse(self._refusal(ticket, reason, ticket.least, free, ticket.matched))

    def _let_go(self, ticket: AcrossTicket) -> None:
        for part in ticket.parts:
            part.window.dequeue(part.fetch)
            part.window.let_go(part.fetch)
