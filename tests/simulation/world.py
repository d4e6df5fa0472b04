"""The core in a simulated world: every call's outcome is carried out, and everything is compared after it.

The world knows nothing of how the core works. It holds it to what clients, watchers and the tiers can see; the core's
own checker of its inside runs besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.core.check import check
from kvtierd.core.errors import StillHeld, TierOffline
from kvtierd.core.events import BlockChange, Cause, EventSequencer
from kvtierd.core.ids import CacheId, GroupId, Key, LeaseId, SessionId, SlotId, TicketId, Tier
from kvtierd.core.manager import BlockManager, BlockResult, ChainRequest, CommitItem, ListingRow
from kvtierd.core.outcome import Grant, Move, Outcome, RefusalReason
from kvtierd.core.policy import GroupShape, Policy, WritePolicy
from tests.simulation.chooser import Chooser
from tests.simulation.clients import Clients, Holding, MoveRequest, PrefixRequest, Request, SlotsRequest
from tests.simulation.disk import Disk
from tests.simulation.forest import Forest, label_of
from tests.simulation.memory import ROT, Memory
from tests.simulation.mirror import Mirror
from tests.simulation.mover import Mover
from tests.simulation.retention import Retentions
from tests.simulation.violation import require

GROUP: Final = GroupId(0)
CACHE: Final = CacheId(1)
SLOT_BYTES: Final = 4096
DRAIN_BOUND: Final = 2000
LOSSES: Final = (Cause.CORRUPT, Cause.IO_ERROR, Cause.ANCESTOR)
EDGES_DOWN: Final = ((Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.DISK), (Tier.HOST, Tier.DISK))
EVERYTHING: Final = 1 << 20


@dataclass(slots=True, frozen=True)
class Setup:
    """``slots``: of each tier that the cache has."""

    slots: Mapping[Tier, int]
    policy: Policy
    forest: Forest

    @classmethod
    def draw(cls, choose: Chooser) -> Setup:
        slots = draw_memory(choose) | ({Tier.DISK: choose.between(1, 12)} if choose.chance(80) else {})
        policy = Policy(
            thresholds={edge: choose.pick((30, 0, 50, 101)) for edge in EDGES_DOWN},
            write_policy=choose.pick((WritePolicy.BACK, WritePolicy.THROUGH, WritePolicy.SELECTIVE)),
            reserve_shift=choose.pick((7, 3, 2)),
            victims_a_call=choose.pick((16, 3, 1)),
            degrade_after=choose.pick((3, 1)),
        )
        return cls(slots or {Tier.HOST: 2}, policy, Forest.draw(choose, choose.between(8, 30)))


def draw_memory(choose: Chooser) -> dict[Tier, int]:
    """Memory tiers of a few slots, so that every corner is met soon; often both, sometimes one, rarely none."""
    tiers = choose.pick((*[(Tier.DEVICE, Tier.HOST)] * 6, (Tier.DEVICE,), (Tier.HOST,)))
    most = 8 if choose.chance(20) else 4
    return {tier: choose.between(1, most) for tier in tiers}


class World:
    """The core, the tiers under it and the clients above it. One public method is one call of the core.

    ``steps`` counts those calls. ``seen`` counts what happened, so that a test can tell that it did. ``inspect``: run
    the core's own checker and look at its queues, too; without it only what is visible from outside counts.
    """

    def __init__(self, setup: Setup, *, inspect: bool = True) -> None:
        self.setup = setup
        self.forest = setup.forest
        self.inspect = inspect
        self.steps = 0
        self.seen: Counter[str] = Counter()
        self.now = 0
        self.postponed = False
        self.lossy = False
        self.mirror = Mirror()
        self.disk = Disk(setup.slots[Tier.DISK]) if Tier.DISK in setup.slots else None
        self.retentions = Retentions()
        self.pins: Counter[tuple[Tier, Key]] = Counter()
        self._sequencer = EventSequencer()
        self._boot(setup.slots, unclean=False, restarted=False)

    def _boot(self, slots: Mapping[Tier, int], *, unclean: bool, restarted: bool) -> None:
        self.slots = dict(slots)
        self.memories: dict[Tier, Memory] = {
            tier: Memory(str(tier), count) for tier, count in slots.items() if tier is not Tier.DISK
        }
        self.pins.clear()
        self.mover = Mover(self.memories, self.disk)
        self.clients = Clients(self.memories)
        self.offline: set[Tier] = set()
        shape = GroupShape(GROUP, self.slots, dict.fromkeys(self.slots, SLOT_BYTES))
        self.core = BlockManager(CACHE, [shape], self._sequencer, self.setup.policy)
        recovered = self.disk.recover() if self.disk else []
        for record in recovered:
            self.retentions.recover(record.key, record.traits, self.now)
        self.seen["recovered"] += len(recovered)
        bad = self.disk.bad if self.disk else set()
        self._carry_out(
            self.core.open({GROUP: recovered}, {GROUP: bad}, unclean=unclean, restarted=restarted, now=self.now)
        )
        require(self.mirror.blocks.keys() == {record.key for record in recovered}, "recovery lost or made up a block")

    # -- calls of clients --------------------------------------------------------------------------------------------

    def reserve(self, session: SessionId, tier: Tier, count: int) -> None:
        leased = len(self.clients.leased(tier))
        try:
            ticket, outcome = self.core.reserve(session, GROUP, tier, count, self.now)
        except TierOffline:
            self._refused_offline(tier)
            return
        self.clients.requests[ticket] = SlotsRequest(ticket, session, tier, count)
        self._carry_out(outcome)
        impossible = count > self.slots[tier] - leased
        require(not impossible or ticket not in self.clients.requests, "a reservation waits that nothing can satisfy")

    def commit(self, holding: Holding, items: Sequence[CommitItem]) -> None:
        """The client writes the blocks' bytes, then declares them."""
        for item in items:
            self.clients.write(holding, item.slot, item.key)
        expected = self._expected_commit(items)
        try:
            results, outcome = self.core.commit(holding.session, holding.id, items, self.now)
        except TierOffline:
            self._refused_offline(holding.tier)
            return
        require(list(results) == expected, f"commit answers {results}, not {expected}")
        for item, result in zip(items, results, strict=True):
            self.seen[f"commit {result.name}"] += 1
            if result is BlockResult.OK:
                self.clients.committed(holding, item.slot, item.key)
                self.retentions.give(item.key, item.priority, item.duration_ms, self.now)
            elif result is BlockResult.EXISTS:
                del holding.blank[item.slot]
        self._carry_out(outcome)

    def acquire(self, session: SessionId, tier: Tier, chains: Sequence[ChainRequest]) -> None:
        found = [self._stored_prefix(chain.keys) for chain in chains]
        readable = [self._readable(found_in, tier) for found_in in found]
        try:
            tickets, outcome = self.core.acquire(session, GROUP, tier, chains, self.now)
        except TierOffline:
            self._refused_offline(tier)
            return
        for ticket, chain, found_in, length in zip(tickets, chains, found, readable, strict=True):
            request = PrefixRequest(ticket, session, tier, tuple(chain.keys), chain.min_blocks, found_in, length)
            self.clients.requests[ticket] = request
            self._retained(chain, len(found_in), length)
        self._carry_out(outcome)

    def _retained(self, chain: ChainRequest, stored: int, readable: int) -> None:
        """What is stored of an acquired chain gets its retention, and a clock that starts anew; what only a failing
        edge leads from may not."""
        durations = chain.durations_ms or [0] * len(chain.keys)
        for place, (key, priority, duration) in enumerate(zip(chain.keys, chain.priorities, durations, strict=False)):
            if place < stored:
                self.retentions.give(key, priority, duration, self.now, certain=place < readable)
        self.retentions.matched(chain.keys[:readable], self.now)
        self.retentions.wanted(chain.keys[:stored], self.now)

    def retain(self, session: SessionId, keys: Sequence[Key], priorities: Sequence[int], durations: list[int]) -> None:
        results, outcome = self.core.set_retention(session, GROUP, keys, priorities, durations, self.now)
        for key, result, priority, duration in zip(keys, results, priorities, durations, strict=True):
            self.seen[f"retain {result.name}"] += 1
            stored = key in self.mirror.blocks
            require(result is (BlockResult.OK if stored else BlockResult.NOT_FOUND), "a retention missed its block")
            if stored:
                self.retentions.give(key, priority, duration, self.now)
        self._carry_out(outcome)

    def release(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        for lease in leases:
            del self.clients.leases[lease]
        self._carry_out(self.core.release(session, leases, self.now))

    def move(self, session: SessionId, to: Tier, keys: Sequence[Key]) -> None:
        try:
            ticket, outcome = self.core.move(session, GROUP, to, keys, self.now)
        except TierOffline:
            self._refused_offline(to)
            return
        self.clients.requests[ticket] = MoveRequest(ticket, session, to, tuple(keys))
        self._carry_out(outcome)

    def drop(self, session: SessionId, keys: Sequence[Key]) -> None:
        before = dict(self.mirror.blocks)
        report, outcome = self.core.drop(session, GROUP, keys, self.now)
        self._carry_out(outcome)
        for key, result in zip(keys, report.results, strict=True):
            self.seen[f"drop {result.name}"] += 1
            require((result is BlockResult.NOT_FOUND) == (key not in before), "drop misses a block, or invents one")
            require(
                (result is BlockResult.HELD) == (key in self.mirror.blocks), "drop left a block, or took a held one"
            )
        if BlockResult.HELD in report.results:
            require(
                bool(self.clients.leases or self.clients.requests or +self.pins), "drop finds a block held by nobody"
            )
        require(report.dropped <= len(before) - len(self.mirror.blocks), "drop counts too many")

    def plan_drop(self, session: SessionId, keys: Sequence[Key]) -> None:
        """A dry run tells what the drop that follows does, and changes nothing itself."""
        before = dict(self.mirror.blocks)
        plan, outcome = self.core.drop(session, GROUP, keys, self.now, dry_run=True)
        self._carry_out(outcome)
        require(self.mirror.blocks == before or bool(self.clients.requests), "a dry run changed something")
        report, outcome = self.core.drop(session, GROUP, keys, self.now)
        self._carry_out(outcome)
        require(report == plan or bool(self.clients.requests), f"a drop does {report}, its dry run said {plan}")

    def pin(self, session: SessionId, tier: Tier, keys: Sequence[Key], *, unpin: bool) -> None:
        places = self.core.locate(GROUP, keys)
        try:
            results, outcome = self.core.pin(session, GROUP, tier, keys, self.now, unpin=unpin)
        except TierOffline:
            self._refused_offline(tier)
            return
        for key, place, result in zip(keys, places, results, strict=True):
            slot, verb = place.slots[tier], "unpin" if unpin else "pin"
            self.seen[f"{verb} {result.name}"] += 1
            require((result is BlockResult.NOT_FOUND) == (key not in self.mirror.blocks), f"{verb} misses a block")
            if slot is None or result is not BlockResult.OK:
                require(result is not BlockResult.OK, "a copy is pinned where it is not")
                continue
            self.pins[tier, key] += -1 if unpin else 1
            require(self.pins[tier, key] >= 0, "a block is unpinned more often than it was pinned")
            self.retentions.wanted([key], self.now)
        self._carry_out(outcome)

    def reset(self, session: SessionId, *, force: bool) -> None:
        plan = self.core.reset_plan()
        blocks = len(self.mirror.blocks)
        following = None
        dropped = kept = 0
        while True:
            try:
                report, outcome = self.core.reset(session, self.now, force=force, following=following)
            except StillHeld as error:
                self.seen["reset refused"] += 1
                require(bool(error.holders) or error.pinned > 0, "a reset is refused for nobody's sake")
                require(not force, "a forced reset is refused")
                return
            self._carry_out(outcome)
            dropped, kept, following = dropped + report.dropped, kept + report.kept, report.following
            if following is None:
                break
        self.seen["reset"] += 1
        require(dropped + kept == blocks, "a reset overlooked a block")
        planned = (plan.dropped, plan.kept) == (dropped, kept)
        require(planned or bool(self.clients.requests), "a reset did not as planned")
        for (tier, key), count in self.pins.items():
            require(not count or key in self.mirror.blocks, f"a block pinned in {tier} is gone with a reset")

    def expire(self, request: Request) -> None:
        self._carry_out(self.core.expire(request.id, self.now), expired=request.id)
        require(request.id not in self.clients.requests, "a request is not answered at its deadline")

    def cancel(self, request: Request) -> None:
        del self.clients.requests[request.id]
        self._carry_out(self.core.cancel(request.id, self.now))

    # -- sessions ----------------------------------------------------------------------------------------------------

    def orphan(self, session: SessionId) -> None:
        """Its connection breaks, its process lives."""
        self.clients.forget_requests(session)
        self.clients.orphaned.add(session)
        self._carry_out(self.core.orphan_session(session, self.now))

    def reattach(self, session: SessionId) -> None:
        self.clients.orphaned.discard(session)
        self._carry_out(self.core.reattach_session(session, self.now))

    def end(self, session: SessionId) -> None:
        """Its process is gone."""
        self.clients.forget(session)
        self._carry_out(self.core.end_session(session, self.now))
        require(self.core.session_leases(session) == 0, "a session that is gone has leases")

    # -- the mover, the clock and the hardware -------------------------------------------------------------------------

    def report(self, choose: Chooser, *, faults: bool = True) -> None:
        results = self.mover.report(choose, faults=faults)
        self.seen["copies failed"] += sum(len(result.failed) for result in results)
        self.seen["copies corrupt"] += sum(len(result.corrupt) for result in results)
        self._carry_out(self.core.completed(results, self.now))

    def tick(self) -> None:
        """The core is told the time until it has seen to all that this means."""
        self._tick_once()
        for _ in range(DRAIN_BOUND):
            if not self.postponed:
                break
            self._tick_once()
        require(not self.postponed, "what is postponed is postponed for ever")
        self.retentions.must_expire(self.now)
        self.verify()

    def _tick_once(self) -> None:
        self.retentions.may_expire(self.now)
        self._carry_out(self.core.tick(self.now))

    def note_uses(self) -> None:
        """The daemon writes down which disk blocks were used. Not a step: nothing changes in the core."""
        for key in self.core.take_disk_uses().get(GROUP, ()):
            change = self.mirror.blocks.get(key)
            require(change is not None and bool(change.residency & Tier.DISK.bit), "a use of a block not on disk")
            if self.disk is not None:
                self.disk.touch(key)

    def lose(self, tier: Tier) -> None:
        self.offline.add(tier)
        self.mover.lose(tier)
        self._carry_out(self.core.lose_tier(tier, Cause.IO_ERROR, self.now))
        resident = any(change.residency & tier.bit for change in self.mirror.blocks.values())
        require(not resident, f"{tier} is lost and still said to hold blocks")

    def restore(self, tier: Tier) -> None:
        self.offline.discard(tier)
        if tier is Tier.DISK and self.disk is not None:
            self.disk.empty()
        self._carry_out(self.core.restore_tier(tier, self.now))

    def restart(self, choose: Chooser, *, clean: bool) -> None:
        """A new daemon on the same disk, with other memory tiers; after a crash its ids start above all that may have
        been given out."""
        if clean:
            self.drain(choose)
        on_disk = {key for key, change in self.mirror.blocks.items() if self._survives(change)}
        if self.disk is not None and Tier.DISK in self.offline:
            self.disk.empty()
        if not clean:
            self.mirror.skip_to(self.mirror.last_id + choose.below(100))
            self._sequencer = EventSequencer(self.mirror.last_id)
        memory = draw_memory(choose) if self.disk is None or choose.chance(90) else {}
        slots = memory | ({Tier.DISK: len(self.disk.slab)} if self.disk else {})
        self._boot(slots, unclean=not clean, restarted=True)
        require(on_disk <= self.mirror.blocks.keys(), "a block that was READY on disk is gone after the restart")
        self.seen["restart clean" if clean else "restart after a crash"] += 1

    # -- coming to rest ------------------------------------------------------------------------------------------------

    def drain(self, choose: Chooser) -> None:
        """Everything in flight ends well; after that nobody waits."""
        for _ in range(DRAIN_BOUND):
            if self.postponed:
                self.tick()
            elif self.mover.in_flight:
                self.report(choose, faults=False)
            else:
                break
        require(self.mover.in_flight == 0, "moves beget moves for ever")
        require(not self.clients.requests, "somebody waits though nothing is in flight")

    def settle(self, choose: Chooser) -> None:
        """All sessions end: every slot in use again must be obtainable, and nothing may be left behind."""
        for session in self.clients.sessions:
            self.end(session)
        for (tier, key), count in list(self.pins.items()):
            for _ in range(count):
                self.pin(self.clients.sessions[0], tier, [key], unpin=True)
        self.drain(choose)
        last = self.clients.sessions[0]
        for tier in self.memories.keys() - self.offline:
            self.reserve(last, tier, self.slots[tier])
            self.drain(choose)
            require(len(self.clients.leased(tier)) == self.slots[tier], f"{tier} slots have leaked")
        self.end(last)
        self.drain(choose)
        for tier, memory in self.memories.items():
            require(not any(memory.owners), f"{tier} slots are owned by nobody's session")
        self.seen["settled"] += 1

    # -- an outcome, in the order that core/outcome.py lays down -----------------------------------------------------

    def _carry_out(self, outcome: Outcome, expired: TicketId | None = None) -> None:
        self.steps += 1
        self.postponed = outcome.again
        self.lossy = any(event.cause in LOSSES for event in outcome.events)
        self.seen["postponed"] += outcome.again
        alone = not self.clients.leases and not any(self.pins.values()) and len(self.clients.requests) == 1
        before = self.mirror.blocks.copy() if outcome.grants else {}
        for ref in outcome.begin_write:
            self.memories[ref.tier].begin_write(ref.slot)
        for ownership in outcome.owners:
            self.memories[ownership.ref.tier].owners[ownership.ref.slot] = ownership.session
        for event in outcome.events:
            require(event.time_ns == self.now, "an event has another time than its call")
            self.seen[f"{event.type.name} {event.cause.name}"] += len(event.blocks)
            self.mirror.apply(event)
        for move in outcome.moves:
            self._submit(move)
        for ref in outcome.end_write:
            self.memories[ref.tier].end_write(ref.slot)
        granted = [self._granted(grant, before, outcome, expired) for grant in outcome.grants]
        for refusal in outcome.refusals:
            self.seen[f"refused {refusal.reason.name}"] += 1
            request = self.clients.take_answer(refusal)
            self.clients.take_refusal(request, refusal)
            full = refusal.reason is RefusalReason.TIER_FULL and isinstance(request, SlotsRequest)
            require(not (alone and full), "a reservation is refused though nobody else holds or wants anything")
        for request in granted:
            if isinstance(request, SlotsRequest):
                self.clients.verify_turn(request)
        self.verify()

    def _submit(self, move: Move) -> None:
        self.seen[f"{move.src}>{move.dst if move.dst is not None else 'nowhere'} {move.cause.name}"] += len(move.items)
        if self.disk is not None and move.dst is Tier.DISK:
            require(self.disk.bad.isdisjoint(item.dst for item in move.items), "a bad disk slot is used again")
        if move.dst is not None:
            for item in move.items:
                self.retentions.verify_own(item.key, item.traits.priority)
        self.mover.submit(move)

    def _granted(
        self, grant: Grant, before: Mapping[Key, BlockChange], outcome: Outcome, expired: TicketId | None
    ) -> Request:
        request = self.clients.take_answer(grant)
        nothing = isinstance(request, PrefixRequest) and grant.lease is None
        if self.inspect and grant.ticket != expired and not nothing:
            queued = self.core.windows[GROUP].queued(request.tier)
            require(all(ticket.id > grant.ticket for ticket in queued), f"{request.tier}: the queue was overtaken")
        if isinstance(request, SlotsRequest):
            self.seen["granted slots"] += 1
            self.clients.take_slots(request, grant)
        elif isinstance(request, PrefixRequest):
            self.seen[
                "granted a whole prefix" if len(grant.slots) == grant.matched else "granted a shorter prefix"
            ] += 1
            self.clients.take_prefix(request, grant)
        elif isinstance(request, MoveRequest):
            self.seen["granted a move"] += 1
            require(len(grant.results) == len(request.keys), "a move answers for other blocks than asked")
            arrived = _ever_in(request.tier, before, outcome)
            for key, there in zip(request.keys, grant.results, strict=True):
                require(not there or key in arrived, "a move reports a block where it is not")
        return request

    # -- what must be true after every step ----------------------------------------------------------------------------

    def verify(self) -> None:
        if self.inspect:
            check(self.core)
        require(self.mirror.last_id == self._sequencer.last, "an event id was given out and its event was not")
        rows = self.core.listing(GROUP, 0, EVERYTHING).rows
        self._verify_mirror(rows)
        self._verify_bytes(rows)
        self._verify_pins(rows)
        self._note_holds()
        for memory in self.memories.values():
            memory.verify()
        self.clients.verify()

    def _verify_mirror(self, rows: Sequence[ListingRow]) -> None:
        """The events alone say what the core says, and an effective priority is the highest of the subtree's."""
        require(len(rows) == len(self.mirror.blocks), "the events tell of more or fewer blocks than there are")
        effective: dict[Key, int] = {}
        for row in reversed(rows):
            told = self.mirror.blocks.get(row.key)
            require(
                told is not None
                and (told.parent, told.residency, told.priority) == (row.parent, row.residency, row.priority),
                f"the events say {told}, the core {row}",
            )
            require(row.label == label_of(row.key), "a block is listed under another's label")
            self.retentions.verify(row.key, row.priority, effective.get(row.key, 0))
            if row.parent is not None:
                require(row.parent in self.mirror.blocks, "a block is listed without its parent")
                effective[row.parent] = max(row.priority, effective.get(row.parent, 0))

    def _verify_pins(self, rows: Sequence[ListingRow]) -> None:
        """A pinned copy stays, until its tier or its bytes are lost; the listing says so."""
        places = dict(zip((row.key for row in rows), self.core.locate(GROUP, [row.key for row in rows]), strict=True))
        for (tier, key), count in list(self.pins.items()):
            there = key in places and bool(places[key].residency & tier.bit)
            if count and not there and self.lossy:
                del self.pins[tier, key]
            else:
                require(not count or there, f"a block pinned in {tier} has left it")
        for row in rows:
            pinned = sum(tier.bit for tier in Tier if self.pins[tier, row.key])
            require(row.pinned == pinned, f"pinned in {pinned}, listed as pinned in {row.pinned}")
        self.retentions.held((key for (_, key), count in self.pins.items() if count), self.now)

    def _note_holds(self) -> None:
        """Clocks stand while their blocks are leased, and may while a request that waits has them."""
        for holding in self.clients.leases.values():
            keys = list(holding.blocks.values())
            self.retentions.wanted(keys, self.now)
            places = self.core.locate(GROUP, keys)
            leased = zip(holding.blocks.items(), places, strict=True)
            self.retentions.held((key for (slot, key), at in leased if at.slots[holding.tier] == slot), self.now)
        for request in self.clients.requests.values():
            if isinstance(request, PrefixRequest):
                self.retentions.wanted(request.keys, self.now)

    def _verify_bytes(self, rows: Sequence[ListingRow]) -> None:
        """Where the core says that a block is, its bytes are."""
        keys = [row.key for row in rows]
        for row, location in zip(rows, self.core.locate(GROUP, keys), strict=True):
            require(location.residency == row.residency, "the core locates a block elsewhere than it lists it")
            for tier in self.slots:
                slot = location.slots[tier]
                require((slot is not None) == bool(row.residency & tier.bit), f"a block's {tier} slot is not told")
                if slot is not None and tier is Tier.DISK:
                    self._verify_record(row, slot)
                elif slot is not None:
                    memory = self.memories[tier]
                    require(memory.contents[slot] == row.key, f"{tier} slot {slot} is READY and holds other bytes")
                    require(memory.ready(slot), f"{tier} slot {slot} is READY and its generation odd")

    def _verify_record(self, row: ListingRow, slot: SlotId) -> None:
        assert self.disk is not None
        require(self.disk.slab[slot] in (row.key, ROT), f"disk slot {slot} is READY and holds other bytes")
        record = self.disk.records.get(row.key)
        require(record is not None and record.slot == slot, f"disk slot {slot} is READY and not committed")
        require(
            record is not None and record.parent == row.parent, f"disk slot {slot} is committed under another parent"
        )

    # -- what the world can tell beforehand ----------------------------------------------------------------------------

    def _stored_prefix(self, keys: Sequence[Key]) -> tuple[int, ...]:
        """Residencies of the longest stored prefix, as the events tell."""
        found: list[int] = []
        for key in keys:
            change = self.mirror.blocks.get(key)
            if change is None:
                break
            found.append(change.residency)
        match = self.core.match(GROUP, keys)
        require(match.residency == tuple(found), "match and the events disagree")
        return match.residency

    def _readable(self, found_in: Sequence[int], tier: Tier) -> int:
        """How much of a prefix is in the tier, or comes from somewhere that no failing edge leads from."""
        edges = self.core.stats().edges
        failing = {src for (src, dst), edge in edges.items() if dst is tier and edge.degraded_until > self.now}
        for length, residency in enumerate(found_in):
            if not residency & tier.bit and any(residency & src.bit for src in failing):
                return length
        return len(found_in)

    def _expected_commit(self, items: Sequence[CommitItem]) -> list[BlockResult]:
        stored = {key: change.parent for key, change in self.mirror.blocks.items()}
        expected = []
        for item in items:
            if item.key in stored:
                same = stored[item.key] == item.parent
                expected.append(BlockResult.EXISTS if same else BlockResult.PARENT_CONFLICT)
            elif item.parent is not None and item.parent not in stored:
                expected.append(BlockResult.PARENT_MISSING)
            else:
                expected.append(BlockResult.OK)
                stored[item.key] = item.parent
        return expected

    def _survives(self, change: BlockChange) -> bool:
        """READY on disk, and no reader has found it or an ancestor rotten without having been heard."""
        if not change.residency & Tier.DISK.bit or self.disk is None:
            return False
        chain = self.forest.chain(change.key)
        return all(self.disk.records[key].slot not in self.disk.bad for key in chain)

    def _refused_offline(self, tier: Tier) -> None:
        require(tier in self.offline, f"{tier} is called offline and is not")
        self.steps += 1
        self.seen["refused, the tier is offline"] += 1
        self.verify()


def _ever_in(tier: Tier, before: Mapping[Key, BlockChange], outcome: Outcome) -> set[Key]:
    """Blocks that were in the tier at some time of this step."""
    changes = [*before.values(), *(change for event in outcome.events for change in event.blocks)]
    return {change.key for change in changes if change.residency & tier.bit}
