"""The core in a simulated world: the world carries out every call's outcome, and then checks every promise.

The world does not know how the core works. It checks the promises that clients, watchers and the tiers can see; the
core's own checker of its internal state runs as well.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, cast

from kvtierd.core.check import check
from kvtierd.core.errors import ResetRefused, TierOutOfService
from kvtierd.core.events import BlockEvent, Cause, EventSequencer, EventType
from kvtierd.core.ids import CacheId, GroupId, Key, LeaseId, SessionId, SlotId, TicketId, Tier
from kvtierd.core.leases import FetchTicket, LeftLease, Ticket
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, Outcome, RefusalReason
from kvtierd.core.policy import MAX_PRIORITY, MIN_PRIORITY, GroupShape, WriteMode
from kvtierd.core.removal import Drop, DropResult
from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import BlockResult, ChainRequest, CommitItem, ListingRow
from kvtierd.service.recovery import Adopted, OldLife, adopt
from kvtierd.tiers.arena import Arena
from tests.simulation.chooser import Chooser
from tests.simulation.clients import Clients, GroupRequest, Holding, MoveRequest, PrefixRequest, Request, SlotsRequest
from tests.simulation.forest import hash_of, label_of
from tests.simulation.memory import Memory
from tests.simulation.mirror import LOSSES
from tests.simulation.remains import Died, Lifetime, Remains
from tests.simulation.setup import Setup, draw_memory
from tests.simulation.site import Site
from tests.simulation.violation import require
from tests.slot_rows import SlotRef, begun, changes, contents, filled, owners, restated

CACHE: Final = CacheId(1)
DRAIN_BOUND: Final = 2000


class World:
    """The core, the tiers under it and the clients above it. A public method makes one call of the core.

    ``steps`` counts these calls. ``seen`` counts events of interest, so that a test can require them. ``inspect``: also
    run the core's own checker and look at its queues; without it the world checks only promises visible from outside.
    """

    def __init__(self, setup: Setup, *, inspect: bool = True) -> None:
        self.setup = setup
        self.forest = setup.forest
        self.inspect = inspect
        self.steps = 0
        self.seen: Counter[str] = Counter()
        self.now = 0
        self.lossy = False
        self.last_id = 0
        self.keeper = SessionId(0)
        self.sites = {plan.group: Site(plan, setup.forest) for plan in setup.groups}
        self.lifetime = Lifetime()
        self._about: frozenset[SlotRef] = frozenset()
        self._notes = 0
        self._watchers: list[set[tuple[GroupId, Key]]] = []
        self._sequencer = EventSequencer()
        shapes = [site.boot(slots) for site, slots in zip(self.sites.values(), setup.memory, strict=True)]
        self._boot(shapes, Clients(setup.groups, self._memories), unclean=False, restarted=False)

    @property
    def _memories(self) -> dict[GroupId, dict[Tier, Memory]]:
        return {site.group: site.memories for site in self.sites.values()}

    def _boot(
        self,
        shapes: Sequence[GroupShape],
        clients: Clients,
        *,
        unclean: bool,
        restarted: bool,
        old: OldLife | None = None,
    ) -> None:
        """Starts a daemon. ``old``: memory was kept, and these sessions may still use it."""
        sites = self.sites.values()
        self.tiers = tuple(shapes[0].slots)
        self.memory_tiers = tuple(next(iter(sites)).memories)
        self.clients = clients
        self.lost: set[Tier] = set()
        self.core = BlockManager(CACHE, shapes, self._sequencer, self.setup.policy)
        on_disk = {site.group: site.disk.recover() if site.disk else [] for site in sites}
        adopted = Adopted(on_disk)
        if old is not None:
            memory = cast(Arena, Remains(self._memories, self.lifetime.store))
            adopted = adopt(memory, shapes, on_disk, old)
        for site in sites:
            found = adopted.recovered[site.group]
            for record in found:
                site.retentions.recover(record.key, record.traits, self.now)
            whole = {one.key for one in on_disk[site.group] if one.traits.label != hash_of(one.key)}
            site.mirror.short = {one.key for one in found} - whole
            self.seen["recovered"] += len(found)
        bad = {site.group: site.disk.bad if site.disk else set() for site in sites}
        self.core.fill(adopted.recovered, bad, unclean=unclean, restarted=restarted)
        self._carry_out(self.core.announce(self.now))
        for site in sites:
            keys = {record.key for record in adopted.recovered[site.group]}
            require(site.mirror.blocks.keys() == keys, "recovery lost or made up a block")
        for left in adopted.left:
            self._restore(left)

    def _restore(self, left: LeftLease) -> None:
        outcome = self.core.restore_lease(left, self.now)
        at = [location.slots[left.tier] for location in self.core.locate(left.group, left.keys)]
        places = {slot: key for slot, key in zip(at, left.keys, strict=True) if slot is not None}
        require(len(places) == len(left.keys), "a lease of an earlier life is for a block that is not there")
        self.clients.restore([*self.core.leases][-1], left, places)
        self.seen["restored blank" if left.blank else "restored held"] += 1
        self._carry_out(outcome)

    # -- calls of clients --------------------------------------------------------------------------------------------

    def reserve(self, session: SessionId, site: Site, tier: Tier, count: int) -> None:
        leased = len(self.clients.leased(site.group, tier)) - self.core.windows[site.group].slots_ahead(tier)
        try:
            ticket, outcome = self.core.reserve(session, site.group, tier, count, self.now)
        except TierOutOfService:
            self._refused(tier)
            return
        self.clients.requests[ticket] = SlotsRequest(ticket, session, tier, site.group, count)
        self._carry_out(outcome)
        impossible = count > site.slots[tier] - leased
        require(not impossible or ticket not in self.clients.requests, "a reservation waits that nothing can satisfy")

    def commit(
        self, holding: Holding, items: Sequence[CommitItem], *, hold: bool = True, release: bool = False
    ) -> None:
        """The client writes the blocks' bytes, then commits them. ``hold``: and holds them. ``release``: and releases
        its whole lease."""
        site = self.sites[holding.plan.group]
        for item in items:
            self.clients.write(holding, item.slot, item.key)
        expected = site.expected_commit(items)
        try:
            talk = b"%d" % (holding.session % 3)
            results, outcome = self.core.commit(
                holding.session, holding.id, items, self.now, hold=hold, release=release, conversation=talk
            )
        except TierOutOfService:
            self._refused(holding.tier)
            return
        require(list(results) == expected, f"commit answers {results}, not {expected}")
        stored: list[CommitItem] = []
        for item, result in zip(items, results, strict=True):
            under = " under a hollow block" * (item.parent is not None and site.is_hollow(item.parent))
            self.seen[f"commit {result.name}{under}"] += 1
            if result is BlockResult.OK:
                writers = holding.writers(item.slot)
                self.seen["commit for several"] += len(writers) > 1
                for writer in writers:
                    if writer is holding and not hold:
                        del holding.blank[item.slot]
                    else:
                        self.clients.committed(writer, item.slot, item.key, item.parent)
                site.retentions.give(item.key, item.priority, item.duration_ms, self.now)
                stored.append(item)
                for key in site.outgrown(item, stored):
                    self.seen["a partial block was outgrown"] += 1
                    site.retentions.give(key, MIN_PRIORITY, 0, self.now)
            elif result is BlockResult.EXISTS:
                self.clients.found_stored(holding, item.slot, item.key, item.parent)
        if release:
            self.seen["commit and release"] += 1
            self.clients.release(holding.id)
        self._carry_out(outcome)
        if release and stored:
            self._lease_ahead(holding, len(stored), stored[-1].key)

    def _lease_ahead(self, holding: Holding, count: int, after: Key) -> None:
        """A commit that ends its lease asks for as many slots ahead."""
        place = holding.session, holding.plan.group, holding.tier
        lease, outcome = self.core.lease_ahead(*place, count, after, self.now)
        if lease is not None:
            self.seen["leased ahead"] += 1
            self.clients.lease_ahead(holding, lease.id, lease.blank)
        self._carry_out(outcome)

    def acquire(self, session: SessionId, sites: Sequence[Site], tier: Tier, chains: Sequence[ChainRequest]) -> None:
        chains = [replace(chain, conversation=b"%d" % (session % 3)) for chain in chains]
        requests = [self._prefix_request(session, tier, chain, sites) for chain in chains]
        try:
            tickets, outcome = self.core.acquire(session, [site.group for site in sites], tier, chains, self.now)
        except TierOutOfService:
            self._refused(tier)
            return
        self._wait_for(tickets, chains, requests, outcome)

    def _wait_for(
        self,
        tickets: Sequence[TicketId],
        chains: Sequence[ChainRequest],
        requests: Sequence[PrefixRequest],
        outcome: Outcome,
    ) -> None:
        for ticket, chain, request in zip(tickets, chains, requests, strict=True):
            self.clients.requests[ticket] = replace(request, id=ticket)
            for site in (self.sites[group] for group in request.found_in):
                lengths = range(request.readable, request.stored + 1)
                certain = site.plan.needed(request.stored) if len(lengths) == 1 else ()
                possible = {
                    place for n in lengths for place in site.plan.needed(n) if site.residency(chain.keys[place])
                }
                self._retained(site, chain, certain, possible)
        self._carry_out(outcome)

    def _prefix_request(
        self, session: SessionId, tier: Tier, chain: ChainRequest, sites: Sequence[Site]
    ) -> PrefixRequest:
        keys = tuple(chain.keys)
        found = {site.group: {key: r for key in keys if (r := site.residency(key))} for site in sites}
        failing = self._failing(tier)
        sure = {
            group: {key for key, residency in known.items() if residency & tier.bit or not residency & failing}
            for group, known in found.items()
        }
        stored = self._longest(keys, found)
        match = self.core.match([site.group for site in sites], keys)
        require(match.blocks == stored, "a match and the events disagree")
        for site, span in zip(sites, match.groups, strict=True):
            told = tuple(site.residency(keys[place]) for place in site.plan.needed(stored))
            require((span.group, span.residency) == (site.group, told), "a match and the events disagree")
        readable = self._longest(keys, sure)
        return PrefixRequest(TicketId(0), session, tier, keys, chain.min_blocks, found, readable, stored)

    def _longest(self, keys: Sequence[Key], usable: Mapping[GroupId, Collection[Key]]) -> int:
        """The definition: the greatest length whose needed blocks every group can use."""
        lengths = range(len(keys), -1, -1)
        plans = [plan for plan in self.setup.groups if plan.group in usable]
        return next(n for n in lengths if all(keys[i] in usable[p.group] for p in plans for i in p.needed(n)))

    def _retained(self, site: Site, chain: ChainRequest, certain: Collection[int], possible: Collection[int]) -> None:
        """Notes that stored blocks of an acquired chain, by place, get its retention and a restarted clock. Blocks
        behind a failing edge only may get them: ``possible``, but not ``certain``."""
        retentions = site.retentions
        durations = chain.durations_ms or [0] * len(chain.keys)
        for place, (key, priority, duration) in enumerate(zip(chain.keys, chain.priorities, durations, strict=False)):
            if place in possible:
                retentions.give(key, priority, duration, self.now, certain=place in certain)
        retentions.matched([chain.keys[place] for place in certain], self.now)
        retentions.wanted([chain.keys[place] for place in possible], self.now)

    def touch(self, site: Site, keys: Sequence[Key], asked: int) -> None:
        """A client has read these blocks without a call, and has asked for ``asked`` blocks."""
        before, queried = dict(site.mirror.blocks), self.core.stats().queried
        self.core.asked(site.group, asked, 0)
        require(self.core.stats().queried == queried + asked, "other questions are counted than were told")
        self._carry_out(self.core.touch(site.group, keys, self.now))
        chains = [self.forest.chain(key) if site.plan.chained else [key] for key in keys if key in before]
        site.retentions.matched({key for chain in chains for key in chain}, self.now)
        self.seen["touched"] += bool(chains)

    def retain(
        self, session: SessionId, site: Site, keys: Sequence[Key], priorities: Sequence[int], durations: list[int]
    ) -> None:
        results, outcome = self.core.set_retention(site.group, keys, priorities, durations, self.now)
        for key, result, priority, duration in zip(keys, results, priorities, durations, strict=True):
            self.seen[f"retain {result.name}"] += 1
            stored = key in site.mirror.blocks
            require(result is (BlockResult.OK if stored else BlockResult.NOT_FOUND), "a retention missed its block")
            if stored:
                site.retentions.give(key, priority, duration, self.now)
        self._carry_out(outcome)

    def join(self, session: SessionId, holding: Holding) -> None:
        """The session joins another session's lease."""
        joined, outcome = self.core.join(session, holding.id, self.now)
        require(joined.blank.keys() == holding.blank.keys(), "a lease is joined and not all that is blank")
        self.clients.join(holding, session, joined.id, {copy.slot for copy in joined.held.values()})
        self.seen["joined"] += 1
        try:
            self._carry_out(outcome)
        except Died:
            self.clients.release(joined.id)  # the client got no answer
            raise

    def give_back(self, holding: Holding, slots: Sequence[SlotId]) -> None:
        """The client releases a part of a lease."""
        self.clients.give_back(holding, slots)
        self.seen["given back in part"] += 1
        self._carry_out(self.core.release(holding.session, [holding.id], self.now, slots))

    def release(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        for lease in leases:
            self.clients.release(lease)
        self._carry_out(self.core.release(session, leases, self.now))

    def move(self, session: SessionId, site: Site, to: Tier, keys: Sequence[Key]) -> None:
        try:
            ticket, outcome = self.core.move(session, site.group, to, keys, self.now)
        except TierOutOfService:
            self._refused(to)
            return
        self.clients.requests[ticket] = MoveRequest(ticket, session, to, site.group, tuple(keys))
        self._carry_out(outcome)

    def drop(
        self, session: SessionId, site: Site, keys: Sequence[Key], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """The client drops blocks. ``meanwhile``: calls of other clients between two slices."""
        before = dict(site.mirror.blocks)
        anybody = bool(self.clients.leases or self.clients.requests or +site.pins)
        with self._watching() as (removed, calls):
            report, slices = self._dropped(session, site, keys, dry_run=False, meanwhile=meanwhile)
            alone = calls() == slices
        gone = {key for group, key in removed if group == site.group}
        for key, result in zip(keys, report.results, strict=True):
            self.seen[f"drop {result.name}"] += 1
            require((result is BlockResult.NOT_FOUND) == (key not in before), "drop misses a block, or invents one")
            require((result is BlockResult.OK) <= (key in gone), "drop left a block")
            held = result is BlockResult.HELD
            require(not held or not alone or key in site.mirror.blocks, "drop took a held block")
        if BlockResult.HELD in report.results:
            require(anybody or not alone, "drop finds a block held by nobody")
            partly = not alone and any(not set(keys).isdisjoint(self.forest.chain(key)[:-1]) for key in gone)
            self.seen["drop HELD when a part had gone"] += partly
        require(report.dropped <= len(removed), "drop counts too many")

    def _dropped(
        self,
        session: SessionId,
        site: Site,
        keys: Sequence[Key],
        *,
        dry_run: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[DropResult, int]:
        """Returns a drop's final report, and its number of slices."""
        drop: Drop | None = None
        slices = 0
        while True:
            held = {key for holding in self.clients.leases.values() for key in self._held(holding, site.group)}
            drop, outcome = self.core.drop(site.group, keys, self.now, dry_run=dry_run, following=drop)
            told = [event for event in outcome.events if event.cause in (Cause.EXPLICIT, Cause.ANCESTOR)]
            gone = {key for event in told if event.type is EventType.REMOVED for key in event.blocks.keys}
            require(held.isdisjoint(gone), "a drop takes what is leased")
            self._carry_out(outcome)
            slices += 1
            if drop.report is not None:
                return drop.report, slices
            before = self.steps
            meanwhile()
            self.seen["called while blocks were being dropped"] += self.steps - before

    @contextmanager
    def _watching(self) -> Iterator[tuple[set[tuple[GroupId, Key]], Callable[[], int]]]:
        """Gives the blocks that are removed from now on, and a function that counts the calls since now."""
        removed: set[tuple[GroupId, Key]] = set()
        begun = self.steps
        self._watchers.append(removed)
        try:
            yield removed, lambda: self.steps - begun
        finally:
            self._watchers = [one for one in self._watchers if one is not removed]

    def plan_drop(self, session: SessionId, site: Site, keys: Sequence[Key]) -> None:
        """Checks that a dry run changes nothing, and reports the same as the drop that follows."""
        before, behind = dict(site.mirror.blocks), self.core.behind
        plan, _ = self._dropped(session, site, keys, dry_run=True)
        require(site.mirror.blocks == before or behind, "a dry run changed something")
        waited = bool(self.clients.requests)  # between two slices waiting requests may get blocks of the drop
        report, _ = self._dropped(session, site, keys, dry_run=False)
        require(report == plan or waited, f"a drop does {report}, its dry run said {plan}")

    def go_on(self) -> None:
        """The core does a slice of the work that calls have left."""
        if self.core.behind:
            self.seen["gone on"] += 1
            self._carry_out(self.core.go_on(self.now))

    def pin(self, session: SessionId, site: Site, tier: Tier, keys: Sequence[Key], *, unpin: bool) -> None:
        places = self.core.locate(site.group, keys)
        try:
            results, outcome = self.core.pin(site.group, tier, keys, self.now, unpin=unpin)
        except TierOutOfService:
            self._refused(tier)
            return
        for key, place, result in zip(keys, places, results, strict=True):
            slot, verb = place.slots[tier], "unpin" if unpin else "pin"
            self.seen[f"{verb} {result.name}"] += 1
            require((result is BlockResult.NOT_FOUND) == (key not in site.mirror.blocks), f"{verb} misses a block")
            if slot is None or result is not BlockResult.OK:
                require(result is not BlockResult.OK, "a copy is pinned where it is not")
                continue
            site.pins[tier, key] += -1 if unpin else 1
            require(site.pins[tier, key] >= 0, "a block is unpinned more often than it was pinned")
            site.retentions.wanted([key], self.now)
        self._carry_out(outcome)

    def carry(self, site: Site, count: int, taken: float) -> None:
        """The remote store takes a part of the offered blocks."""
        offers = self.core.remote.offers(site.group, count)
        before = {key: change.residency for key, change in site.mirror.blocks.items()}
        above: set[Key] = set()
        for offer, place in zip(offers, self.core.locate(site.group, [each.key for each in offers]), strict=True):
            require(offer.key in before, "a block is offered that is not there")
            require(place.slots[offer.tier] == offer.slot, "an offer names a slot where the block is not")
            require(offer.key not in site.settled, "a block is offered twice")
            site.settled.add(offer.key)
            require(not site.plan.chained or offer.key not in above, "a block is offered after what stands on it")
            if offer.parent is not None:
                above.add(offer.parent)
        gone, back = offers[: int(taken * len(offers))], offers[int(taken * len(offers)) :]
        self.core.remote.put_back(site.group, [offer.key for offer in back])
        site.settled -= {offer.key for offer in back}
        for tier in {offer.tier for offer in gone}:
            keys = [offer.key for offer in gone if offer.tier is tier]
            self._carry_out(self.core.remote.travelled(site.group, keys, tier, Tier.REMOTE, 1, self.now))
        after = {key: change.residency for key, change in site.mirror.blocks.items()}
        require(before == after, "a remote store changes what is here")
        self.seen["offered"] += bool(offers)
        self.seen["offered and not taken"] += bool(back)

    def reset(self, session: SessionId, *, force: bool) -> None:
        plan = self.core.reset_plan()
        blocks = sum(len(site.mirror.blocks) for site in self.sites.values())
        following = None
        dropped = kept = 0
        otherwise = self._removed_otherwise()
        while True:
            try:
                report, outcome = self.core.reset(self.now, force=force, following=following)
            except ResetRefused as error:
                self.seen["reset refused"] += 1
                require(bool(error.holders) or error.pinned > 0, "a reset is refused for nobody's sake")
                require(not force, "a forced reset is refused")
                return
            self._carry_out(outcome)
            dropped, kept, following = dropped + report.dropped, kept + report.kept, report.following
            if following is None:
                break
        self.seen["reset"] += 1
        otherwise = self._removed_otherwise() - otherwise  # to make room for waiting requests, between two slices
        require(blocks - otherwise <= dropped + kept <= blocks, "a reset overlooked a block")
        planned = (plan.dropped, plan.kept) == (dropped, kept)
        require(planned or otherwise > 0 or bool(self.clients.requests), "a reset did not as planned")
        for site in self.sites.values():
            for (tier, key), count in site.pins.items():
                require(not count or key in site.mirror.blocks, f"a block pinned in {tier} is gone with a reset")

    def _removed_otherwise(self) -> int:
        """Returns the number of blocks removed up to now by other causes than a reset."""
        return sum(self.seen[f"{EventType.REMOVED.name} {c.name}"] for c in Cause if c is not Cause.RESET)

    def expire(self, request: Request) -> None:
        self._carry_out(self.core.expire(request.id, self.now), expired=request.id)
        require(request.id not in self.clients.requests, "a request is not answered at its deadline")

    def cancel(self, request: Request) -> None:
        del self.clients.requests[request.id]
        self._carry_out(self.core.cancel(request.id, self.now))

    # -- sessions ----------------------------------------------------------------------------------------------------

    def orphan(self, session: SessionId) -> None:
        """The session's connection breaks, but its process lives."""
        self.clients.forget_requests(session)
        self.clients.orphaned.add(session)
        self._carry_out(self.core.orphan_session(session, self.now))

    def reattach(self, session: SessionId) -> None:
        self.clients.orphaned.discard(session)
        self._carry_out(self.core.reattach_session(session, self.now))

    def disown(self, session: SessionId) -> None:
        """The session is kicked, but its process lives."""
        self.clients.disown(session)
        self._carry_out(self.core.disown_session(session, self.now))

    def end(self, session: SessionId) -> None:
        """The session's process is gone."""
        self.clients.forget(session)
        self._carry_out(self.core.end_session(session, self.now))
        require(self.core.session_leases(session) == 0, "a session that is gone has leases")

    def end_remnant(self, session: SessionId) -> None:
        """A process of an earlier life of the daemon has finished with its slots; after the last one the keeper
        ends."""
        del self.clients.remnants[session]
        self.end(session)
        if not self.clients.remnants:
            self.end(self.keeper)
            ours = {lease.session for lease in self.core.leases.values()}
            require(ours <= set(self.clients.sessions), "what earlier lives left is never given back")

    # -- the mover, the clock and the hardware -------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return sum(site.mover.in_flight for site in self.sites.values())

    def progress(self, choose: Chooser) -> None:
        """Some moves begin or end; no move is reported."""
        for site in self.sites.values():
            site.mover.progress(choose)

    def report(self, choose: Chooser, *, faults: bool = True) -> None:
        site = choose.pick([site for site in self.sites.values() if site.mover.in_flight])
        results = site.mover.report(choose, faults=faults)
        self.seen["copies failed"] += sum(len(result.failed) for result in results)
        self.seen["copies corrupt"] += sum(len(result.corrupt) for result in results)
        self._carry_out(self.core.completed(results, self.now))

    def wait(self, nanoseconds: int) -> None:
        """Lets time pass. Any later call of the core may end a due retention."""
        self.now += nanoseconds
        self.verify()

    def tick(self) -> None:
        """Ticks the core until all due retentions have ended."""
        most = max(len(site.mirror.blocks) for site in self.sites.values())
        for _ in range(1 + most // self.setup.policy.blocks_a_call):
            self._carry_out(self.core.tick(self.now))
        for site in self.sites.values():
            site.retentions.must_expire(self.now)
        self.verify()

    def note_uses(self) -> None:
        """Writes the core's notes of used disk blocks down. Not a step: the core does not change."""
        for group, keys in self.core.take_disk_uses().items():
            self.sites[group].note_uses(keys)

    def awaits_disk(self) -> bool:
        """Returns whether a waiting request for windows has a block that is on disk alone."""
        asked = [request for request in self.clients.requests.values() if isinstance(request, PrefixRequest)]
        return any(
            site.residency(key) == Tier.DISK.bit
            for request in asked
            for key in request.keys
            for site in self.sites.values()
        )

    def lose(self, tier: Tier, meanwhile: Callable[[], None] = lambda: None) -> None:
        """A tier is lost. ``meanwhile``: calls between two slices."""
        self.lost.add(tier)
        waited = [request.id for request in self.clients.requests.values() if request.tier is tier]
        for site in self.sites.values():
            site.mover.lose(tier)
        outcome = self.core.lose_tier(tier, self.now)
        refused = {refusal.ticket for refusal in outcome.refusals}
        require(refused.issuperset(waited), f"somebody still waits for the {tier}, which is lost")
        self._carry_out(outcome)
        while self.core.behind:
            before = self.steps
            meanwhile()
            self.seen[f"called while the {tier} was being lost"] += self.steps - before
            self._carry_out(self.core.go_on(self.now))
        left = any(change.residency & tier.bit for s in self.sites.values() for change in s.mirror.blocks.values())
        require(not left, f"the {tier} is lost and said to hold blocks")

    def lose_bytes(self, site: Site, key: Key, tier: Tier) -> None:
        """A reader finds that a copy's bytes are not the committed bytes."""
        (place,) = self.core.locate(site.group, [key])
        slot = place.slots[tier]
        assert slot is not None
        if tier is Tier.DISK and site.disk is not None:
            site.disk.bad.add(slot)
        site.mover.spoil(tier, slot)
        self._carry_out(self.core.lose_bytes(site.group, key, tier, slot, self.now))
        self.seen[f"{tier} bytes lost"] += 1
        self.seen["hollow"] += site.is_hollow(key)

    def restore_disk(self) -> None:
        self.lost.discard(Tier.DISK)
        self._empty_disks()
        self._carry_out(self.core.restore_disk(self.now))

    def _empty_disks(self) -> None:
        for site in self.sites.values():
            if site.disk is not None:
                site.disk.empty()

    def restart(self, choose: Chooser, *, clean: bool) -> None:
        """Starts a new daemon on the same disk. After a crash its event ids start above all ids that may be in use. Its
        memory is new, with other sizes, or the old memory, which live processes may still use."""
        if clean:
            self.drain(choose)
        on_disk = {group: site.surviving() for group, site in self.sites.items()}
        if Tier.DISK in self.lost:
            self._empty_disks()
        if not clean:
            self.last_id += choose.below(100)
            self._sequencer = EventSequencer(self.last_id)
        if self.memory_tiers and choose.chance(50):
            self._adopt(choose, clean=clean)
        else:
            groups = len(self.sites)
            memory = draw_memory(choose, groups) if Tier.DISK not in self.tiers or choose.chance(90) else ({},) * groups
            shapes = [site.boot(slots) for site, slots in zip(self.sites.values(), memory, strict=True)]
            self._boot(shapes, Clients(self.setup.groups, self._memories), unclean=not clean, restarted=True)
        for group, keys in on_disk.items():
            left = self.sites[group].mirror.blocks.keys()
            require(keys <= left, "a block that was READY on disk is gone after the restart")
        self._about = frozenset()
        self.seen["restart clean" if clean else "restart after a crash"] += 1

    def _adopt(self, choose: Chooser, *, clean: bool) -> None:
        """Starts a daemon that adopts the old memory, and that may die during the start."""
        about = self._about
        in_memory = {group: site.remembered(about) for group, site in self.sites.items()}
        known = {group: dict(site.mirror.blocks) for group, site in self.sites.items()}
        users = [*self.clients.sessions, *self.clients.remnants]
        live = frozenset(session for session in users if choose.chance(70))
        remnants = self.clients.left_by(live)
        self.lifetime.ends_after(choose.below(12) if choose.chance(20) else None)
        while True:
            first = max(*users, self.keeper) + 1
            self.keeper = SessionId(first)
            old = OldLife(live, frozenset(users) - live, self.keeper)
            clients = Clients(self.setup.groups, self._memories, first + 1, remnants)
            try:
                shapes = [site.adopt() for site in self.sites.values()]
                self._boot(shapes, clients, unclean=not clean, restarted=True, old=old)
                break
            except Died:
                about |= self._about
                clean = False
                self._sequencer = EventSequencer(self.last_id)
                self.seen["died while it adopted"] += 1
        self.lifetime.ends_after(None)
        for group, site in self.sites.items():
            self._verify_adopted(site, in_memory[group], known[group], about)
        self.seen["memory adopted"] += 1

    def _verify_adopted(
        self, site: Site, in_memory: Mapping[Key, int], known: Mapping[Key, ListingRow], about: Set[SlotRef]
    ) -> None:
        """Checks the adopted memory. ``about``: slots that a daemon was changing when it died."""
        memory_bits = sum(tier.bit for tier in site.memories)
        for key, tiers in in_memory.items():
            require(site.residency(key) & tiers == tiers, "a block that was READY in memory is gone after the restart")
        for key, change in site.mirror.blocks.items():
            was = known[key].residency if key in known else 0
            new = change.residency & memory_bits & ~was
            slots = {
                SlotRef(site.group, t, at) for t, m in site.memories.items() if new & t.bit for at in m.slots_of(key)
            }
            require(not new or not about.isdisjoint(slots), "a block is back in memory that had left it")
        self.seen["found in memory"] += len(in_memory)

    # -- coming to rest ------------------------------------------------------------------------------------------------

    def drain(self, choose: Chooser) -> None:
        """Ends everything in flight with success, and all leases ahead. Checks that no request waits then."""
        for _ in range(DRAIN_BOUND):
            if self.in_flight:
                self.report(choose, faults=False)
            elif self.core.behind:
                self.go_on()
            elif ahead := self._leased_ahead():
                self.release(self.clients.leases[ahead[0]].session, ahead[:1])
            else:
                break
        require(self.in_flight == 0, "moves beget moves for ever")
        require(not self.core.behind, "what calls leave is never done")
        require(not self.clients.requests, "somebody waits though nothing is in flight")

    def settle(self, choose: Chooser) -> None:
        """Ends all sessions, and checks that every usable slot can be reserved and that no owner is left."""
        for session in self.clients.sessions:
            self.end(session)
        for session in list(self.clients.remnants):
            self.end_remnant(session)
        for site in self.sites.values():
            for (tier, key), count in list(site.pins.items()):
                for _ in range(count):
                    self.pin(self.clients.sessions[0], site, tier, [key], unpin=True)
        self.drain(choose)
        last = self.clients.sessions[0]
        for site in self.sites.values():
            for tier in site.memories:
                if tier in self.lost:
                    states = self.core.stats().groups[site.group].tiers[tier].states
                    out_of_use = states[SlotState.QUARANTINED] == site.slots[tier]
                    require(out_of_use, f"the {tier} is lost, and slots of it are in use")
                    continue
                self.reserve(last, site, tier, site.slots[tier])
                self.drain(choose)
                leased = len(self.clients.leased(site.group, tier))
                require(leased == site.slots[tier], f"{tier} slots have leaked")
        self.end(last)
        self.drain(choose)
        for site in self.sites.values():
            for tier in site.memories:
                self._write_down(site, tier, choose)
        for site in self.sites.values():
            for tier, memory in site.memories.items():
                require(not any(memory.owners), f"{tier} slots are owned by nobody's session")
        self.seen["settled"] += 1

    def _write_down(self, site: Site, tier: Tier, choose: Chooser) -> None:
        """Checks background writes: without leases and faults, a block of sufficient priority gets to the lowest tier,
        and its upper copy stays."""
        site.written_down.clear()
        low, policy = max(site.slots), self.setup.policy
        new = next((key for key in site.roots if key not in site.mirror.blocks), None)
        edges = self.core.stats().edges
        worth = all(policy.threshold(src, low) <= MAX_PRIORITY for src in site.slots if src < low)
        clean = site.disk_works and not self.lost
        works = clean and all(edge.degraded_until <= self.now for edge in edges.values())
        if policy.write_policy is WriteMode.BACK or tier is low or new is None or not (worth and works):
            return
        session = self.clients.sessions[0]
        self.reserve(session, site, tier, 1)
        self.drain(choose)
        (holding,) = self.clients.leases.values()
        (slot,) = holding.blank
        self.commit(holding, [CommitItem(slot, new, None, MAX_PRIORITY, 0, label_of(new))])
        if policy.write_policy is WriteMode.SELECTIVE:
            self.acquire(session, [site], tier, [ChainRequest([new])])
        self.drain(choose)
        there = site.residency(new)
        written = bool(there & low.bit) or new in site.written_down  # the copy may have been evicted since
        require(bool(there & tier.bit), "a block that is held has left")
        require(written, f"a block that is to be written down to {low} never gets there")
        self.seen[f"written down, {policy.write_policy}"] += 1
        self.end(session)
        self.drain(choose)

    # -- an outcome, in the order of core/outcome.py -----------------------------------------------------------------

    def _carry_out(self, outcome: Outcome, expired: TicketId | None = None) -> None:
        self.steps += 1
        self.lossy = any(event.cause in LOSSES for event in outcome.events)
        pinned = any(any(site.pins.values()) for site in self.sites.values())
        alone = not self.clients.leases and not pinned and len(self.clients.requests) == 1
        before = {group: site.mirror.blocks.copy() for group, site in self.sites.items()} if outcome.grants else {}
        store = self.lifetime.store
        noted = (content.ref for content in contents(outcome))  # among them slots that lost their block while held
        self._about = frozenset((*begun(outcome), *filled(outcome), *noted))
        for ref in begun(outcome):
            store()
            self.sites[ref.group].memories[ref.tier].begin_write(ref.slot)
        for ownership in owners(outcome):
            store()
            ref = ownership.ref
            self.sites[ref.group].memories[ref.tier].owners[ref.slot] = ownership.session
        for event in outcome.events:
            store()
            self._take_event(event)
        for move in outcome.moves:
            store()
            lost = self.lost.intersection((move.src, move.dst))
            require(not lost, f"move {move.id} from {move.src} to {move.dst} touches a tier that is lost")
            route = f"{move.src}>{move.dst if move.dst is not None else 'nowhere'}"
            self.seen[f"{route} {move.cause.name}"] += len(move.items)
            self.sites[move.group].submit(move)
        for content in contents(outcome):
            store()
            self._notes += 1
            self.sites[content.ref.group].memories[content.ref.tier].note(content, self._notes)
        for ref in filled(outcome):
            store()
            self.sites[ref.group].memories[ref.tier].end_write(ref.slot)
        for content in restated(outcome):
            store()
            self.sites[content.ref.group].memories[content.ref.tier].restate(content)
        store()
        self._about = frozenset()
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
        coming = self.in_flight > 0 or self.core.behind or bool(self._leased_ahead())
        require(not self.clients.requests or coming, "somebody waits for nothing")
        self.verify()

    def _take_event(self, event: BlockEvent) -> None:
        require(event.id == self.last_id + 1, f"event {event.id} follows event {self.last_id}")
        require(event.time_ns == self.now, "an event has another time than its call")
        self.last_id = event.id
        self.seen[f"{event.type.name} {event.cause.name}"] += len(event.blocks)
        self.sites[event.group].mirror.apply(event)
        if event.cause is Cause.WRITE_THROUGH:
            self.sites[event.group].written_down.update(event.blocks.keys)
        if event.type is EventType.REMOVED:
            self.sites[event.group].settled -= set(event.blocks.keys)
            gone = {(event.group, key) for key in event.blocks.keys}
            for request in self.clients.requests.values():
                if isinstance(request, PrefixRequest):
                    request.removed.update(gone)
            for removed in self._watchers:
                removed.update(gone)

    def _leased_ahead(self) -> list[LeaseId]:
        return [lease for window in self.core.windows.values() for held in window.ahead.values() for lease in held]

    def _granted(
        self,
        grant: Grant,
        before: Mapping[GroupId, Mapping[Key, ListingRow]],
        outcome: Outcome,
        expired: TicketId | None,
    ) -> Request:
        request = self.clients.take_answer(grant)
        assert isinstance(request, GroupRequest | PrefixRequest)
        nothing = isinstance(request, PrefixRequest) and not grant.leases
        if self.inspect and grant.ticket != expired and not nothing:
            groups = list(request.found_in) if isinstance(request, PrefixRequest) else [request.group]
            queued = [ticket for group in groups for ticket in self.core.windows[group].queued(request.tier)]
            older = [ticket for ticket in queued if ticket.id < grant.ticket and not _may_be_back(ticket)]
            require(not older, f"{request.tier}: the queue was overtaken")
        if isinstance(request, SlotsRequest):
            self.seen["granted slots"] += 1
            self.clients.take_slots(request, grant)
        elif isinstance(request, PrefixRequest):
            what = "nothing" if not grant.blocks else "all" if grant.blocks == grant.matched else "less than"
            several = len({len(part.slots) for part in grant.groups}) > 1
            where = f"across groups{', of a window' if several else ''}"
            if len(request.found_in) == 1:
                (group,) = request.found_in
                where = "in a window" if self.sites[group].plan.sliding else "in a full group"
            self.seen[f"granted {what} matched {where}"] += 1
            self.clients.take_prefix(request, grant)
        elif isinstance(request, MoveRequest):
            self.seen["granted a move"] += 1
            require(len(grant.results) == len(request.keys), "a move answers for other blocks than asked")
            arrived = _ever_in(request, before[request.group], outcome)
            for key, there in zip(request.keys, grant.results, strict=True):
                require(not there or key in arrived, "a move reports a block where it is not")
        return request

    # -- promises, checked after every step ----------------------------------------------------------------------------

    def verify(self) -> None:
        if self.inspect:
            check(self.core)
        require(self.last_id == self._sequencer.last, "an event id was given out and its event was not")
        for site in self.sites.values():
            site.verify(self.core, self.now, lossy=self.lossy)
        self._note_holds()
        for site in self.sites.values():
            site.retentions.may_expire(self.now)
        self.clients.verify(self.core.leases.values())

    def _note_holds(self) -> None:
        """Notes holds: clocks stand while their blocks are leased, and may stand while a waiting request has them."""
        for holding in self.clients.leases.values():
            keys = list(holding.blocks.values())
            retentions = self.sites[holding.plan.group].retentions
            retentions.wanted(keys, self.now)
            retentions.held(self._held(holding, holding.plan.group), self.now)
        for request in self.clients.requests.values():
            if isinstance(request, PrefixRequest):
                for group in request.found_in:
                    self.sites[group].retentions.wanted(request.keys, self.now)

    def _held(self, holding: Holding, group: GroupId) -> list[Key]:
        """Returns the blocks of the group that are still in the slots of the lease."""
        blocks = holding.blocks if holding.plan.group == group else {}
        places = self.core.locate(group, list(blocks.values()))
        leased = zip(blocks.items(), places, strict=True)
        return [key for (slot, key), at in leased if at.slots[holding.tier] == slot]

    # -- expected answers ----------------------------------------------------------------------------------------------

    def _failing(self, tier: Tier) -> int:
        """Returns, as a bit set, the tiers with a failing edge to ``tier``, and the lost tiers."""
        edges = self.core.stats().edges
        lost = sum(tier.bit for tier in self.lost)
        return lost | sum({src.bit for (src, dst), e in edges.items() if dst is tier and e.degraded_until > self.now})

    def _refused(self, tier: Tier) -> None:
        require(tier in self.lost, f"{tier} is called lost and is not")
        self.steps += 1
        self.seen[f"refused, the {tier} is lost"] += 1
        self.verify()


def _may_be_back(ticket: Ticket) -> bool:
    """An acquire whose copy failed queues again, in its old place."""
    return isinstance(ticket, FetchTicket) and ticket.hold


def _ever_in(request: MoveRequest, before: Mapping[Key, ListingRow], outcome: Outcome) -> set[Key]:
    """Returns the blocks that were in the tier at some time of this step."""
    events = [event for event in outcome.events if event.group == request.group]
    seen = [*before.values(), *(change for event in events for change in changes(event.blocks))]
    return {change.key for change in seen if change.residency & request.tier.bit}
