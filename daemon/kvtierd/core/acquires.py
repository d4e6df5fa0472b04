"""Acquires: requests for the longest prefix that one or more window groups can serve together.

An acquire holds the blocks that each group needs for the prefix, READY in one tier, or holds nothing. Each group's
queue has a part of the acquire, which waits like any other request. When all parts are at the head of their queues and
have room, the acquire takes its slots in all groups in one step. If a group cannot make room, loses a block, or a copy
fails, the acquire is matched again for a shorter prefix: a sliding group needs other blocks for a shorter prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.abi.attention import NOTHING, Needed
from kvtierd.core.block import Block
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Key, SessionId, TicketId, Tier
from kvtierd.core.leases import FetchTicket, SlotLease
from kvtierd.core.lookup import Cover, Limit, Usable, longest, match
from kvtierd.core.outcome import Grant, GroupGrant, Recorder, Refusal, RefusalReason
from kvtierd.core.retention import pairs
from kvtierd.core.transfers import ChainRequest
from kvtierd.core.window import WindowManager


@dataclass(slots=True, eq=False)
class Part:
    """A group's part of an acquire: the blocks that the group needs of the prefix."""

    window: WindowManager
    fetch: FetchTicket
    needed: Needed = NOTHING


@dataclass(slots=True, eq=False)
class AcquireTicket:
    """
    waiting (blocks claimed, parts in queues) --room everywhere--> taken (copies fill) --> granted or refused
         ^                                                            |
         +------------------ a copy failed: shorter ------------------+

    ``length`` is the length of the wanted prefix. ``spoiled`` blocks had a failed copy and are not tried again.
    """

    id: TicketId
    session: SessionId
    tier: Tier
    keys: Sequence[Key]
    min_blocks: int
    parts: tuple[Part, ...]
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


class Acquires:
    """The acquires of a cache. An acquire takes its slots as soon as all its parts head their queues
    and have room."""

    def __init__(
        self,
        windows: Sequence[WindowManager],
        recorder: Recorder,
        new_lease: Callable[[SessionId, GroupState, Tier], SlotLease],
        refusal: Callable[[AcquireTicket, RefusalReason, int, int, int], Refusal],
    ) -> None:
        self._windows = windows
        self._recorder = recorder
        self._new_lease = new_lease
        self._refusal = refusal
        self.tickets: dict[TicketId, AcquireTicket] = {}
        self._removed = 0

    @property
    def waiting(self) -> int:
        return sum(ticket.waiting for ticket in self.tickets.values())

    # -- requests ----------------------------------------------------------------------------------------------------

    def match(
        self,
        id: TicketId,
        session: SessionId,
        windows: Sequence[WindowManager],
        tier: Tier,
        chain: ChainRequest,
        now: int,
    ) -> AcquireTicket:
        """Claims the blocks that the longest usable prefix needs in these groups; room for them is made later, by
        :meth:`queue`. A block whose only copy is behind a failing edge is a miss."""
        alone = len(windows) == 1
        fetches = [FetchTicket(id, session, tier, [], hold=True, alone=alone) for _ in windows]
        parts = tuple(map(Part, windows, fetches))
        ticket = AcquireTicket(id, session, tier, chain.keys, chain.min_blocks, parts)
        self.tickets[id] = ticket
        ticket.matched, covers = self._match(ticket, len(chain.keys), self._readable(ticket, now))
        self._claim(ticket, ticket.matched, covers)
        if not chain.counted:
            parts[0].window.use_counts.asked(len(chain.keys), ticket.matched)
        for part in ticket.parts:
            part.window.use_counts.acquired(part.fetch.blocks, part.fetch.found_in)
            part.window.retain(part.fetch.blocks, part.needed.pick(pairs(chain.priorities, chain.durations_ms)))
        return ticket

    def queue(self, ticket: AcquireTicket, now: int) -> None:
        """Queues the acquire for the longest prefix that the tier can hold in every group."""
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

    def expire(self, ticket: AcquireTicket) -> None:
        """The deadline passed: the answer is the longest prefix that is READY by now."""

        def ready(state: GroupState, block: Block) -> bool:
            copy = block.copies[ticket.tier]
            return copy is not None and copy.valid

        length, covers = self._match(ticket, ticket.length, ready)
        if length < ticket.least:
            self.refuse(ticket, RefusalReason.DEADLINE)
            return
        self._claim(ticket, length, covers)
        for part in ticket.parts:
            part.window.take(part.fetch)
        self._grant(ticket)

    def withdraw(self, ticket: AcquireTicket) -> None:
        """The caller has gone: nothing stays held, nothing is answered."""
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
        """Answers acquires whose copies are READY, and lets others go on as far as the queues, which have been served,
        allow. Returns whether the queues have changed: then they are to be served again."""
        return any(self._advance(ticket, now) for ticket in list(self.tickets.values()))

    def _advance(self, ticket: AcquireTicket, now: int) -> bool:
        if not ticket.waiting:
            return not any(part.fetch.pending for part in ticket.parts) and self._finish(ticket, now)
        heads = [part for part in ticket.parts if part.window.heads(part.fetch)]
        if any(part.fetch.room is not None for part in heads):
            self._make_do(ticket, now)
            return True
        if len(heads) == len(ticket.parts) and all(part.fetch.able for part in heads):
            for part in ticket.parts:
                part.window.take(part.fetch)
            return True
        return False

    def _make_do(self, ticket: AcquireTicket, now: int) -> None:
        """Nothing more can be had in some group and nothing is in flight there."""

        def missing(block: Block) -> bool:
            return block.copies[ticket.tier] is None

        def within(covers: Sequence[Cover]) -> list[Limit]:
            return [
                cover.affordable(missing, max(0, part.fetch.room))
                for cover, part in zip(covers, ticket.parts, strict=True)
                if part.fetch.room is not None and part.window.heads(part.fetch)
            ]

        self._shorten(ticket, now, RefusalReason.TIER_FULL, within)

    def _finish(self, ticket: AcquireTicket, now: int) -> bool:
        """All copies have ended, well or not. Returns whether it queues again, for a shorter prefix."""
        failed = {
            block
            for part in ticket.parts
            for block, copy in zip(part.fetch.blocks, part.fetch.copies, strict=True)
            if block.copies[ticket.tier] is not copy
        }
        if failed:
            ticket.spoiled |= failed
            self._shorten(ticket, now, RefusalReason.TOO_SHORT)
        else:
            self._grant(ticket)
        return bool(failed)

    # -- matching ----------------------------------------------------------------------------------------------------

    def _match(self, ticket: AcquireTicket, bound: int, usable: Usable) -> tuple[int, list[Cover]]:
        return match([part.window.state for part in ticket.parts], ticket.keys[:bound], usable)

    def _readable(self, ticket: AcquireTicket, now: int) -> Usable:
        """Accepts blocks in the tier, on their way there, or behind a usable edge."""
        windows = {part.window.state: part.window for part in ticket.parts}

        def readable(state: GroupState, block: Block) -> bool:
            return block not in ticket.spoiled and windows[state].readable(block, ticket.tier, now)

        return readable

    def _shorten(
        self,
        ticket: AcquireTicket,
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

    def _claim(self, ticket: AcquireTicket, length: int, covers: Sequence[Cover]) -> None:
        """Claims the blocks of the prefix and lets go of the blocks claimed or held before."""
        ticket.length = length
        for part, cover in zip(ticket.parts, covers, strict=True):
            part.needed = cover.state.attention.needs(length)
            part.window.claim(part.fetch, cover.blocks(length))

    # -- queues and answers --------------------------------------------------------------------------------------------

    def _enqueue(self, ticket: AcquireTicket) -> None:
        for part in ticket.parts:
            part.window.dequeue(part.fetch)
            part.window.enqueue(part.fetch)

    def _grant(self, ticket: AcquireTicket) -> None:
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
            groups.append(GroupGrant(group, lease.id if lease else None, slots, fetch.found_in, part.needed))
        self._recorder.grant(Grant(ticket.id, tuple(groups), ticket.matched, ticket.length))

    def refuse(self, ticket: AcquireTicket, reason: RefusalReason) -> None:
        """Refuses the acquire, which then holds nothing."""
        del self.tickets[ticket.id]
        self._let_go(ticket)
        free = min(part.window.state.slots[ticket.tier].free for part in ticket.parts)
        self._recorder.refuse(self._refusal(ticket, reason, ticket.least, free, ticket.matched))

    def _let_go(self, ticket: AcquireTicket) -> None:
        for part in ticket.parts:
            part.window.dequeue(part.fetch)
            part.window.let_go(part.fetch)
