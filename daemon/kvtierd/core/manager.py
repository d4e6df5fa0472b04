"""The block manager: one cache's blocks, leases and requests over all its window groups.

Pure and synchronous: no clock, thread, future or callback. Every mutating call returns an :class:`Outcome` to be
carried out whole (see ``core/outcome.py``) and may answer tickets of earlier calls in it. ``now`` is the wall clock in
nanoseconds. The service has validated the arguments: a call's keys are different, its tiers are the
cache's, its priorities and durations are in range. Here is checked what depends on leases and tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvtierd.core import explain, lookup, reclaim, removal
from kvtierd.core.acquires import Acquires, AcquireTicket
from kvtierd.core.errors import BadArgument, StillHeld, UnknownGroup
from kvtierd.core.events import Cause, EventSequencer
from kvtierd.core.explain import BlockNow
from kvtierd.core.ids import DISK, CacheId, GroupId, Key, LeaseId, MoveId, SessionId, SlotId, TicketId, Tier, Traits
from kvtierd.core.leases import FetchTicket, Lease, LeaseRecord, Leases, LeftLease, ReserveTicket, Ticket, holders_of
from kvtierd.core.outcome import MoveResult, Outcome, Recorder, Refusal, RefusalReason
from kvtierd.core.policy import GroupShape, Policy
from kvtierd.core.recovery import Recovered
from kvtierd.core.remote import Beyond
from kvtierd.core.removal import NEWEST, Drop
from kvtierd.core.retention import pairs
from kvtierd.core.transfers import (
    BlockResult,
    ChainRequest,
    CommitItem,
    Listing,
    Location,
    ManagerStats,
    Match,
    ResetReport,
)
from kvtierd.core.window import WindowManager

TierLoss = Mapping[GroupId, Iterator[None]]
"""What is left to do of a loss, by group."""


class BlockManager:
    """See the module. Errors are raised before anything has changed: ``BadArgument``, ``UnknownGroup``,
    ``UnknownLease``, ``ForeignLease``, ``TierOffline``."""

    def __init__(
        self,
        cache: CacheId,
        shapes: Sequence[GroupShape],
        sequencer: EventSequencer,
        policy: Policy | None = None,
    ) -> None:
        if len({shape.tokens_per_block for shape in shapes}) > 1:
            raise BadArgument("tokens_per_block", [s.tokens_per_block for s in shapes], "the same in all groups")
        policy = policy or Policy()
        self.cache = cache
        self._recorder = Recorder(cache, sequencer, policy)
        self._leases = Leases()
        self.leases: Mapping[LeaseId, Lease] = self._leases.live
        self.tickets: dict[TicketId, tuple[WindowManager, Ticket]] = {}
        self._moving: dict[MoveId, GroupId] = {}
        self._last_ticket = 0
        self.windows = {
            shape.group: WindowManager(shape, self._recorder, policy, self._leases.grant, self._refusal)
            for shape in shapes
        }
        self.acquires = Acquires(tuple(self.windows.values()), self._recorder, self._leases.grant, self._refusal)
        self.tiers: tuple[Tier, ...] = tuple(sorted({tier for w in self.windows.values() for tier in w.state.tiers}))
        states = {group: window.state for group, window in self.windows.items()}
        self.beyond = Beyond(states, self._recorder, self._take)
        self._capacity = {
            group: tuple((tier, window.state.slots[tier].capacity) for tier in window.state.tiers)
            for group, window in self.windows.items()
        }

    # -- opening -----------------------------------------------------------------------------------------------------

    def fill(
        self,
        recovered: Mapping[GroupId, Sequence[Recovered]],
        quarantined: Mapping[GroupId, Collection[SlotId]],
        corrupt: Mapping[GroupId, Sequence[Key]] | None = None,
        *,
        unclean: bool,
        restarted: bool = True,
    ) -> None:
        """Indexes what the tiers of a cache still hold; :meth:`announce` follows. It touches nothing but this manager,
        so while nobody else knows that, it may be any thread's.

        ``recovered``: parents before children, least recently used first among the rest. ``corrupt``: blocks that the
        disk no longer describes as they were written. A cache of an earlier life (``restarted``) is announced as
        cleared first, so that events alone stay the truth over a restart.
        """
        clear = (Cause.LOST if unclean else Cause.SHUTDOWN) if restarted else None
        for group, window in self.windows.items():
            lost = () if corrupt is None else corrupt.get(group, ())
            window.open(recovered.get(group, ()), quarantined.get(group, ()), lost, clear)

    def announce(self, now: int) -> Outcome:
        """The outcome of :meth:`fill`; event ids are given out here."""
        return self._take(now)

    def restore_lease(self, left: LeftLease, now: int) -> Outcome:
        """A lease from before a restart, right after :meth:`announce`. Like that of a session whose connection broke,
        it ends with its session."""
        window = self._window(left.group)
        window.holding.restore(self._leases.grant(left.session, window.state, left.tier), left.blank, left.keys)
        return self._take(now)

    def close(self) -> None:
        """Forgets all blocks, when the cache is removed; no call but a question for leases may follow. Any thread's.

        Without this, reference cycles would keep the blocks, and the collector does not look at old ones.
        """
        for window in self.windows.values():
            window.close()
        self.windows.clear()
        del self.acquires, self.beyond

    # -- lookups -----------------------------------------------------------------------------------------------------

    def match(self, groups: Sequence[GroupId], keys: Sequence[Key], tokens: bytes = b"", scope: bytes = b"") -> Match:
        """The longest prefix of a chain that ``groups`` (none = all) can serve together.

        ``tokens`` follow the keys: of one full group, where the prefix is the whole chain, the match names the block
        that begins with the longest run of them.
        """
        states = [self._window(group).state for group in groups or self.windows]
        length, spans = lookup.spans(states, keys)
        whole = tokens and length == len(keys)
        partial = lookup.partial(states[0], keys[-1] if keys else None, tokens, scope) if whole else None
        return Match(length, spans, partial)

    def locate(self, group: GroupId, keys: Sequence[Key]) -> list[Location]:
        return lookup.locate(self._window(group).state, keys)

    def checksum(self, group: GroupId, key: Key) -> bytes:
        """Of a block's bytes when it was committed; empty where nobody said."""
        return lookup.checksum(self._window(group).state, key)

    def attributes(self, group: GroupId, key: Key) -> tuple[Key | None, Traits] | None:
        """A block's parent and traits; None where it is not indexed."""
        return lookup.attributes(self._window(group).state, key)

    def listing(self, group: GroupId, page: int, limit: int) -> Listing:
        """Indexed blocks in the order of indexing, parents before children."""
        return lookup.listing(self._window(group).state, page, limit)

    def explain(self, group: GroupId, key: Key) -> BlockNow | None:
        """Where a block is and what holds it; None where the key is not indexed."""
        return explain.explain(self._window(group).state, self.leases.values(), key)

    def stats(self) -> ManagerStats:
        return explain.stats(self.windows, self.leases.values(), self.acquires)

    def session_leases(self, session: SessionId) -> int:
        return self._leases.count(session)

    def held_by(self, session: SessionId) -> int:
        """Slots under the session's leases."""
        return sum(lease.slots for lease in self._leases.of(session))

    def blank_of(self, session: SessionId, group: GroupId, tier: Tier) -> int:
        """Slots that it holds to write."""
        leases = (lease for lease in self._leases.of(session) if lease.group == group and lease.tier is tier)
        return sum(len(lease.blank) for lease in leases)

    def lease_records(self) -> list[LeaseRecord]:
        """Every lease there is, the oldest first."""
        return [LeaseRecord.of(lease) for lease in self.leases.values()]

    def take_disk_uses(self) -> dict[GroupId, list[Key]]:
        """Disk blocks used since the last call, by group, in the order of their last use: for the disk to remember."""
        uses = {group: window.state.take_disk_uses() for group, window in self.windows.items()}
        return {group: keys for group, keys in uses.items() if keys}

    def take_restated(self) -> dict[GroupId, list[tuple[Key, Traits]]]:
        """Disk blocks whose retention has changed since the last call: for the disk to remember."""
        changed = {group: window.state.clocks.take_restated() for group, window in self.windows.items()}
        return {group: [(b.key, b.traits) for b in blocks] for group, blocks in changed.items() if blocks}

    # -- leases ------------------------------------------------------------------------------------------------------

    def reserve(self, session: SessionId, group: GroupId, tier: Tier, count: int, now: int) -> tuple[TicketId, Outcome]:
        """Asks for ``count`` blank slots, all or nothing."""
        window = self._window(group)
        window.state.require(tier)
        ticket = ReserveTicket(self._next_ticket(), session, tier, count)
        self.tickets[ticket.id] = (window, ticket)
        window.reserve(ticket)
        self._pump(now, window)
        return ticket.id, self._take(now)

    def commit(
        self,
        session: SessionId,
        lease: LeaseId,
        items: Sequence[CommitItem],
        now: int,
        *,
        hold: bool = True,
        release: bool = False,
        cause: Cause = Cause.COMMIT,
    ) -> tuple[tuple[BlockResult, ...], Outcome]:
        """Turns blank slots into blocks. Where an equal key is indexed, that block stays and the lease lets go of the
        slot; where the parent is not, the slot stays blank. ``hold``: the lease holds the new blocks. ``release``: the
        lease ends, as by :meth:`release`."""
        owned = self._leases.owned(session, lease)
        window = self.windows[owned.group]
        window.state.require(owned.tier)
        results = window.holding.store(owned, items, hold=hold and not release, cause=cause)
        if release:
            self._end(owned)
        self._pump(now, window)
        return results, self._take(now)

    def acquire(
        self,
        session: SessionId,
        groups: Sequence[GroupId],
        tier: Tier,
        chains: Sequence[ChainRequest],
        now: int,
    ) -> tuple[tuple[TicketId, ...], Outcome]:
        """Asks for the longest prefix of each chain that ``groups`` can serve, READY and held in a tier.

        All matches of the call are claimed before room is made for any, so none evicts another's hit.

        Args:
            groups: window groups; none = all. Each holds the blocks that attention over it needs of the prefix.
        Returns: One ticket a chain.
        """
        windows = [self._window(group) for group in groups or self.windows]
        windows[0].state.require(tier)  # a tier is lost for all groups
        tickets = [self.acquires.match(self._next_ticket(), session, windows, tier, chain, now) for chain in chains]
        for ticket in tickets:
            self.acquires.queue(ticket, now)
        self._pump_all(now)
        return tuple(ticket.id for ticket in tickets), self._take(now)

    def join(self, session: SessionId, lease: LeaseId, now: int) -> tuple[Lease, Outcome]:
        """A lease of this session over what another lease holds. A blank slot becomes free with the last lease over it,
        and a block that one of them makes is held by all. The caller has seen that the lease lives."""
        shared = self._leases.live[lease]
        window = self.windows[shared.group]
        joined = self._leases.grant(session, window.state, shared.tier)
        window.holding.join(shared, joined)
        self._pump(now, window)
        return joined, self._take(now)

    def release(
        self, session: SessionId, leases: Sequence[LeaseId], now: int, slots: Collection[SlotId] = ()
    ) -> Outcome:
        """Ends leases, all of them or, on an error, none. ``slots``: lets go of only these of a single lease, which
        goes on; those that it does not hold any more are passed over."""
        if slots and len(leases) != 1:
            raise BadArgument("lease_ids", len(leases), "one lease, of which slots are named")
        if len(set(leases)) != len(leases):
            raise BadArgument("lease_ids", list(leases), "each lease once")
        owned = [self._leases.owned(session, lease) for lease in leases]
        for one in owned:
            if slots:
                self.windows[one.group].holding.give_back(one, frozenset(slots))
            else:
                self._end(one)
        self._pump_all(now)
        return self._take(now)

    def asked(self, group: GroupId, queried: int, found: int) -> None:
        self._window(group).uses.asked(queried, found)

    def touch(self, group: GroupId, keys: Sequence[Key], now: int) -> Outcome:
        """Blocks were read, the least recently read first: recency, and what else follows from a use, as by an acquire.

        Of a full-attention group a key stands for its whole prefix. Keys that are not indexed are passed over. Blocks
        beyond the bound of a call, counted from the last key back, become more recent, and that is all.
        """
        window = self._window(group)
        window.uses.touch(keys)
        self._pump(now, window)
        return self._take(now)

    def lose_bytes(self, group: GroupId, key: Key, tier: Tier, slot: SlotId, now: int) -> Outcome:
        """The block's bytes in this slot are not what was committed: it loses the copy. Nothing happens where the
        block has left the slot."""
        window = self._window(group)
        block = window.state.index.get(key)
        copy = block.copies[tier] if block is not None else None
        if block is not None and copy is not None and copy.valid and copy.slot == slot:
            removal.lose_bytes(window.state, block, tier, copy)
            self._pump(now, window)
        return self._take(now)

    # -- moves -------------------------------------------------------------------------------------------------------

    def move(
        self, session: SessionId, group: GroupId, to: Tier, keys: Sequence[Key], now: int
    ) -> tuple[TicketId, Outcome]:
        """Asks for blocks to be READY in a tier without holding them; idle copies above it go. The grant's results say
        of which keys that is true. What comes up is taken as used: what is fetched ahead of need is not the next to
        go."""
        window = self._window(group)
        window.state.require(to)
        wanted = tuple(window.state.index.get(key) for key in keys)
        blocks = [block for block in wanted if block is not None]
        ticket = FetchTicket(self._next_ticket(), session, to, blocks, wanted=wanted)
        self.tickets[ticket.id] = (window, ticket)
        for block in blocks:
            window.state.claim(block)
        upwards = [block for block in blocks if not block.residency & (2 * to.bit - 1)]
        window.state.touch(reversed(upwards))
        window.move(ticket)
        self._pump(now, window)
        return ticket.id, self._take(now)

    def drop(
        self,
        session: SessionId,
        group: GroupId,
        keys: Sequence[Key],
        now: int,
        *,
        dry_run: bool = False,
        following: Drop | None = None,
    ) -> tuple[Drop, Outcome]:
        """Forgets blocks and everything under them, a slice a call: for the next one, until it has its report,
        ``following`` is what this one returned. Refused for those of which any part is leased, pinned or claimed; if
        that comes about between two slices, the part stays with all that it stands on, and what had gone is gone.

        ``dry_run``: says so, and changes nothing.
        """
        window = self._window(group)
        drop = following or Drop(window.state, keys, dry_run=dry_run)
        drop.go_on()
        if not dry_run:
            self._pump(now, window)
        return drop, self._take(now)

    def pin(
        self, session: SessionId, group: GroupId, tier: Tier, keys: Sequence[Key], now: int, *, unpin: bool = False
    ) -> tuple[tuple[BlockResult, ...], Outcome]:
        """Keeps copies that are READY in a tier there, or ends that. Pins count, and are nobody's: who pinned may be
        gone when another unpins."""
        window = self._window(group)
        window.state.require(tier)
        results = reclaim.pin(window.state, tier, keys, unpin=unpin)
        self._pump(now, window)
        return results, self._take(now)

    def reset(
        self, session: SessionId, now: int, *, force: bool, following: tuple[GroupId, int] | None = None
    ) -> tuple[ResetReport, Outcome]:
        """Forgets the blocks of all groups, a slice of them a call: for the next slice, ``following`` is the report's.

        Raises :class:`StillHeld` at the first slice while anything is leased or pinned, unless forced; then what is, or
        is waited for, stays, with all that it stands on. Blocks committed after the first slice stay, too.
        """
        if following is None:
            if not force:
                self._require_unheld()
            following = (min(self.windows), NEWEST)
        group, before = following
        dropped, kept, before, roots = removal.reset(self.windows[group].state, before)
        later = [other for other in self.windows if other > group]
        going_on = (group, before) if before else (min(later), NEWEST) if later else None
        self._pump_all(now)
        return ResetReport(dropped, kept, going_on, tuple((group, key) for key in roots)), self._take(now)

    def reset_plan(self) -> ResetReport:
        """What a forced reset would do."""
        blocks = sum(len(window.state.index) for window in self.windows.values())
        held = ((block, lease.tier, copy) for lease in self.leases.values() for block, copy in lease.held.items())
        leased = [block for block, tier, copy in held if block.copies[tier] is copy]
        waited = [b for _, t in self.tickets.values() if isinstance(t, FetchTicket) for b in t.blocks]
        acquired = [b for ticket in self.acquires.tickets.values() for part in ticket.parts for b in part.fetch.blocks]
        pinned = [block for window in self.windows.values() for block in window.state.pins.blocks()]
        kept = removal.kept([*leased, *waited, *acquired, *pinned])
        return ResetReport(blocks - kept, kept)

    def _require_unheld(self) -> None:
        states = (window.state for window in self.windows.values())
        pinned = sum(state.pins.slots(tier) for state in states for tier in state.tiers)
        holders = holders_of(self.leases.values())  # a lease may have let go of all that it had
        if holders or pinned:
            raise StillHeld(holders, pinned)

    def plan_move(self, group: GroupId, to: Tier, keys: Sequence[Key]) -> tuple[BlockResult, ...]:
        """What a move of these blocks could do at best, from what is held now."""
        window = self._window(group)
        window.state.require(to)
        return window.plan(to, keys)

    def set_retention(
        self,
        session: SessionId,
        group: GroupId,
        keys: Sequence[Key],
        priorities: Sequence[int],
        durations_ms: Sequence[int],
        now: int,
    ) -> tuple[tuple[BlockResult, ...], Outcome]:
        """New priorities and durations (none at all: for ever) for stored blocks; see ``core/retention.py``."""
        window = self._window(group)
        results = window.set_retention(keys, pairs(priorities, durations_ms))
        self._pump(now, window)
        return results, self._take(now)

    # -- tickets and sessions ----------------------------------------------------------------------------------------

    def expire(self, ticket: TicketId, now: int) -> Outcome:
        """The ticket's deadline passed: a grant of what there is, or a refusal. Nothing, if it was answered."""
        if ticket in self.tickets:
            window, request = self.tickets[ticket]
            window.expire(request)
            self._pump(now, window)
        elif ticket in self.acquires.tickets:
            self.acquires.expire(self.acquires.tickets[ticket])
            self._pump_all(now)
        return self._take(now)

    def cancel(self, ticket: TicketId, now: int) -> Outcome:
        """The ticket's caller went away: nothing stays held and no answer comes. Nothing, if it was answered."""
        if ticket in self.tickets:
            window, request = self.tickets.pop(ticket)
            window.withdraw(request)
            self._pump(now, window)
        elif ticket in self.acquires.tickets:
            self.acquires.withdraw(self.acquires.tickets[ticket])
            self._pump_all(now)
        return self._take(now)

    def orphan_session(self, session: SessionId, now: int) -> Outcome:
        """Its connection broke while its process lives: it may still write, so its blank slots stay out of
        circulation."""
        self._withdraw_tickets(session)
        for lease in self._leases.of(session):
            self.windows[lease.group].holding.orphan(lease, True)
        self._pump_all(now)
        return self._take(now)

    def reattach_session(self, session: SessionId, now: int) -> Outcome:
        for lease in self._leases.of(session):
            self.windows[lease.group].holding.orphan(lease, False)
        return self._take(now)

    def disown_session(self, session: SessionId, now: int) -> Outcome:
        """It was ended while its process lives: of all that it held only its blank slots stay, out of circulation."""
        for lease in self._leases.of(session):
            if lease.blank:
                self.windows[lease.group].holding.give_back(lease, lease.all_slots().difference(lease.blank))
            else:
                self._end(lease)
        return self.orphan_session(session, now)

    def end_session(self, session: SessionId, now: int) -> Outcome:
        """Its process is gone, or it said goodbye: everything that it held is given back."""
        self._withdraw_tickets(session)
        for lease in self._leases.of(session):
            self._end(lease)
        self._pump_all(now)
        return self._take(now)

    # -- the mover's reports -----------------------------------------------------------------------------------------

    def completed(self, results: Sequence[MoveResult], now: int) -> Outcome:
        """Applies the results of moves, each of which was planned by an earlier outcome and is reported once."""
        for result in results:
            self.windows[self._moving.pop(result.id)].completed(result, now)
        self._pump_all(now)
        return self._take(now)

    def tick(self, now: int) -> Outcome:
        """Time has passed: retentions expire, and failing edges may be tried again."""
        for window in self.windows.values():
            window.state.expire(now)
            window.state.retire_again(now)
        self._pump_all(now)
        return self._take(now)

    @property
    def behind(self) -> bool:
        """Calls have left something to be done, by :meth:`go_on` or by whatever is called next."""
        return any(window.state.behind for window in self.windows.values())

    def go_on(self, now: int) -> Outcome:
        """A slice of what calls have left: uses and priorities that reach the ancestors of blocks, and the loss of what
        cannot do without lost bytes."""
        for window in self.windows.values():
            removal.lose_on(window.state)
        self._pump_all(now)
        return self._take(now)

    def lose_tier(self, tier: Tier, now: int, following: TierLoss | None = None) -> tuple[TierLoss | None, Outcome]:
        """The tier has failed: no slot is given out there, requests that wait for one are refused, and its copies of
        blocks go, a slice a call. ``following``: the first value that the last call returned, None at first; it
        returns None at the end."""
        for window, ticket in list(self.tickets.values()):
            if ticket.tier is tier:
                window.refuse_offline(ticket)
        for acquire in list(self.acquires.tickets.values()):
            if acquire.tier is tier:
                self.acquires.refuse(acquire, RefusalReason.TIER_OFFLINE)
        states = {group: window.state for group, window in self.windows.items() if tier in window.state.slots}
        left = following or {group: removal.lose_tier(state, tier) for group, state in states.items()}
        left = {group: steps for group, steps in left.items() if not removal.advance(states[group], steps)}
        self._pump_all(now)
        return left or None, self._take(now)

    def restore_disk(self, now: int) -> Outcome:
        """The disk is back; its store has been emptied by the caller."""
        for window in self.windows.values():
            if DISK in window.state.lost:
                removal.restore_disk(window.state)
        self._pump_all(now)
        return self._take(now)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _take(self, now: int) -> Outcome:
        for window in self.windows.values():
            window.state.stamp(now)
        outcome = self._recorder.take(now, self._capacity)
        if self._leases.unstamped:
            self._leases.stamp(now)
        for grant in outcome.grants:
            self.tickets.pop(grant.ticket, None)
        for refusal in outcome.refusals:
            self.tickets.pop(refusal.ticket, None)
        for move in outcome.moves:
            self._moving[move.id] = move.group
        return outcome

    def _pump(self, now: int, window: WindowManager) -> None:
        """Serves those who wait in one group, whose state has changed."""
        if self.acquires.tickets:
            self._pump_all(now)
        else:
            window.pump(now)

    def _pump_all(self, now: int) -> None:
        """Serves those who wait, until nobody gets anywhere."""
        acquires = self.acquires
        if acquires.tickets:
            acquires.refresh(now)
        while True:
            for window in self.windows.values():
                window.pump(now)
            if not acquires.tickets or not acquires.advance(now):
                return

    def _next_ticket(self) -> TicketId:
        self._last_ticket += 1
        return TicketId(self._last_ticket)

    def _end(self, lease: Lease) -> None:
        self.windows[lease.group].holding.give_back(lease, lease.all_slots())
        self._leases.forget(lease)

    def _withdraw_tickets(self, session: SessionId) -> None:
        for ticket, (window, request) in list(self.tickets.items()):
            if request.session == session:
                del self.tickets[ticket]
                window.withdraw(request)
        for acquire in [acquire for acquire in self.acquires.tickets.values() if acquire.session == session]:
            self.acquires.withdraw(acquire)

    def _refusal(
        self, ticket: Ticket | AcquireTicket, reason: RefusalReason, wanted: int, free: int, matched: int
    ) -> Refusal:
        holders = holders_of(lease for lease in self.leases.values() if lease.tier is ticket.tier)
        return Refusal(ticket.id, reason, ticket.tier, wanted, free, holders, matched)

    def _window(self, group: GroupId) -> WindowManager:
        window = self.windows.get(group)
        if window is None:
            raise UnknownGroup(group)
        return window
