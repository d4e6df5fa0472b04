"""Checks the invariants, after every step of a test and under the daemon's debug flag.

Recomputes everything that the core keeps incrementally, from the few facts that cannot be derived, and compares.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvtier.abi.words import ENDED_MS
from kvtierd.core.acquires import AcquireTicket
from kvtierd.core.block import DOWNWARDS, UPWARDS, Block, Copy, Phase
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.group import GroupState
from kvtierd.core.ids import NO_LABEL, TIERS, GroupId, SlotId, Tier
from kvtierd.core.leases import FetchTicket, SlotLease, Ticket
from kvtierd.core.manager import BlockManager
from kvtierd.core.policy import DEFAULT_PRIORITY, WriteMode
from kvtierd.core.slots import SlotState
from kvtierd.core.window import WindowManager

LISTS: Final = ("redundant", "demotable", "clean", "leaf", "dirty", "unsettled")
_STATES: Final = tuple(SlotState)
_STATE_IN: Final = {Phase.FILLING: SlotState.FILLING, Phase.READY: SlotState.READY, Phase.LEAVING: SlotState.RETIRING}


def check(manager: BlockManager) -> None:
    """Raises :class:`InvariantViolation` for the first broken invariant, numbered as in docs/architecture.md."""
    for group, window in manager.windows.items():
        leases = [lease for lease in manager.leases.values() if lease.group == group]
        fetches = [t for w, t in manager.tickets.values() if w is window and isinstance(t, FetchTicket)]
        parts = [part for ticket in manager.acquires.tickets.values() for part in ticket.parts]
        fetches += [part.fetch for part in parts if part.window is window]
        _Checker(group, window, leases, fetches).run()
    for ticket in manager.acquires.tickets.values():
        _acquire(ticket)


def _acquire(ticket: AcquireTicket) -> None:
    """4: in each group an acquire has the blocks of one prefix, claimed or held everywhere, and an acquire that waits
    has no room."""
    states = {part.fetch.waiting for part in ticket.parts}
    if len(states) != 1:
        raise _broken(4, f"request {ticket.id} waits in some groups only")
    if not ticket.least <= ticket.length <= ticket.matched:
        raise _broken(4, f"request {ticket.id} is for {ticket.length} blocks")
    for part in ticket.parts:
        needed = part.window.state.attention.needs(ticket.length)
        wanted = list(needed.pick(ticket.keys))
        right = part.needed == needed and [block.key for block in part.fetch.blocks] == wanted
        if not right:
            raise _broken(4, f"request {ticket.id} has other blocks than a prefix of {ticket.length} needs")
        queued = part.fetch in part.window.queued(ticket.tier)
        if queued != ticket.waiting:
            raise _broken(4, f"request {ticket.id} is in a queue or not, wrongly")
    heads = [part.fetch for part in ticket.parts if part.window.heads(part.fetch)]
    if ticket.waiting:
        going = len(heads) == len(ticket.parts) and all(head.able for head in heads)
        if going:
            raise _broken(4, f"request {ticket.id} waits and has room everywhere")
        if not all(head.room is None for head in heads):
            raise _broken(4, f"request {ticket.id} waits for room that never comes")
    else:
        if not any(part.fetch.pending for part in ticket.parts):
            raise _broken(4, f"request {ticket.id} has all and no answer")


def _broken(invariant: int, what: str) -> InvariantViolation:
    """Makes the error. Called only for a broken invariant: formatting messages would cost more than all checks."""
    return InvariantViolation(f"invariant {invariant}: {what}")


class _Checker:
    def __init__(
        self, group: GroupId, window: WindowManager, leases: list[SlotLease], fetches: list[FetchTicket]
    ) -> None:
        self.group = group
        self.window = window
        self.state: GroupState = window.state
        self.leases = leases
        self.fetches = fetches
        self.transfers = window.transfers.all()

    def run(self) -> None:
        self.slots()
        self.index()
        self.order()
        self.disk_closure()
        self.holds()
        self.clocks()
        self.windows()
        self.flying()
        self.candidates()
        self.queues()

    def slots(self) -> None:
        """1, 2, 4: every slot has one user and the state that its user implies; the states sum to the capacity."""
        for tier in self.state.tiers:
            table = self.state.slots[tier]
            states = table.snapshot()
            if len(states) != table.capacity or any(states.count(s) != table.count(s) for s in _STATES):
                raise _broken(1, f"{tier}: counts are wrong")
            free = table.free_slots()
            if not len(free) == len(set(free)) == table.count(SlotState.FREE):
                raise _broken(1, f"{tier}: free list is wrong")
            if any(states[slot] != SlotState.FREE for slot in free):
                raise _broken(1, f"{tier}: a used slot is listed free")
            self._users(tier, states)

    def _users(self, tier: Tier, states: bytes) -> None:
        users: set[int] = set()

        def use(slot: SlotId, *meant: SlotState) -> None:
            if slot in users:
                raise _broken(4, f"{tier} slot {slot} has two users")
            if states[slot] not in meant:
                raise _broken(1, f"{tier} slot {slot} is {SlotState(states[slot]).name}, to its user {meant[0].name}")
            users.add(slot)

        for block in self.state.index:
            copy = block.copies[tier]
            if copy is not None:
                use(copy.slot, _STATE_IN[copy.phase])
        for lease in self.leases:
            for slot in lease.blank if lease.tier is tier else ():
                writers = lease.writers(slot)
                if writers[:1] == [lease]:  # joined leases use the slot together
                    orphaned = all(one.orphaned for one in writers)
                    use(slot, SlotState.ORPHANED if orphaned else SlotState.BLANK)
        for copy in self._detached(tier):
            use(copy.slot, SlotState.READY if copy.holds and copy.phase is not Phase.FILLING else SlotState.RETIRING)
        for slot in self.state.slots_being_retired() if tier is Tier.DISK else ():
            use(slot, SlotState.RETIRING, SlotState.QUARANTINED)
        for _, slot in self.state.undeleted if tier is Tier.DISK else ():
            use(slot, SlotState.QUARANTINED)
        for number, state in enumerate(states):
            if state != SlotState.FREE and number not in users:
                known = SlotId(number) in self.state.corrupt[tier] or tier in self.state.lost
                if state != SlotState.QUARANTINED or not known:
                    raise _broken(1, f"{tier} slot {number} is {SlotState(state).name} for no reason")

    def _detached(self, tier: Tier) -> list[Copy]:
        """Copies that are detached from their block but still held, read or being filled."""
        seen: dict[int, Copy] = {}
        for lease in self.leases:
            if lease.tier is tier:
                seen |= {id(copy): copy for block, copy in lease.held.items() if block.copies[tier] is not copy}
        for ticket in self.fetches:
            if ticket.tier is tier and not ticket.waiting and ticket.hold:
                pairs = zip(ticket.blocks, ticket.copies, strict=True)
                seen |= {id(c): c for b, c in pairs if b.copies[tier] is not c and c.holds > 0}
        for flight in self.transfers:
            for end, copy in zip(flight.edge, (flight.source, flight.copy), strict=True):
                if end is tier and flight.block.copies[tier] is not copy:
                    seen[id(copy)] = copy
        return list(seen.values())

    def index(self) -> None:
        """5: an indexed block is READY in some tier, and so is its parent, unless bytes have been lost."""
        sets = Counter(block.residency for block in self.state.index)
        if any(self.state.residencies.count(one) != sets[one] for one in range(1, 1 << len(TIERS))):
            raise _broken(5, f"blocks by residency are {sets}, counted otherwise")
        if self.state.conversations.astray:
            raise _broken(5, "a conversation is at a block that is not indexed")
        for block in self.state.index:
            if not block.indexed:
                raise _broken(5, f"block {block} is in the index but does not know")
            if block.hollow and not self.state.losing:
                raise _broken(5, f"block {block} is indexed and nowhere READY")
            valid = sum(tier.bit for tier in TIERS if (copy := block.copies[tier]) is not None and copy.valid)
            disk = block.copies[Tier.DISK]
            stays = disk is not None and disk not in self.state.losing
            if disk is not None and stays and disk.slot in self.state.corrupt[Tier.DISK]:
                raise _broken(2, f"block {block} stays in a disk slot that is corrupt")
            if block.residency != valid:
                raise _broken(2, f"block {block} says {block.residency}, its copies {valid}")
            parent = block.parent
            if not self.state.attention.chained and (parent is not None or block.first_child is not None):
                raise _broken(5, f"block {block} of a group without chains has relatives")
            if self.state.shape.flat and block.parent_key is not None:
                raise _broken(5, f"flat block {block} has a parent")
            if self.state.is_partial(block) and block.first_child is not None:
                raise _broken(5, f"partial block {block} has children")
            if parent is not None:
                if not parent.indexed:
                    raise _broken(5, f"block {block} is indexed, its parent {parent} is not")
                if block not in parent.children:
                    raise _broken(5, f"block {block} is not among its parent's children")
            for child in block.children:
                if not child.indexed or child.parent is not block:
                    raise _broken(5, f"block {block} has a stray child")

        roots = (block for block in self.state.index if block.parent_key is None)
        if {block for block in roots if (block.traits.label or NO_LABEL).tokens} != set(
            self.state.index.children(None)
        ):
            raise _broken(5, "a root with tokens is not listed, or another block is")

    def order(self) -> None:
        """5: effective priority is the highest of own and children's; no parent ranks under its child. Due blocks are
        exempt."""
        ancestry = self.state.ancestry
        if not all(block.indexed for block in ancestry.due):
            raise _broken(5, "a block that has gone is still to hear of its children")
        for block in self.state.index:
            children = [child.priority for child in block.children]
            if ancestry.miscounted(block):
                raise _broken(5, f"block {block} miscounts its children's priorities")
            if block in ancestry.due:
                continue
            if block.priority != max([block.own_priority, *children]):
                raise _broken(5, f"block {block}: priority")
            for child in block.children:
                if child.rank >= block.rank:
                    raise _broken(5, f"block {block} ranks under its child {child}")

    def disk_closure(self) -> None:
        """5: the disk is prefix-closed by itself."""
        for block in self.state.index:
            copy = block.copies[Tier.DISK]
            on_disk = sum(child.copies[Tier.DISK] is not None for child in block.children)
            if on_disk != block.disk_children:
                raise _broken(5, f"block {block} miscounts its disk children")
            if copy is None or not copy.valid or block.parent is None:
                continue  # a copy in flight whose parent's copy failed is abandoned when it lands
            above = block.parent.copies[Tier.DISK]
            if above is None or not above.valid:
                raise _broken(5, f"block {block} is on disk without its parent")

    def holds(self) -> None:
        """4: holds and claims are exactly the leases' and fetches'; a held copy is not leaving."""
        held: Counter[int] = Counter()
        copies: dict[int, tuple[Tier, Copy]] = {}
        claims: Counter[Block] = Counter()
        for lease in self.leases:
            for copy in lease.held.values():
                held[id(copy)] += 1
                copies[id(copy)] = (lease.tier, copy)
        for tier in self.state.tiers:
            self._pinned(tier, held)
        for ticket in self.fetches:
            if ticket.waiting:
                claims.update(ticket.blocks)
            elif ticket.hold:
                for block, copy in zip(ticket.blocks, ticket.copies, strict=True):
                    if block.copies[ticket.tier] is copy or copy.holds:
                        held[id(copy)] += 1
                        copies[id(copy)] = (ticket.tier, copy)
        for block in self.state.index:
            if block.claims != claims[block]:
                raise _broken(4, f"block {block} has claims of nobody")
            for tier in self.state.tiers:
                attached = block.copies[tier]
                if attached is not None:
                    copies[id(attached)] = (tier, attached)
        for identity, (_, copy) in copies.items():
            if copy.holds != held[identity]:
                raise _broken(4, f"slot {copy.slot} counts {copy.holds} holds, not {held[identity]}")
            if copy.holds and copy.phase is Phase.LEAVING:
                raise _broken(4, f"slot {copy.slot} leaves while held")
        for tier in self.state.tiers:
            count = sum(copy.holds > 0 for of, copy in copies.values() if of is tier)
            if count != self.state.held[tier]:
                raise _broken(4, f"{tier}: {self.state.held[tier]} held slots, not {count}")

    def _pinned(self, tier: Tier, held: Counter[int]) -> None:
        """4: a pinned copy is there and counts as held once; the number of pinned slots is within its limit."""
        for block, copy in self.state.pins.copies(tier):
            if not block.indexed or block.copies[tier] is not copy:
                raise _broken(4, f"{tier} slot {copy.slot} is pinned and gone")
            if not copy.valid:
                raise _broken(4, f"{tier} slot {copy.slot} is pinned and being filled")
            held[id(copy)] += 1
        most = self.state.policy.pinnable(self.state.slots[tier].capacity)
        if self.state.pins.slots(tier) > most:
            raise _broken(7, f"{tier}: more than {most} slots are pinned")

    def clocks(self) -> None:
        """A clock runs for every unheld block whose priority is to end, and for no other block."""
        running = {block for block in self.state.index if block.traits.deadline_ns}
        if running != self.state.clocks.running():
            raise _broken(6, "a deadline is not kept, or is of nobody's")
        for block in self.state.index:
            lasting = block.traits.duration_ms in (0, ENDED_MS)
            if block.traits.duration_ms and block.own_priority == DEFAULT_PRIORITY:
                raise _broken(6, f"block {block} has a duration that says nothing")
            awaited = not lasting and not block.held
            if (block in running) != awaited:
                raise _broken(6, f"block {block}: its clock runs or stands wrongly")

    def windows(self) -> None:
        """A writer in a sliding group holds only its sinks and the blocks that the newest block of its chain looks back
        on."""
        for lease in self.leases:
            reach = {block for trail in lease.trails.values() for block in trail}
            if lease.trails and not reach.issuperset(lease.held):
                raise _broken(4, f"lease {lease.id} holds what slid out")
            for trail in lease.trails.values():
                if not 0 < len(trail) <= self.state.attention.sinks + self.state.attention.span:
                    raise _broken(4, f"lease {lease.id} looks back too far")

    def flying(self) -> None:
        """3: sources of copies in flight stay valid; ``reads`` counts exactly the copies in flight."""
        reads: Counter[int] = Counter()
        for flight in self.transfers:
            reads[id(flight.source)] += DOWNWARDS if flight.edge[1] > flight.edge[0] else UPWARDS
            if not flight.source.valid:
                raise _broken(3, f"a copy reads slot {flight.source.slot}, which is not READY")
            if flight.copy.phase is not Phase.FILLING:
                raise _broken(2, f"slot {flight.copy.slot} is READY before its copy ended")
        for block in self.state.index:
            for tier in self.state.tiers:
                copy = block.copies[tier]
                if copy is None:
                    continue
                if copy.reads != reads[id(copy)]:
                    raise _broken(3, f"{tier} slot {copy.slot} miscounts its readers")
                if copy.phase is Phase.LEAVING and copy.reads != DOWNWARDS:
                    raise _broken(3, f"{tier} slot {copy.slot} leaves with no copy in flight")
                if copy.phase is Phase.FILLING:
                    filled = any(flight.copy is copy for flight in self.transfers)
                    if not filled:
                        raise _broken(2, f"{tier} slot {copy.slot} is filled by nothing")

    def candidates(self) -> None:
        """4, 5: the candidate lists hold exactly the blocks that may leave."""
        for tier in self.state.tiers:
            lists = self.state.candidates(tier)
            expected: dict[str, set[Block]] = {name: set() for name in LISTS}
            for block in self.state.index:
                for name in self._lists_of(block, tier):
                    expected[name].add(block)
            for name, blocks in expected.items():
                offered = list(getattr(lists, name))
                right = len(offered) == len(blocks) and all(block in blocks for block in offered)
                if not right:
                    raise _broken(4, f"{tier}: the {name} candidates are wrong")
            freely = len(expected["redundant"] | expected["clean"])
            if lists.cleans != freely:
                raise _broken(4, f"{tier}: counts {lists.cleans} blocks that go freely, not {freely}")

    def _lists_of(self, block: Block, tier: Tier) -> list[str]:
        copy = block.copies[tier]
        if copy is None or copy.phase is not Phase.READY or copy.holds or block.claims:
            return []
        if copy.reads:
            return ["demotable"] if copy.reads == DOWNWARDS else []
        mask = block.residency
        up = mask & (tier.bit - 1) != 0 and not any(block in self.state.clean_copies[t] for t in self.state.above[tier])
        low = mask >= 2 * tier.bit
        redundant = up and not (tier is Tier.DISK and block.disk_children)
        below = self.state.below[tier]
        fresh = self.state.policy.write_policy is WriteMode.SELECTIVE and block not in self.state.reused
        kept = not fresh and any(block.priority >= self.state.policy.threshold(tier, t) for t in below)
        remote = self.state.remote
        belongs = {
            "unsettled": remote is not None and remote.is_candidate(block, tier),
            "dirty": kept and not low and not redundant and all(block.copies[t] is None for t in below),
            "redundant": redundant,
            "demotable": bool(below) and not redundant and (low or kept),
            "clean": low,
            "leaf": block.first_child is None and all(c is None or c is copy for c in block.copies),
        }
        return [name for name, true in belongs.items() if true]

    def queues(self) -> None:
        """Requests wait in order, and only while work is in flight or slots are leased ahead."""
        for tier in self.state.tiers:
            queue = self.window.queued(tier)
            if [t.id for t in queue] != sorted(t.id for t in queue):
                raise _broken(4, f"{tier}: requests are out of order")
            waits = queue and not self._waits_elsewhere(queue[0])
            coming = self.window.transfers.active or self.state.losing or self.window.slots_ahead(tier)
            if waits and not coming:
                raise _broken(4, f"{tier}: a request waits and nothing is in flight")

    def _waits_elsewhere(self, head: Ticket) -> bool:
        """Whether the head has room here and waits for other groups."""
        return isinstance(head, FetchTicket) and head.hold and head.able
