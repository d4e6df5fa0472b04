"""The window manager: requests for one window group's blocks and slots, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, takewhile
from typing import assert_never

from kvtierd.core.block import LEAVING, Block
from kvtierd.core.events import DEMAND, REMOVED, WRITE_THROUGH, Cause, EventType
from kvtierd.core.group import GroupState
from kvtierd.core.holds import Holding, Uses
from kvtierd.core.ids import BITS, DISK, Key, SessionId, SlotId, TicketId, Tier, Traits
from kvtierd.core.leases import FetchTicket, Lease, ReserveTicket, Ticket
from kvtierd.core.lookup import prefix
from kvtierd.core.outcome import Grant, MoveResult, Recorder, Refusal, RefusalReason
from kvtierd.core.policy import UNCHANGED, GroupShape, Policy
from kvtierd.core.reclaim import COMING, LAST, NEVER, NOW, Background, Room
from kvtierd.core.recovery import Recovered, recover
from kvtierd.core.retention import pairs
from kvtierd.core.slots import SLOT_BLANK, SLOT_ORPHANED, SLOT_QUARANTINED
from kvtierd.core.transfers import BlockResult, ChainRequest, Flights


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
        new_lease: Callable[[SessionId, GroupState, Tier], Lease],
        refusal: Callable[[Ticket, RefusalReason, int, int, int], Refusal],
    ) -> None:
        self.state = GroupState(shape, recorder, policy)
        self.flights = Flights(self.state)
        self.room = Room(self.state, self.flights, self._older_wants)
        self.background = Background(self.state, self.flights, self.room)
        self._recorder = recorder
        self._new_lease = new_lease
        self._refusal = refusal
        self._queues: dict[Tier, deque[Ticket]] = {tier: deque() for tier in self.state.tiers}
        self.holding = Holding(self.state, self.background)
        self.uses = Uses(self.state, self.background)

    def close(self) -> None:
        """See ``BlockManager.close``."""
        index = self.state.index
        vars(self.state).clear()
        vars(self).clear()
        index.close()

    @property
    def waiting(self) -> int:
        """Number of waiting requests for this group alone."""
        tickets = (ticket for queue in self._queues.values() for ticket in queue)
        return sum(not isinstance(ticket, FetchTicket) or ticket.turn is None for ticket in tickets)

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

    def match_for(self, ticket: FetchTicket, wanted: ChainRequest, now: int) -> None:
        """Claims the longest stored prefix for an acquire. :meth:`fetch` makes room for it later.

        A block whose only copy is behind a failing edge is a miss.
        """
        keys = wanted.keys
        blocks = list(takewhile(lambda block: self.readable(block, ticket.tier, now), prefix(self.state, keys)))
        ticket.matched = len(blocks)
        self.claim(ticket, blocks)
        if not wanted.counted:
            self.uses.asked(len(keys), len(blocks))
        self.uses.acquired(ticket.blocks, ticket.found_in)
        self.retain(blocks, pairs(wanted.priorities, wanted.durations_ms))

    def retain(self, blocks: Sequence[Block], given: Sequence[tuple[int, int]]) -> None:
        """Sets the retention given with each block; ``UNCHANGED`` leaves the block's as it is."""
        for block, (priority, duration_ms) in zip(blocks, given, strict=False):
            if priority != UNCHANGED:
                self.state.retain(block, priority, duration_ms, DEMAND)

    def set_retention(self, keys: Sequence[Key], given: Sequence[tuple[int, int]]) -> tuple[BlockResult, ...]:
        """Sets the retention of indexed blocks."""
        blocks = [self.state.index.get(key) for key in keys]
        for block, (priority, duration_ms) in zip(blocks, given, strict=True):
            if block is not None:
                self.state.retain(block, priority, duration_ms, Cause.EXPLICIT)
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

    def fetch(self, ticket: FetchTicket) -> None:
        """Queues a fetch whose blocks are claimed. An acquire is shortened to the prefix that the tier could hold at
        best, a move to disk to the blocks that one call may copy, ancestors included."""
        if ticket.hold:
            self._shorten(ticket, self._holdable(ticket))
            if len(ticket.blocks) < max(ticket.min_blocks, 1):
                self._give_up(ticket)
                return
        elif ticket.tier is DISK:
            self._thin_out(ticket, self.state.policy.blocks_a_call)
        self._queues[ticket.tier].append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Withdraws a request whose caller has gone. Drops its claims and holds, and gives no answer."""
        if ticket in self._queues[ticket.tier]:
            self._queues[ticket.tier].remove(ticket)
        if isinstance(ticket, FetchTicket):
            self.let_go(ticket)

    def expire(self, ticket: Ticket) -> None:
        """Ends a request at its deadline, with a grant of the blocks that are there or a refusal."""
        if ticket in self._queues[ticket.tier]:
            self._queues[ticket.tier].remove(ticket)
        if isinstance(ticket, ReserveTicket):
            self._refuse(ticket, RefusalReason.DEADLINE)
            return
        if ticket.waiting:
            self._take(ticket, present_only=True)
        self._finish(ticket, RefusalReason.DEADLINE)

    def completed(self, result: MoveResult, now: int) -> None:
        for ticket in self.flights.complete(result, now):
            ticket.pending -= 1
            if ticket.pending == 0 and ticket.copies and ticket.turn is None:
                self._finish(ticket, RefusalReason.TOO_SHORT)

    def pump(self, now: int) -> None:
        """Serves the queues while there is room or room can be made, highest tier first, then plans background
        copies."""
        self.room.begin(now)
        for tier in self.state.tiers:
            while self._queues[tier] and self._serve_head(tier, now):
                pass
        self.room.serve(LAST)
        self.background.work(now)
        self.room.refill_disk()
        self.room.end()

    # -- parts of requests over several groups -----------------------------------------------------------------------

    def enqueue(self, ticket: FetchTicket) -> None:
        """Queues a part behind all older requests. A part may come back into the queue."""
        queue = self._queues[ticket.tier]
        place = len(queue)
        while place and queue[place - 1].id > ticket.id:
            place -= 1
        queue.insert(place, ticket)

    def dequeue(self, ticket: FetchTicket) -> None:
        if ticket in self._queues[ticket.tier]:
            self._queues[ticket.tier].remove(ticket)

    def heads(self, ticket: FetchTicket) -> bool:
        """Whether the request is the head of its queue."""
        queue = self._queues[ticket.tier]
        return bool(queue) and queue[0] is ticket

    def take(self, ticket: FetchTicket) -> None:
        """Takes the request's slots, which are free."""
        self.dequeue(ticket)
        self._take(ticket, present_only=False)

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve_head(self, tier: Tier, now: int) -> bool:
        """Serves the head of a queue. True if the head was answered or has started, so that the next request can be
        served."""
        ticket = self._queues[tier][0]
        if isinstance(ticket, ReserveTicket) and ticket.count > self.obtainable(tier):
            self._queues[tier].popleft()
            self._give_up(ticket)
            return True
        self.room.serve(ticket.id)
        wanted = self._wants(ticket)
        prospect = NOW if self.room.available(tier) >= wanted else self.room.secure(tier, wanted, desperate=True)
        losing = bool(self.state.losing)  # a loss may take ancestors off the disk, and it frees slots
        coming = prospect is COMING or (prospect is NEVER and (losing or self.flights.active > 0))
        waits = coming or (losing and tier is DISK)
        turn = ticket.turn if isinstance(ticket, FetchTicket) else None
        if turn is not None:
            turn.able = prospect is NOW
            turn.room = self.room.available(tier) if prospect is NEVER and not waits else None
        if waits or turn is not None:
            return False  # a part of a multi-group request starts with the other parts
        if prospect is NEVER and not self._settle_for_less(ticket):
            return True
        self._queues[tier].popleft()
        self._start(ticket, now)
        return True

    def _start(self, ticket: Ticket, now: int) -> None:
        if isinstance(ticket, ReserveTicket):
            lease = self._new_lease(ticket.session, self.state, ticket.tier)
            slots = self.state.take_blanks(ticket.tier, ticket.session, ticket.count)
            lease.blank = dict.fromkeys(slots)
            self._recorder.grant(Grant(ticket.id, lease.id, tuple(slots)))
        elif isinstance(ticket, FetchTicket):
            self._take(ticket, present_only=False)
            if ticket.pending == 0:
                self._finish(ticket, RefusalReason.TOO_SHORT)
        else:
            assert_never(ticket)

    def _settle_for_less(self, ticket: Ticket) -> bool:
        """Shortens a fetch for which no more room can come, and refuses any other request."""
        tier = ticket.tier
        if isinstance(ticket, FetchTicket):
            free = self.room.available(tier)
            if ticket.hold:
                self._shorten(ticket, self._fits(ticket, free))
            else:
                self._thin_out(ticket, free)
            if len(ticket.blocks) >= max(ticket.min_blocks, 1):
                return True
        self._queues[tier].popleft()
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
            return present + self.room.missing_on_disk(ticket.blocks)
        return ticket.blocks

    def _forget_lost(self, ticket: FetchTicket) -> None:
        """Drops blocks from a request that were lost against policy while it waited."""
        lost = [self.lost(block, ticket.tier) for block in ticket.blocks]
        if not any(lost):
            return
        if ticket.hold:
            self._shorten(ticket, lost.index(True))
        else:
            for block in compress(ticket.blocks, lost):
                self.state.unclaim(block)
            ticket.blocks = [block for block, gone in zip(ticket.blocks, lost, strict=True) if not gone]

    def lost(self, block: Block, tier: Tier) -> bool:
        """Whether the block is lost or about to be: unindexed, bad in memory, or only in a tier that is being lost."""
        lost = bool(self.state.lost) and not self.state.lasting(block)
        return (lost and block.copies[tier] is None) or not block.indexed or self.state.spoiled(block)

    def _take(self, ticket: FetchTicket, *, present_only: bool) -> None:
        """Takes all destination slots in one step and plans the copies into them."""
        self._forget_lost(ticket)
        tier = ticket.tier
        claimed = ticket.blocks
        if present_only:
            if ticket.hold:
                absent = (n for n, block in enumerate(claimed) if block.copies[tier] is None)
                self._shorten(ticket, next(absent, len(claimed)))
            claimed = ticket.blocks
            members = [block for block in claimed if block.copies[tier] is not None]
        else:
            members = self._to_place(ticket)
        asked = set(claimed)
        ticket.waiting = False
        for block in members:
            if block.copies[tier] is None:
                self._fetch_one(ticket, block, asked=block in asked)
            self._join(ticket, block)
        for block in claimed:
            self.state.unclaim(block)
        if not ticket.hold:
            for block in claimed:
                self.flights.sink(block, tier)
            self._purge_present(claimed, tier)

    def _fetch_one(self, ticket: FetchTicket, block: Block, *, asked: bool) -> None:
        src = self.room.source(block)
        if ticket.hold:
            self.flights.start(block, src, ticket.tier, DEMAND)
        elif not asked:
            self.flights.start(block, src, ticket.tier, WRITE_THROUGH)
        else:
            cause = Cause.PREFETCH if src > ticket.tier else Cause.EXPLICIT
            self.flights.start(block, src, ticket.tier, cause)

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
            self.flights.await_copy(copy, ticket)
            ticket.pending += 1

    def _purge_present(self, blocks: Iterable[Block], tier: Tier) -> None:
        """Drops the idle upper copies of blocks that are in the tier: their demotion needs no copy."""
        bit = BITS[tier]
        for block in blocks:
            if not block.residency & bit or block.residency == bit:
                continue
            for above in self.state.above[tier]:
                upper = block.copies[above]
                if upper is not None and upper.still and block.claims == 0:
                    self.state.free_copy(block, above, Cause.EXPLICIT)

    # -- answering ---------------------------------------------------------------------------------------------------

    def _finish(self, ticket: FetchTicket, otherwise: RefusalReason) -> None:
        """Answers a fetch with the blocks that are READY now, or refuses it for the reason ``otherwise`` if they are
        too few."""
        if not ticket.hold:
            self._answer_move(ticket)
            return
        ready, tier = 0, ticket.tier
        for block, copy in zip(ticket.blocks, ticket.copies, strict=True):
            if not self.state.stands(block, tier, copy):
                break
            ready += 1
        if ready < max(ticket.min_blocks, 1):
            self.let_go(ticket)
            self._refuse(ticket, otherwise)
            return
        self._drop_holds(ticket, ready)
        lease = self._new_lease(ticket.session, self.state, ticket.tier)
        lease.held = dict(zip(ticket.blocks, ticket.copies, strict=True))
        slots = tuple(copy.slot for copy in ticket.copies)
        self._recorder.grant(Grant(ticket.id, lease.id, slots, ticket.found_in[:ready], ticket.matched, blocks=ready))
        ticket.blocks, ticket.copies = [], []

    def _answer_move(self, ticket: FetchTicket) -> None:
        tier = ticket.tier
        results = tuple(
            block is not None and block.indexed and (c := block.copies[tier]) is not None and c.valid
            for block in ticket.wanted
        )
        places = zip(ticket.wanted, results, strict=True)
        failed = frozenset(n for n, (block, there) in enumerate(places) if block in ticket.failed and not there)
        self.let_go(ticket)
        self._recorder.grant(Grant(ticket.id, None, results=results, failed=failed))

    def _give_up(self, ticket: Ticket) -> None:
        """Refuses a request that is in no queue and drops its claims. A move is answered with its results."""
        if isinstance(ticket, FetchTicket):
            if not ticket.hold:
                self._answer_move(ticket)
                return
            reason = RefusalReason.TIER_FULL if ticket.matched >= max(ticket.min_blocks, 1) else RefusalReason.TOO_SHORT
            if ticket.matched == 0 and ticket.min_blocks == 0:
                self._recorder.grant(Grant(ticket.id, None))
                return
            self.let_go(ticket)
            self._refuse(ticket, reason)
        else:
            self._refuse(ticket, RefusalReason.TIER_FULL)

    def _refuse(self, ticket: Ticket, reason: RefusalReason) -> None:
        wanted = ticket.count if isinstance(ticket, ReserveTicket) else max(ticket.min_blocks, 1)
        free = self.state.slots[ticket.tier].free
        matched = ticket.matched if isinstance(ticket, FetchTicket) else 0
        self._recorder.refuse(self._refusal(ticket, reason, wanted, free, matched))

    def let_go(self, ticket: FetchTicket) -> None:
        """Drops the claims or the holds of a fetch."""
        if ticket.waiting:
            for block in ticket.blocks:
                self.state.unclaim(block)
        else:
            for copy in ticket.copies:
                self.flights.forget(copy, ticket)
            self._drop_holds(ticket, 0)
        ticket.blocks, ticket.copies = [], []
        ticket.pending = 0
        ticket.waiting = False

    def _drop_holds(self, ticket: FetchTicket, keep: int) -> None:
        """Drops the holds of all blocks but the first ``keep``, tail first."""
        if ticket.hold:
            for block, copy in reversed(list(zip(ticket.blocks, ticket.copies, strict=True))[keep:]):
                if copy.holds > 0:
                    self.state.unhold(block, ticket.tier, copy)
        del ticket.blocks[keep:], ticket.copies[keep:]

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

    def obtainable(self, tier: Tier) -> int:
        """Largest number of slots that could be freed: all but blank, orphaned, quarantined and held slots."""
        if tier in self.state.lost:
            return 0
        slots = self.state.slots[tier]
        out = sum(slots.count(state) for state in (SLOT_BLANK, SLOT_ORPHANED, SLOT_QUARANTINED))
        return slots.capacity - out - self.state.held[tier]

    def readable(self, block: Block, tier: Tier, now: int) -> bool:
        """Whether the block's bytes are good, and it is in the tier, on its way there, or behind a usable edge."""
        if self.state.spoiled(block):
            return False
        return block.copies[tier] is not None or self.flights.usable(self.room.source(block), tier, now)

    def _holdable(self, ticket: FetchTicket) -> int:
        """Length of the prefix that the tier could hold at best."""
        tier = ticket.tier
        budget = self.obtainable(tier)
        for length, block in enumerate(ticket.blocks):
            copy = block.copies[tier]
            budget -= copy is None or copy.holds == 0
            if budget < 0:
                return length
        return len(ticket.blocks)

    def _fits(self, ticket: FetchTicket, free: int) -> int:
        """Length of the prefix that fits in these free slots."""
        for length, block in enumerate(ticket.blocks):
            free -= block.copies[ticket.tier] is None
            if free < 0:
                return length
        return len(ticket.blocks)

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

    def _shorten(self, ticket: FetchTicket, length: int) -> None:
        for block in ticket.blocks[length:]:
            self.state.unclaim(block)
        del ticket.blocks[length:]

    # -- start and loss of a tier ------------------------------------------------------------------------------------

    def open(
        self,
        recovered: Sequence[Recovered],
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
        blocks = recover(state, recovered)
        self.background.recovered(blocks)

    def refuse_offline(self, ticket: Ticket) -> None:
        """Refuses a request for a tier out of service. Copies in flight for the request end by themselves."""
        self.withdraw(ticket)
        self._refuse(ticket, RefusalReason.TIER_OFFLINE)
