"""The window manager: requests for one window group's blocks and slots, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, takewhile
from typing import Final

from kvtierd.core.block import LEAVING, Block
from kvtierd.core.events import DEMAND, REMOVED, WRITE_THROUGH, Cause, EventType
from kvtierd.core.group import GroupState
from kvtierd.core.holds import Holds, UseCounts
from kvtierd.core.ids import DISK, NOBODY, Key, LeaseId, SessionId, SlotId, TicketId, Tier, Traits
from kvtierd.core.leases import FetchTicket, ReserveTicket, SlotLease, Ticket
from kvtierd.core.outcome import Grant, GroupGrant, MoveResult, Recorder, Refusal, RefusalReason
from kvtierd.core.policy import UNCHANGED, GroupShape, Policy
from kvtierd.core.reclaim import COMING, LAST, NEVER, NOW, Background, Reclaimer
from kvtierd.core.recovery import RecoveredBlock, recover
from kvtierd.core.slots import SLOT_BLANK, SLOT_ORPHANED, SLOT_QUARANTINED
from kvtierd.core.transfers import BlockResult, Transfers

_LEASES_AHEAD: Final = 8
"""Number of leases ahead for which slots are freed at once."""
_KEPT_AHEAD_NS: Final = 1_000_000_000
"""Time for which a request waits for slots leased ahead. Clients give them back sooner."""


class WindowManager:
    """Blocks, slots and waiting requests of one window group.

    A request waits in its tier's queue until room for it has been made; the head of a queue is never overtaken. The
    block manager, which knows sessions, passes in ``new_lease``, and ``refusal``, which makes a refusal that names the
    holders.
    """

    def __init__(
        self,
        shape: GroupShape,
        recorder: Recorder,
        policy: Policy,
        new_lease: Callable[[SessionId, GroupState, Tier], SlotLease],
        refusal: Callable[[Ticket, RefusalReason, int, int, int], Refusal],
    ) -> None:
        self.state = GroupState(shape, recorder, policy)
        self.transfers = Transfers(self.state)
        self.reclaimer = Reclaimer(self.state, self.transfers, self._older_wants)
        self.background = Background(self.state, self.transfers, self.reclaimer)
        self._recorder = recorder
        self._new_lease = new_lease
        self._refusal = refusal
        self._queues: dict[Tier, deque[Ticket]] = {tier: deque() for tier in self.state.tiers}
        self.holds = Holds(self.state, self.background)
        self.use_counts = UseCounts(self.state, self.background)
        self.ahead: dict[Tier, dict[LeaseId, SlotLease]] = {tier: {} for tier in self.state.tiers}
        """Leases of slots for which their session has no blocks yet. The session soon uses them or gives them back."""
        self.short: dict[Tier, tuple[int, Key]] = {}
        """Tiers that are to have more free slots, and the block whose chain is not dropped for them."""

    def close(self) -> None:
        """See ``BlockManager.close``."""
        index = self.state.index
        vars(self.state).clear()
        vars(self).clear()
        index.close()

    @property
    def waiting(self) -> int:
        """Reserves and moves that wait; the acquires are counted by ``core/acquires.py``."""
        tickets = (ticket for queue in self._queues.values() for ticket in queue)
        return sum(not isinstance(ticket, FetchTicket) or not ticket.hold for ticket in tickets)

    def queued(self, tier: Tier) -> tuple[Ticket, ...]:
        """For the checker: the tier's queue."""
        return tuple(self._queues[tier])

    # -- requests ----------------------------------------------------------------------------------------------------

    def reserve(self, ticket: ReserveTicket) -> None:
        tier = ticket.tier
        if ticket.count > self.obtainable(tier):
            self._refuse(ticket, RefusalReason.TIER_FULL)
        else:
            self._queues[tier].append(ticket)

    def retain(self, blocks: Sequence[Block | None], given: Sequence[tuple[int, int]], cause: Cause = DEMAND) -> None:
        """Sets the retention given with each block; ``UNCHANGED`` leaves the block's as it is."""
        for block, (priority, duration_ms) in zip(blocks, given, strict=False):
            if block is not None and priority != UNCHANGED:
                self.state.retain(block, priority, duration_ms, cause)

    def set_retention(
        self, keys: Sequence[Key], given: Sequence[tuple[int, int]], cause: Cause
    ) -> tuple[BlockResult, ...]:
        blocks = [self.state.index.get(key) for key in keys]
        self.retain(blocks, given, cause)
        return tuple(BlockResult.NOT_FOUND if block is None else BlockResult.OK for block in blocks)

    def claim(self, ticket: FetchTicket, blocks: list[Block]) -> None:
        """Claims these blocks, so that they give up no copy while the request waits. Drops its earlier claims and
        holds."""
        found_in = dict(zip(ticket.blocks, ticket.found_in, strict=True))
        for block in blocks:
            self.state.claim(block)
        self.let_go(ticket)
        ticket.blocks = blocks
        ticket.found_in = tuple(found_in.get(block, block.residency) for block in blocks)
        ticket.waiting = True

    def move(self, ticket: FetchTicket) -> None:
        """Queues a move whose blocks are claimed; to disk, of no more blocks than one call may take there, ancestors
        included."""
        if ticket.tier is DISK:
            self._thin_out(ticket, self.state.policy.blocks_a_call)
        self._queues[ticket.tier].append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Withdraws a request whose caller has gone. Drops its claims and holds, and gives no answer."""
        self.dequeue(ticket)
        if isinstance(ticket, FetchTicket):
            self.let_go(ticket)

    def expire(self, ticket: Ticket) -> None:
        """The request's deadline passed: a move ends with the blocks that are there, a reserve is refused."""
        self.dequeue(ticket)
        if isinstance(ticket, ReserveTicket):
            self._refuse(ticket, RefusalReason.DEADLINE)
            return
        if ticket.waiting:
            self._thin_out(ticket, 0)
            self.take(ticket)
        self._answer_move(ticket)

    def completed(self, result: MoveResult, now: int) -> None:
        for ticket in self.transfers.complete(result, now):
            ticket.pending -= 1
            if ticket.pending == 0 and ticket.copies and not ticket.hold:
                self._answer_move(ticket)

    def pump(self, now: int) -> None:
        """Serves the queues while there is room or room can be made, highest tier first, then plans background
        copies."""
        self.reclaimer.begin(now)
        for tier in self.state.tiers:
            while self._queues[tier] and self._serve_head(tier):
                pass
        self.reclaimer.serve(LAST)
        self.background.work(now)
        self.reclaimer.refill_disk()
        self.reclaimer.end()

    # -- parts of acquires -------------------------------------------------------------------------------------------

    def enqueue(self, ticket: FetchTicket) -> None:
        """Queues a part behind all older requests. A part may come back into the queue."""
        queue = self._queues[ticket.tier]
        place = len(queue)
        while place and queue[place - 1].id > ticket.id:
            place -= 1
        queue.insert(place, ticket)

    def dequeue(self, ticket: Ticket) -> None:
        if ticket in self._queues[ticket.tier]:
            self._queues[ticket.tier].remove(ticket)

    def heads(self, ticket: FetchTicket) -> bool:
        """Whether the request is the head of its queue."""
        queue = self._queues[ticket.tier]
        return bool(queue) and queue[0] is ticket

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve_head(self, tier: Tier) -> bool:
        """Serves the head of a queue. True if the head was answered or has started, so that the next request can be
        served."""
        ticket = self._queues[tier][0]
        if isinstance(ticket, ReserveTicket) and ticket.count > self.obtainable(tier):
            self._give_up(ticket)
            return True
        after = ticket.after if isinstance(ticket, ReserveTicket) else None
        self.reclaimer.serve(ticket.id, None if after is None else self.state.index.get(after), ticket.session)
        wanted = self._wants(ticket)
        prospect = self.reclaimer.secure(tier, wanted, desperate=True)
        coming = prospect is COMING or (prospect is NEVER and (self.transfers.active > 0 or self.slots_ahead(tier) > 0))
        waits = coming or (tier is DISK and bool(self.state.losing))  # a loss may take ancestors off the disk
        if isinstance(ticket, FetchTicket) and ticket.hold:
            ticket.able = prospect is NOW
            ticket.room = self.reclaimer.available(tier) if prospect is NEVER and not waits else None
            waits = not (ticket.able and ticket.alone)  # a part starts with the other parts of its acquire
        if waits:
            return False
        if prospect is NEVER and not self._settle_for_less(ticket):
            return True
        self._queues[tier].popleft()
        self._start(ticket)
        return True

    def _start(self, ticket: Ticket) -> None:
        if isinstance(ticket, ReserveTicket):
            lease = self._lease_blanks(ticket.session, ticket.tier, ticket.count)
            self._recorder.grant(Grant(ticket.id, (GroupGrant(self.state.group, lease.id, tuple(lease.blank)),)))
        else:
            self.take(ticket)
            if ticket.pending == 0 and not ticket.hold:
                self._answer_move(ticket)

    def _lease_blanks(self, session: SessionId, tier: Tier, count: int) -> SlotLease:
        lease = self._new_lease(session, self.state, tier)
        lease.blank = dict.fromkeys(self.state.take_blanks(tier, session, count))
        return lease

    def lease_ahead(self, session: SessionId, tier: Tier, count: int, after: Key, now: int) -> SlotLease | None:
        """Leases blank slots, at once or not at all, that the session will want next to store blocks after ``after``.
        Sessions together get a small share of the tier: slots leased ahead have no blocks, and a request may need
        them."""
        others = self._queues[tier] or count > self._left_ahead(tier)
        if others or not self._free_ahead(tier, count, after, now, session):
            return None
        lease = self._lease_blanks(session, tier, count)
        self.ahead[tier][lease.id] = lease
        if self.state.slots[tier].free < count:
            self.short[tier] = _LEASES_AHEAD * count, after
        return lease

    def forget_ahead(self, now: int) -> None:
        """Lets no request wait any longer for slots that their session, maybe stopped, keeps beyond its time."""
        for leases in self.ahead.values():
            for lease in [lease for lease in leases.values() if now > lease.granted_at + _KEPT_AHEAD_NS]:
                del leases[lease.id]

    def refill(self, now: int) -> None:
        """Frees slots for the next leases ahead."""
        while self.short:
            tier, (count, after) = self.short.popitem()
            self._free_ahead(tier, min(count, self._left_ahead(tier)), after, now)

    def _left_ahead(self, tier: Tier) -> int:
        return self.state.slots[tier].capacity // self.state.policy.ahead_share - self.slots_ahead(tier)

    def _free_ahead(self, tier: Tier, count: int, after: Key, now: int, session: SessionId = NOBODY) -> bool:
        self.reclaimer.begin(now)
        self.reclaimer.serve(LAST, self.state.index.get(after), session)
        prospect = self.reclaimer.secure(tier, count, desperate=False)
        self.reclaimer.end()
        return prospect is NOW

    def _settle_for_less(self, ticket: Ticket) -> bool:
        """Nothing more can be had and nothing is in flight: a move does with less, a reserve is refused."""
        if isinstance(ticket, FetchTicket):
            self._thin_out(ticket, self.reclaimer.available(ticket.tier))
            if ticket.blocks:
                return True
        self._give_up(ticket)
        return False

    def _wants(self, ticket: Ticket) -> int:
        """Number of slots that the request needs in its tier now."""
        if isinstance(ticket, ReserveTicket):
            return ticket.count
        self._forget_lost(ticket)
        return sum([block.copies[ticket.tier] is None for block in self._to_place(ticket)])

    def _older_wants(self, tier: Tier, ticket: TicketId) -> int:
        older = takewhile(lambda other: other.id < ticket, self._queues[tier])
        return sum(map(self._wants, older))

    def _to_place(self, ticket: FetchTicket) -> list[Block]:
        """The blocks that must get into the tier; on disk, their missing ancestors too."""
        if ticket.tier is DISK:
            present = [block for block in ticket.blocks if block.copies[DISK] is not None]
            return present + self.reclaimer.missing_on_disk(ticket.blocks)
        return ticket.blocks

    def _forget_lost(self, ticket: FetchTicket) -> None:
        """Blocks of a move may have been lost against policy while it waited; an acquire is matched anew."""
        lost = [] if ticket.hold else [self.lost(block, ticket.tier) for block in ticket.blocks]
        if any(lost):
            for block in compress(ticket.blocks, lost):
                self.state.unclaim(block)
            ticket.blocks = [block for block, gone in zip(ticket.blocks, lost, strict=True) if not gone]

    def lost(self, block: Block, tier: Tier) -> bool:
        """Whether the block is hollow, unindexed or only in a tier being lost, and not on its way to ``tier``."""
        return not self.state.lasting(block) and block.copies[tier] is None

    def take(self, ticket: FetchTicket) -> None:
        """Takes all destination slots, which are free, in one step and plans the copies into them."""
        self.dequeue(ticket)
        self._forget_lost(ticket)
        tier, claimed = ticket.tier, ticket.blocks
        asked = set(claimed)
        ticket.waiting = False
        for block in self._to_place(ticket):
            if block.copies[tier] is None:
                src = self.reclaimer.source(block)
                if ticket.hold:
                    cause = DEMAND
                elif block not in asked:
                    cause = WRITE_THROUGH
                else:
                    cause = ticket.cause or (Cause.PREFETCH if src > tier else Cause.EXPLICIT)
                self.transfers.start(block, src, tier, cause)
            self._join(ticket, block)
        for block in claimed:
            self.state.unclaim(block)
        if not ticket.hold:
            for block in claimed:
                self.transfers.demote_to(block, tier, ticket.cause or Cause.EXPLICIT)

    def _join(self, ticket: FetchTicket, block: Block) -> None:
        tier = ticket.tier
        copy = block.copies[tier]
        assert copy is not None
        if ticket.hold:
            self.state.hold(block, tier, ticket.session)
        elif copy.phase is LEAVING:
            self.state.stay(block, tier)
        ticket.copies.append(copy)
        if not copy.valid:
            self.transfers.await_copy(copy, ticket)
            ticket.pending += 1

    # -- answering ---------------------------------------------------------------------------------------------------

    def _answer_move(self, ticket: FetchTicket) -> None:
        tier = ticket.tier
        results = tuple(
            block is not None and block.indexed and (c := block.copies[tier]) is not None and c.valid
            for block in ticket.wanted
        )
        places = zip(ticket.wanted, results, strict=True)
        failed = frozenset(n for n, (block, there) in enumerate(places) if block in ticket.failed and not there)
        self.let_go(ticket)
        self._recorder.grant(Grant(ticket.id, results=results, failed=failed))

    def _give_up(self, ticket: Ticket) -> None:
        """Ends a request that can have nothing."""
        self.dequeue(ticket)
        if isinstance(ticket, FetchTicket):
            self._answer_move(ticket)
        else:
            self._refuse(ticket, RefusalReason.TIER_FULL)

    def _refuse(self, ticket: Ticket, reason: RefusalReason) -> None:
        wanted = ticket.count if isinstance(ticket, ReserveTicket) else 1
        self._recorder.refuse(self._refusal(ticket, reason, wanted, self.state.slots[ticket.tier].free, 0))

    def let_go(self, ticket: FetchTicket) -> None:
        """Drops the claims or holds of a fetch, whichever it has; holds tail first."""
        if ticket.waiting:
            for block in ticket.blocks:
                self.state.unclaim(block)
        else:
            for copy in ticket.copies:
                self.transfers.forget(copy, ticket)
            held = list(zip(ticket.blocks, ticket.copies, strict=True)) if ticket.hold else []
            for block, copy in reversed(held):
                if copy.holds > 0:
                    self.state.unhold(block, ticket.tier, copy)
        ticket.blocks, ticket.copies = [], []
        ticket.pending = 0
        ticket.waiting = False

    def plan(self, to: Tier, keys: Sequence[Key]) -> tuple[BlockResult, ...]:
        """Predicts a move's results. A block that is not in the tier needs one of the slots that could be freed."""
        left = self.obtainable(to)
        results = []
        for key in keys:
            block = self.state.index.get(key)
            if block is None:
                results.append(BlockResult.NOT_FOUND)
                continue
            copy = block.copies[to]
            left -= copy is None or copy.holds == 0
            results.append(BlockResult.OK if copy is not None or left >= 0 else BlockResult.NO_ROOM)
        return tuple(results)

    # -- capacity ----------------------------------------------------------------------------------------------------

    def slots_ahead(self, tier: Tier) -> int:
        """Number of slots that are leased ahead."""
        return sum([len(lease.blank) for lease in self.ahead[tier].values()])

    def obtainable(self, tier: Tier) -> int:
        """Largest number of slots that could be freed: all but blank, orphaned, quarantined and held slots. Slots
        leased ahead come back."""
        if tier in self.state.lost:
            return 0
        slots = self.state.slots[tier]
        out = sum(slots.count(state) for state in (SLOT_BLANK, SLOT_ORPHANED, SLOT_QUARANTINED))
        return slots.capacity - out - self.state.held[tier] + self.slots_ahead(tier)

    def readable(self, block: Block, tier: Tier, now: int) -> bool:
        """Whether the block is in the tier, on its way there, or behind a usable edge."""
        if block.hollow:
            return False
        return block.copies[tier] is not None or self.transfers.usable(self.reclaimer.source(block), tier, now)

    def _thin_out(self, ticket: FetchTicket, free: int) -> None:
        """Drops the blocks of a move that do not fit in these free slots. On disk, missing ancestors need slots too."""
        tier = ticket.tier
        placed: set[Block] = set()
        refused: set[Block] = set()
        kept: list[Block] = []
        for block in sorted(ticket.blocks, key=lambda block: block.depth):
            missing: list[Block] = []
            member = block
            for member in chain([block], block.ancestors() if tier is DISK else ()):
                if member in placed or member in refused or member.copies[tier] is not None or len(missing) > free:
                    break
                missing.append(member)
            if member in refused or len(missing) > free:
                refused.add(block)
                self.state.unclaim(block)
                continue
            free -= len(missing)
            placed.update(missing)
            kept.append(block)
        ticket.blocks = kept

    # -- existence ---------------------------------------------------------------------------------------------------

    def open(
        self,
        recovered: Sequence[RecoveredBlock],
        quarantined: Iterable[SlotId],
        corrupt: Iterable[Key],
        clear: Cause | None,
    ) -> None:
        """Announces the group and indexes the recovered blocks, given parents first and least recently used first.

        ``quarantined``: disk slots. ``corrupt``: blocks to be reported as removed.
        """
        state = self.state
        self._recorder.mark(EventType.CREATED, Cause.RECOVERED if clear else Cause.EXPLICIT, state.group)
        if clear is not None:
            self._recorder.mark(EventType.CLEARED, clear, state.group)
        for key in corrupt:
            self._recorder.change(REMOVED, Cause.CORRUPT, state.group, Block(key, None, None, Traits(0)))
        if DISK in state.slots:
            bad = set(quarantined)
            state.corrupt[DISK] |= bad
            state.slots[DISK].claim(bad, SLOT_QUARANTINED)
        state.reuse(recover(state, recovered))  # selective writes copy recovered blocks down

    def refuse_offline(self, ticket: Ticket) -> None:
        """Refuses a request for a tier out of service. Copies in flight for the request end by themselves."""
        self.withdraw(ticket)
        self._refuse(ticket, RefusalReason.TIER_OFFLINE)
