"""The block manager: one cache's blocks, leases and requests over all its window groups.

Pure and synchronous: no clock, thread, future or callback. Every mutating call returns an :class:`Outcome` to be
carried out whole (see ``core/outcome.py``), which may also answer tickets of earlier calls. ``now`` is the wall clock
in nanoseconds. The service has validated the arguments: a call's keys are different, its tiers are the cache's, its
priorities and durations are in range. This module checks the rest, which depends on leases and tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvtierd.core import explain, lookup, reclaim, removal
from kvtierd.core.acquires import Acquires, AcquireTicket
from kvtierd.core.conversations import Kept
from kvtierd.core.errors import BadArgument, ResetRefused, UnknownGroup
from kvtierd.core.events import Cause, EventSequencer
from kvtierd.core.explain import BlockNow
from kvtierd.core.ids import DISK, CacheId, GroupId, Key, LeaseId, MoveId, SessionId, SlotId, TicketId, Tier, Traits
from kvtierd.core.index import Departure
from kvtierd.core.leases import FetchTicket, LeaseTable, LeftLease, ReserveTicket, SlotLease, Ticket, holders_of
from kvtierd.core.outcome import MoveResult, Outcome, Recorder, Refusal, RefusalReason
from kvtierd.core.policy import GroupShape, Policy
from kvtierd.core.recovery import RecoveredBlock
from kvtierd.core.remote import CacheRemote
from kvtierd.core.removal import NEWEST, Drop
from kvtierd.core.retention import pairs
from kvtierd.core.transfers import (
    BlockResult,
    BlockSlots,
    ChainRequest,
    CommitItem,
    Listing,
    ManagerStats,
    PrefixMatch,
    ResetResult,
)
from kvtierd.core.window import WindowManager


class BlockManager:
    """See the module. Errors are raised before anything has changed: ``BadArgument``, ``UnknownGroup``,
    ``UnknownLease``, ``ForeignLease``, ``TierOutOfService``."""

    def __init__(
        self, cache: CacheId, shapes: Sequence[GroupShape], sequencer: EventSequencer, policy: Policy | None = None
    ) -> None:
        if len({shape.tokens_per_block for shape in shapes}) > 1:
            raise BadArgument("tokens_per_block", [s.tokens_per_block for s in shapes], "the same in all groups")
        policy = policy or Policy()
        self.cache = cache
        self._recorder = Recorder(cache, sequencer, policy)
        self._leases = LeaseTable()
        self.leases: Mapping[LeaseId, SlotLease] = self._leases.live
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
        leading = next((state for state in states.values() if state.attention.chained), states[min(states)])
        self.leading = leading.group
        """The first group whose blocks form chains. A hint names blocks of this group, and means all groups."""
        self.conversations = leading.conversations
        self.remote = CacheRemote(states, self._recorder, self._take)
        self._capacity = {
            group: tuple((tier, window.state.slots[tier].capacity) for tier in window.state.tiers)
            for group, window in self.windows.items()
        }

    # -- opening -----------------------------------------------------------------------------------------------------

    def fill(
        self,
        recovered: Mapping[GroupId, Sequence[RecoveredBlock]],
        quarantined: Mapping[GroupId, Collection[SlotId]],
        corrupt: Mapping[GroupId, Sequence[Key]] | None = None,
        *,
        unclean: bool,
        restarted: bool = True,
    ) -> None:
        """Indexes the blocks that a cache's tiers still hold; :meth:`announce` follows. Any thread may call this while
        no other thread knows the manager: the call touches nothing else.

        ``recovered``: parents before children, otherwise least recently used first. ``corrupt``: blocks whose disk
        record is not as it was written. A cache from before a restart (``restarted``) is announced as cleared first, so
        that events alone describe the cache across the restart.
        """
        clear = (Cause.LOST if unclean else Cause.SHUTDOWN) if restarted else None
        for group, window in self.windows.items():
            lost = () if corrupt is None else corrupt.get(group, ())
            window.open(recovered.get(group, ()), quarantined.get(group, ()), lost, clear)

    def announce(self, now: int) -> Outcome:
        """Returns the outcome of :meth:`fill`. Event ids are assigned here."""
        return self._take(now)

    def restore_lease(self, left: LeftLease, now: int) -> Outcome:
        """Restores an orphaned lease, which ends with its session, right after :meth:`announce`."""
        window = self._window(left.group)
        window.holds.restore(self._leases.grant(left.session, window.state, left.tier), left.blank, left.keys)
        return self._take(now)

    def close(self) -> None:
        """Forgets all blocks of a removed cache. Only lease look-ups may follow. Any thread may call this.

        Without this, reference cycles would keep the blocks, and the garbage collector skips old objects.
        """
        for window in self.windows.values():
            window.close()
        self.windows.clear()
        del self.acquires, self.remote, self.conversations

    # -- lookups -----------------------------------------------------------------------------------------------------

    def match(
        self, groups: Sequence[GroupId], keys: Sequence[Key], tokens: bytes = b"", scope: bytes = b""
    ) -> PrefixMatch:
        """The longest prefix of a chain that ``groups`` (none = all) can serve together.

        ``tokens`` follow the keys: where the prefix is the whole chain, the match names the block that begins with the
        longest run of them. The groups are full, at least one of them, and sliding.
        """
        states = [self._window(group).state for group in groups or self.windows]
        length, spans = lookup.spans(states, keys)
        whole = tokens and length == len(keys)
        partial = lookup.partial(states, keys[-1] if keys else None, tokens, scope) if whole else None
        return PrefixMatch(length, spans, partial)

    def locate(self, group: GroupId, keys: Sequence[Key]) -> list[BlockSlots]:
        return lookup.locate(self._window(group).state, keys)

    def checksum(self, group: GroupId, key: Key) -> bytes:
        """Checksum of a block's bytes at commit; empty if none was given or the block is not indexed."""
        block = self._window(group).state.index.get(key)
        label = None if block is None else block.traits.label
        return b"" if label is None else label.checksum

    def attributes(self, group: GroupId, key: Key) -> tuple[Key | None, Traits] | None:
        """A block's parent and traits; None if the block is not indexed."""
        block = self._window(group).state.index.get(key)
        return None if block is None else (block.parent_key, block.traits)

    def listing(self, group: GroupId, page: int, limit: int) -> Listing:
        """Indexed blocks in the order of indexing, parents before children."""
        return lookup.listing(self._window(group).state, page, limit)

    def explain(self, group: GroupId, key: Key) -> BlockNow | None:
        """Reports a block's copies and holders; None if the key is not indexed."""
        return explain.explain(self._window(group).state, self.leases.values(), key)

    def departure(self, group: GroupId, key: Key) -> Departure | None:
        """Why the block last left the group; None if it is not indexed, and that is not known."""
        state = self._window(group).state
        return state.departed.get(key) if state.index.get(key) is None else None

    def stats(self) -> ManagerStats:
        return explain.stats(self.windows, self.leases.values(), self.acquires)

    def session_leases(self, session: SessionId) -> int:
        return self._leases.count(session)

    def held_by(self, session: SessionId) -> int:
        return sum(lease.slots for lease in self._leases.of(session))

    def blank_of(self, session: SessionId, group: GroupId, tier: Tier) -> int:
        """Number of slots that the session holds to write."""
        leases = (lease for lease in self._leases.of(session) if lease.group == group and lease.tier is tier)
        return sum(len(lease.blank) for lease in leases)

    def take_disk_uses(self) -> dict[GroupId, list[Key]]:
        """Returns disk blocks used since the last call, by group and in order of last use, for the disk to record."""
        uses = {group: window.state.take_disk_uses() for group, window in self.windows.items()}
        return {group: keys for group, keys in uses.items() if keys}

    def take_restated(self) -> dict[GroupId, list[tuple[Key, Traits]]]:
        """Returns disk blocks whose retention has changed since the last call, for the disk to record."""
        changed = {group: window.state.clocks.take_restated() for group, window in self.windows.items()}
        return {group: [(b.key, b.traits) for b in blocks] for group, blocks in changed.items() if blocks}

    # -- leases ------------------------------------------------------------------------------------------------------

    def reserve(
        self, session: SessionId, group: GroupId, tier: Tier, count: int, now: int, after: Key | None = None
    ) -> tuple[TicketId, Outcome]:
        """Asks for ``count`` blank slots, all or nothing. No room is made by dropping ``after`` or its ancestors."""
        window = self._window(group)
        window.state.require(tier)
        ticket = ReserveTicket(self._next_ticket(), session, tier, count, after)
        self.tickets[ticket.id] = (window, ticket)
        window.reserve(ticket)
        return ticket.id, self._outcome(now)

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
        conversation: bytes = b"",
    ) -> tuple[tuple[BlockResult, ...], Outcome]:
        """Turns blank slots into blocks. If the key is indexed, the existing block stays and the lease lets go of the
        slot; if the parent is not indexed, the slot stays blank. ``hold``: the lease holds the new blocks. ``release``:
        the lease ends, as by :meth:`release`. ``conversation``: has got as far as the last block."""
        owned = self._leases.owned(session, lease)
        window = self.windows[owned.group]
        window.state.require(owned.tier)
        window.state.now = now
        results = window.holds.store(owned, items, hold=hold and not release, cause=cause)
        if conversation and items and window.state.conversations is self.conversations:
            self.conversations.reach(session, conversation, items[-1].key, now)
        if release:
            self._end(owned)
        return results, self._outcome(now)

    def lease_ahead(
        self, session: SessionId, group: GroupId, tier: Tier, count: int, after: Key, now: int
    ) -> tuple[SlotLease | None, Outcome]:
        """See :meth:`WindowManager.lease_ahead`. Call right after the session's :meth:`commit`."""
        window = self._window(group)
        lease = window.lease_ahead(session, tier, count, after, now)
        return lease, self._take(now)

    def acquire(
        self, session: SessionId, groups: Sequence[GroupId], tier: Tier, chains: Sequence[ChainRequest], now: int
    ) -> tuple[tuple[TicketId, ...], Outcome]:
        """Asks for the longest prefix of each chain that ``groups`` can serve, READY and held in a tier.

        All matches of the call are claimed before room is made for any, so none evicts another's hit.

        Args:
            groups: window groups; none = all. Each holds the blocks that attention over it needs of the prefix.
        Returns: A ticket per chain.
        """
        windows = [self._window(group) for group in groups or self.windows]
        windows[0].state.require(tier)  # a tier is lost for all groups
        for window in windows:
            window.state.now = now
        tickets = [self.acquires.match(self._next_ticket(), session, windows, tier, chain, now) for chain in chains]
        for ticket, chain in zip(tickets, chains, strict=True):
            if chain.conversation and ticket.matched:
                self.conversations.reach(session, chain.conversation, chain.keys[ticket.matched - 1], now)
            self.acquires.queue(ticket, now)
        return tuple(ticket.id for ticket in tickets), self._outcome(now)

    def join(self, session: SessionId, lease: LeaseId, now: int) -> tuple[SlotLease, Outcome]:
        """Makes a lease of this session over the slots and blocks of another lease. A blank slot is freed with its last
        lease. If one lease commits a slot as a block, the other leases hold the block. The caller has checked that the
        lease lives."""
        shared = self._leases.live[lease]
        window = self.windows[shared.group]
        joined = self._leases.grant(session, window.state, shared.tier)
        window.holds.join(shared, joined)
        return joined, self._outcome(now)

    def release(
        self, session: SessionId, leases: Sequence[LeaseId], now: int, slots: Collection[SlotId] = ()
    ) -> Outcome:
        """Ends leases: all of them or, on an error, none. ``slots``: lets go of only these slots of a single lease,
        which goes on; slots that the lease no longer holds are skipped."""
        if slots and len(leases) != 1:
            raise BadArgument("lease_ids", len(leases), "one lease, of which slots are named")
        if len(set(leases)) != len(leases):
            raise BadArgument("lease_ids", list(leases), "each lease once")
        owned = [self._leases.owned(session, lease) for lease in leases]
        for one in owned:
            if slots:
                self.windows[one.group].holds.give_back(one, frozenset(slots))
            else:
                self._end(one)
        return self._outcome(now)

    def asked(self, group: GroupId, queried: int, found: int) -> None:
        self._window(group).use_counts.asked(queried, found)

    def touch(self, group: GroupId, keys: Sequence[Key], now: int) -> Outcome:
        """Records that blocks were read, least recently read first. Has all effects of a use, like an acquire.

        In a full-attention group a key stands for its whole prefix. Keys that are not indexed are skipped. Blocks
        beyond the limit of a call, counted from the last key back, only become more recent.
        """
        window = self._window(group)
        window.state.now = now
        window.use_counts.touch(keys)
        return self._outcome(now)

    def lose_bytes(self, group: GroupId, key: Key, tier: Tier, slot: SlotId, now: int) -> Outcome:
        """Makes a block lose a copy whose bytes are not the committed bytes, if it is still in this slot."""
        window = self._window(group)
        block = window.state.index.get(key)
        copy = block.copies[tier] if block is not None else None
        if block is not None and copy is not None and copy.valid and copy.slot == slot:
            removal.lose_bytes(window.state, block, tier, copy)
        return self._outcome(now)

    # -- moves -------------------------------------------------------------------------------------------------------

    def move(
        self, session: SessionId, group: GroupId, to: Tier, keys: Sequence[Key], now: int, cause: Cause | None = None
    ) -> tuple[TicketId, Outcome]:
        """Asks for blocks to be READY in a tier, without holding them; idle copies above the tier go. The grant's
        results say which keys are READY. Blocks that come up are touched, so that a prefetched block is not the next
        victim."""
        window = self._window(group)
        window.state.require(to)
        wanted = tuple(window.state.index.get(key) for key in keys)
        blocks = [block for block in wanted if block is not None]
        ticket = FetchTicket(self._next_ticket(), session, to, blocks, wanted=wanted, cause=cause)
        self.tickets[ticket.id] = (window, ticket)
        for block in blocks:
            window.state.claim(block)
        upwards = [block for block in blocks if not block.residency & (2 * to.bit - 1)]
        window.state.touch(reversed(upwards))
        window.move(ticket)
        return ticket.id, self._outcome(now)

    def drop(
        self, group: GroupId, keys: Sequence[Key], now: int, *, dry_run: bool = False, following: Drop | None = None
    ) -> tuple[Drop, Outcome]:
        """Drops blocks with their subtrees, a slice a call: until the returned :class:`Drop` has its report, pass it to
        the next call as ``following``. A subtree of which any block is leased, pinned or claimed is refused. If a block
        is held between two slices, it stays with its ancestors.

        ``dry_run``: reports without changing anything.
        """
        window = self._window(group)
        drop = following or Drop(window.state, keys, dry_run=dry_run)
        drop.go_on()
        return drop, self._take(now) if dry_run else self._outcome(now)

    def pin(
        self, group: GroupId, tier: Tier, keys: Sequence[Key], now: int, *, unpin: bool = False
    ) -> tuple[tuple[BlockResult, ...], Outcome]:
        """Pins copies that are READY in a tier, or unpins them. Pins are counted and have no owner: a session may unpin
        for another that is gone."""
        window = self._window(group)
        window.state.require(tier)
        results = reclaim.pin(window.state, tier, keys, unpin=unpin)
        return results, self._outcome(now)

    def reset(
        self, now: int, *, force: bool, following: tuple[GroupId, int] | None = None
    ) -> tuple[ResetResult, Outcome]:
        """Removes the blocks of all groups, a slice a call: pass the report's ``following`` to the next call.

        Raises :class:`ResetRefused` at the first slice while anything is leased or pinned, unless forced. A forced
        reset keeps blocks that are held, pinned or claimed, with their ancestors. Blocks committed after the first
        slice stay.
        """
        if following is None:
            if not force:
                self._require_unheld()
            following = (min(self.windows), NEWEST)
        group, before = following
        dropped, kept, before, roots = removal.reset(self.windows[group].state, before)
        later = [other for other in self.windows if other > group]
        going_on = (group, before) if before else (min(later), NEWEST) if later else None
        return ResetResult(dropped, kept, going_on, tuple((group, key) for key in roots)), self._outcome(now)

    def reset_plan(self) -> ResetResult:
        """Predicts the report of a forced reset."""
        blocks = sum(len(window.state.index) for window in self.windows.values())
        held = ((block, lease.tier, copy) for lease in self.leases.values() for block, copy in lease.held.items())
        leased = [block for block, tier, copy in held if block.copies[tier] is copy]
        waited = [b for _, t in self.tickets.values() if isinstance(t, FetchTicket) for b in t.blocks]
        acquired = [b for ticket in self.acquires.tickets.values() for part in ticket.parts for b in part.fetch.blocks]
        pinned = [block for window in self.windows.values() for block in window.state.pins.blocks()]
        kept = removal.kept([*leased, *waited, *acquired, *pinned])
        return ResetResult(blocks - kept, kept)

    def _require_unheld(self) -> None:
        states = (window.state for window in self.windows.values())
        pinned = sum(state.pins.slots(tier) for state in states for tier in state.tiers)
        ahead = [lease for window in self.windows.values() for leases in window.ahead.values() for lease in leases]
        # Without leases that hold nothing any more.
        holders = holders_of(lease for lease in self.leases.values() if lease.id not in ahead)
        if holders or pinned:
            raise ResetRefused(holders, pinned)

    def plan_move(self, group: GroupId, to: Tier, keys: Sequence[Key]) -> tuple[BlockResult, ...]:
        """Predicts the best results that a move of these blocks could have, from the present holds."""
        window = self._window(group)
        window.state.require(to)
        return window.plan(to, keys)

    def set_retention(
        self,
        group: GroupId,
        keys: Sequence[Key],
        priorities: Sequence[int],
        durations_ms: Sequence[int],
        now: int,
        cause: Cause = Cause.EXPLICIT,
    ) -> tuple[tuple[BlockResult, ...], Outcome]:
        """Sets priorities and durations (no durations: for ever) of indexed blocks; see ``core/retention.py``."""
        window = self._window(group)
        results = window.set_retention(keys, pairs(priorities, durations_ms), cause)
        return results, self._outcome(now)

    def keep(self, conversation: bytes, kept: Kept, now: int) -> Outcome:
        """Retains the blocks of a conversation."""
        self.conversations.keep(conversation, kept, now)
        return self._outcome(now)

    def end(self, keys: Sequence[Key], now: int) -> tuple[int, Outcome]:
        """Lets blocks of all groups leave first: see :meth:`Conversations.end`. Returns their number."""
        ended = self.conversations.end(keys)
        for window in self.windows.values():
            if window.state.conversations is not self.conversations:
                window.state.conversations.end(ended)
        return len(ended), self._outcome(now)

    # -- tickets and sessions ----------------------------------------------------------------------------------------

    def expire(self, ticket: TicketId, now: int) -> Outcome:
        """Ends a ticket at its deadline: grants the blocks that are there, or refuses. Does nothing if it was
        answered."""
        if ticket in self.tickets:
            window, request = self.tickets[ticket]
            window.expire(request)
        elif ticket in self.acquires.tickets:
            self.acquires.expire(self.acquires.tickets[ticket])
        return self._outcome(now)

    def cancel(self, ticket: TicketId, now: int) -> Outcome:
        """Withdraws a ticket whose caller has gone: holds end, and no answer comes. Does nothing if it was answered."""
        if ticket in self.tickets:
            window, request = self.tickets.pop(ticket)
            window.withdraw(request)
        elif ticket in self.acquires.tickets:
            self.acquires.withdraw(self.acquires.tickets[ticket])
        return self._outcome(now)

    def orphan_session(self, session: SessionId, now: int) -> Outcome:
        """Orphans a disconnected session: its process may still write, so its blank slots stay out of circulation."""
        self._withdraw_tickets(session)
        for lease in self._leases.of(session):
            self.windows[lease.group].holds.orphan(lease, True)
            self.windows[lease.group].ahead[lease.tier].pop(lease.id, None)
        return self._outcome(now)

    def reattach_session(self, session: SessionId, now: int) -> Outcome:
        for lease in self._leases.of(session):
            self.windows[lease.group].holds.orphan(lease, False)
        return self._take(now)

    def disown_session(self, session: SessionId, now: int) -> Outcome:
        """Ends a session whose process lives. Its blank slots stay out of circulation; all else is given back."""
        for lease in self._leases.of(session):
            if lease.blank:
                self.windows[lease.group].holds.give_back(lease, lease.all_slots().difference(lease.blank))
            else:
                self._end(lease)
        self.conversations.disown(session)
        return self.orphan_session(session, now)

    def end_session(self, session: SessionId, now: int) -> Outcome:
        """Ends a session whose process is gone, or that said goodbye: gives back everything it held."""
        self._withdraw_tickets(session)
        for lease in self._leases.of(session):
            self._end(lease)
        self.conversations.disown(session)
        return self._outcome(now)

    # -- the mover's reports -----------------------------------------------------------------------------------------

    def completed(self, results: Sequence[MoveResult], now: int) -> Outcome:
        """Applies the results of moves. Each move was planned by an earlier outcome and is reported once."""
        for result in results:
            self.windows[self._moving.pop(result.id)].completed(result, now)
        return self._outcome(now)

    def tick(self, now: int) -> Outcome:
        """Applies the passage of time: like any call, ends due retentions; tries failed deletions and edges again."""
        for window in self.windows.values():
            window.state.retire_again(now)
            window.forget_ahead(now)
        return self._outcome(now)

    @property
    def behind(self) -> bool:
        """Whether calls have left work to do, for :meth:`go_on` or any later call."""
        return any(window.state.behind or window.short for window in self.windows.values())

    def go_on(self, now: int) -> Outcome:
        """Does a slice of the work that calls have left: passes uses and priorities on to ancestors, removes lost
        copies and their dependants, and frees slots for leases ahead."""
        for window in self.windows.values():
            removal.lose_on(window.state)
            window.refill(now)
        return self._outcome(now)

    def lose_tier(self, tier: Tier, now: int) -> Outcome:
        """Takes a failed tier out of service: refuses requests that wait for its slots, and removes a slice of its
        copies; :meth:`go_on` removes the rest."""
        for window, ticket in list(self.tickets.values()):
            if ticket.tier is tier:
                window.refuse_offline(ticket)
        for acquire in list(self.acquires.tickets.values()):
            if acquire.tier is tier:
                self.acquires.refuse(acquire, RefusalReason.TIER_OFFLINE)
        for window in self.windows.values():
            if tier in window.state.slots:
                removal.lose_tier(window.state, tier)
        return self._outcome(now)

    def restore_disk(self, now: int) -> Outcome:
        """Puts the disk back in service. The caller has emptied its store."""
        for window in self.windows.values():
            if DISK in window.state.lost:
                removal.restore_disk(window.state)
        return self._outcome(now)

    def _outcome(self, now: int) -> Outcome:
        """Ends a call that may have made room: serves the waiting requests of all groups."""
        self._pump(now)
        return self._take(now)

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

    def _pump(self, now: int) -> None:
        """Serves waiting requests until none can go on."""
        acquires = self.acquires
        if acquires.tickets:
            acquires.refresh(now)
        for window in self.windows.values():
            window.state.expire(now)
        while True:
            for window in self.windows.values():
                window.pump(now)
            if not acquires.tickets or not acquires.advance(now):
                return

    def _next_ticket(self) -> TicketId:
        self._last_ticket += 1
        return TicketId(self._last_ticket)

    def _end(self, lease: SlotLease) -> None:
        window = self.windows[lease.group]
        window.holds.give_back(lease, lease.all_slots())
        window.ahead[lease.tier].pop(lease.id, None)
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
