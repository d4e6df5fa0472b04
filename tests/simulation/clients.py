"""The clients: their requests, the promises that they got, and checks of these promises."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvtierd.core.ids import SEVERAL, GroupId, Key, LeaseId, SessionId, SlotId, TicketId, Tier
from kvtierd.core.leases import LeftLease, SlotLease
from kvtierd.core.outcome import Grant, Refusal
from tests.simulation.memory import POISON, Content, Memory
from tests.simulation.setup import GroupPlan
from tests.simulation.violation import Violation, require

SESSIONS: Final = 3


@dataclass(slots=True, frozen=True)
class Request:
    """A call that has not been answered."""

    id: TicketId
    session: SessionId
    tier: Tier


@dataclass(slots=True, frozen=True)
class GroupRequest(Request):
    group: GroupId


@dataclass(slots=True, frozen=True)
class SlotsRequest(GroupRequest):
    count: int


@dataclass(slots=True, frozen=True)
class MoveRequest(GroupRequest):
    keys: tuple[Key, ...]


@dataclass(slots=True, frozen=True)
class PrefixRequest(Request):
    """Over one group or all. ``found_in``: residencies of the blocks stored when the call was
    made, by group. ``readable``, ``stored``: the longest prefix that these could serve, without and with what a failing
    edge may be needed for. ``removed``: blocks that went since; they may have been stored again elsewhere."""

    keys: tuple[Key, ...]
    min_blocks: int
    found_in: Mapping[GroupId, Mapping[Key, int]]
    readable: int
    stored: int
    removed: set[tuple[GroupId, Key]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Holding:
    """A lease. ``blank``: the client's last write to each slot. ``blocks``: the block of each slot, in the order of the
    answers. ``chains``: for a sliding group the stored blocks, each the child of the block before, with its place in
    the sequence, infinity if unknown. ``family``: the leases that joined one another.
    """

    id: LeaseId
    session: SessionId
    plan: GroupPlan
    tier: Tier
    blank: dict[SlotId, Content] = field(default_factory=dict)
    blocks: dict[SlotId, Key] = field(default_factory=dict)
    chains: list[list[tuple[Key, SlotId | None, float]]] = field(default_factory=list)
    family: list[Holding] = field(default_factory=list)

    def writers(self, slot: SlotId) -> list[Holding]:
        """Returns the leases of the family that may write the slot."""
        return [holding for holding in (self.family or [self]) if slot in holding.blank]

    def extend(self, key: Key, parent: Key | None, slot: SlotId | None) -> None:
        """Adds a stored block to its chain. ``slot`` None: the block was stored before. The lease no longer holds
        blocks outside the block's window, nor an own copy of the block that was lost since."""
        if not self.plan.sliding:
            return
        again = next((chain for chain in self.chains if chain[-1][0] == key), None)
        chain = again or next((chain for chain in self.chains if chain[-1][0] == parent), None)
        place = 0.0 if parent is None else inf
        if chain is None:
            chain = []
            self.chains.append(chain)
        elif chain:
            place = chain[-1][2] + (not again)
        kept = chain[:-1] if again else chain[:]
        kept.append((key, slot, place))
        kept = [one for one in kept[: -self.plan.reach] if one[2] < self.plan.first] + kept[-self.plan.reach :]
        for _, outside, _ in chain:
            if outside is not None and outside not in {at for _, at, _ in kept}:
                self.blocks.pop(outside, None)
        chain[:] = kept


Remnants = Mapping[SessionId, Sequence[Holding]]
"""Leases of live processes from earlier lives of the daemon, by session, as the processes know them."""


class Clients:
    """All sessions of a daemon's life, attached or orphaned, their requests and leases. An ended session may begin
    anew.

    ``remnants``: leases of earlier lives. Slots that they may touch are leased in this life, too, to them or the
    keeper.
    """

    def __init__(
        self,
        plans: Sequence[GroupPlan],
        memories: Mapping[GroupId, Mapping[Tier, Memory]],
        first_session: int = 1,
        remnants: Remnants | None = None,
    ) -> None:
        self._plans = {plan.group: plan for plan in plans}
        self._memories = memories
        self.requests: dict[TicketId, Request] = {}
        self.leases: dict[LeaseId, Holding] = {}
        self.sessions = tuple(SessionId(number) for number in range(first_session, first_session + SESSIONS))
        self.remnants = dict(remnants or {})
        self.orphaned: set[SessionId] = set()
        self._scribbles = 0

    # -- actions of clients ------------------------------------------------------------------------------------------

    def scribble(self, holding: Holding, slot: SlotId) -> None:
        """Writes a blank slot, as a client may at any time, even after its connection broke."""
        self._scribbles += 1
        self.write(holding, slot, b"scribble %d" % self._scribbles)

    def scribble_on_remains(self, holding: Holding, slot: SlotId) -> None:
        """Writes a blank slot as a client of an earlier life, which does not know the new daemon yet."""
        self.scribble(holding, slot)
        place = (holding.plan.group, holding.tier)
        for restored in self.leases.values():
            if (restored.plan.group, restored.tier) == place and slot in restored.blank:
                restored.blank[slot] = holding.blank[slot]

    def write(self, holding: Holding, slot: SlotId, content: Content) -> None:
        for writer in holding.writers(slot):
            writer.blank[slot] = content
        self._memories[holding.plan.group][holding.tier].contents[slot] = content

    def committed(self, holding: Holding, slot: SlotId, key: Key, parent: Key | None) -> None:
        del holding.blank[slot]
        holding.blocks[slot] = key
        holding.extend(key, parent, slot)

    def found_stored(self, holding: Holding, slot: SlotId, key: Key, parent: Key | None) -> None:
        del holding.blank[slot]
        if key not in holding.blocks.values():
            holding.extend(key, parent, None)

    def give_back(self, holding: Holding, slots: Collection[SlotId]) -> None:
        for slot in slots:
            holding.blank.pop(slot, None)
            holding.blocks.pop(slot, None)

    def release(self, lease: LeaseId) -> None:
        holding = self.leases.pop(lease)
        self.give_back(holding, [*holding.blank, *holding.blocks])

    def join(self, holding: Holding, session: SessionId, lease: LeaseId, slots: Collection[SlotId]) -> None:
        """Adds a lease that joins ``holding``. ``slots``: slots that still have their blocks."""
        require(lease not in self.leases, f"lease {lease} is given twice")
        holding.family = holding.family or [holding]
        joined = Holding(lease, session, holding.plan, holding.tier, dict(holding.blank), family=holding.family)
        joined.blocks = {slot: key for slot, key in holding.blocks.items() if slot in slots}
        joined.chains = [list(chain) for chain in holding.chains]
        holding.family.append(joined)
        self.leases[lease] = joined

    def lease_ahead(self, holding: Holding, lease: LeaseId, slots: Iterable[SlotId]) -> None:
        """Adds a lease of slots that nobody has written yet, like ``holding``, which has ended."""
        require(lease not in self.leases, f"lease {lease} is given twice")
        blank = dict.fromkeys(slots, POISON)
        require(self.leased(holding.plan.group, holding.tier).isdisjoint(blank), "a leased slot is leased ahead")
        self.leases[lease] = Holding(lease, holding.session, holding.plan, holding.tier, blank)

    @property
    def usable(self) -> list[Holding]:
        """Leases that their clients know."""
        return [holding for holding in self.leases.values() if holding.session in self.sessions]

    def left_by(self, sessions: Collection[SessionId]) -> Remnants:
        """Returns the leases of these sessions when the daemon dies."""
        ours = {session: [h for h in self.leases.values() if h.session == session] for session in self.sessions}
        return {session: held for session, held in (self.remnants | ours).items() if session in sessions}

    def restore(self, lease: LeaseId, left: LeftLease, places: Mapping[SlotId, Key]) -> None:
        """Adds a lease of an earlier life. ``places``: the slots of its blocks."""
        require(lease not in self.leases, f"lease {lease} is given twice")
        taken = self.leased(left.group, left.tier)
        require(taken.isdisjoint(left.blank), "a slot is leased to two sessions of an earlier life")
        memory = self._memories[left.group][left.tier]
        holding = self.leases[lease] = Holding(lease, left.session, self._plans[left.group], left.tier)
        holding.blank = {slot: memory.contents[slot] for slot in left.blank}
        holding.blocks = dict(places)

    def forget_requests(self, session: SessionId) -> None:
        """Cancels the session's calls: no call may be answered any more."""
        for request in [request for request in self.requests.values() if request.session == session]:
            del self.requests[request.id]

    def disown(self, session: SessionId) -> None:
        """Takes the session's leases, except for slots that it may be writing."""
        self.forget_requests(session)
        self.orphaned.add(session)
        for holding in [holding for holding in self.leases.values() if holding.session == session]:
            if holding.blank:
                self.give_back(holding, list(holding.blocks))
            else:
                self.release(holding.id)

    def forget(self, session: SessionId) -> None:
        self.forget_requests(session)
        self.orphaned.discard(session)
        for holding in [holding for holding in self.leases.values() if holding.session == session]:
            self.release(holding.id)

    def leased(self, group: GroupId, tier: Tier) -> set[SlotId]:
        slots: set[SlotId] = set()
        for holding in self.leases.values():
            if (holding.plan.group, holding.tier) == (group, tier):
                slots |= holding.blank.keys() | holding.blocks.keys()
        return slots

    # -- answers to clients ------------------------------------------------------------------------------------------

    def take_answer(self, answer: Grant | Refusal) -> Request:
        request = self.requests.pop(answer.ticket, None)
        require(request is not None, f"ticket {answer.ticket} is answered, though it is answered or cancelled already")
        assert request is not None
        return request

    def take_slots(self, request: SlotsRequest, grant: Grant) -> None:
        part = grant.only
        require(part.lease is not None, "a reservation is granted without a lease")
        assert part.lease is not None
        require(len(set(part.slots)) == request.count, f"{request.count} slots are asked, {part.slots} granted")
        leased = self.leased(request.group, request.tier)
        require(leased.isdisjoint(part.slots), "a leased slot is granted again")
        holding = self._lease(request, request.group, part.lease)
        memory = self._memories[request.group][request.tier]
        holding.blank = {slot: memory.contents[slot] for slot in part.slots}

    def take_prefix(self, request: PrefixRequest, grant: Grant) -> None:
        """In every group just what the prefix needs there, by the definition."""
        require(request.readable <= grant.matched <= request.stored, "a match of windows is not what was stored")
        require(request.min_blocks <= grant.blocks <= grant.matched, f"{grant.blocks} blocks are granted")
        require([part.group for part in grant.groups] == list(request.found_in), "a group is missing from an answer")
        for part in grant.groups:
            needed = self._plans[part.group].needed(grant.blocks)
            given = part.needed.pick(range(grant.blocks))
            require(list(given) == list(needed), f"a prefix of {grant.blocks} needs blocks {needed}, not {given}")
            require((part.lease is None) == (not needed), "a lease holds nothing, or nothing is leased")
            keys = [request.keys[place] for place in needed]
            known = request.found_in[part.group]
            told = zip(keys, part.found_in, strict=True)
            certain = request.readable == request.stored and grant.blocks == grant.matched
            sure = {key for key in keys if certain and (part.group, key) not in request.removed}
            right = all(found == known[key] if key in sure else found for key, found in told)
            require(right, "an acquire says wrongly where its blocks were")
            if part.lease is not None:
                self._hold(request, part.group, part.lease, keys, part.slots)

    def take_refusal(self, request: Request, refusal: Refusal) -> None:
        require(refusal.tier is request.tier, "a refusal names another tier")
        require(all(holder.slots > 0 for holder in refusal.holders), "a refusal names a holder of nothing")

    def verify_turn(self, request: SlotsRequest) -> None:
        """Checks, after all answers of an outcome, that no older reservation of the tier still waits."""
        asked = [r for r in self.requests.values() if isinstance(r, SlotsRequest)]
        older = [r for r in asked if (r.group, r.tier) == (request.group, request.tier) and r.id < request.id]
        require(not older, f"{request.tier}: an older reservation was overtaken")

    def _hold(
        self, request: Request, group: GroupId, lease: LeaseId, keys: Sequence[Key], slots: Sequence[SlotId]
    ) -> None:
        holding = self._lease(request, group, lease)
        holding.blocks = dict(zip(slots, keys, strict=True))
        require(len(holding.blocks) == len(slots), "a slot is granted for two blocks")

    def _lease(self, request: Request, group: GroupId, lease: LeaseId) -> Holding:
        require(lease not in self.leases, f"lease {lease} is given twice")
        holding = self.leases[lease] = Holding(lease, request.session, self._plans[group], request.tier)
        return holding

    # -- checks ------------------------------------------------------------------------------------------------------

    def verify(self, leases: Iterable[SlotLease]) -> None:
        """Checks that leased slots hold the blocks or the writes of their clients and have an owner, that no other slot
        is leased, and that slots of processes of an earlier life were not written."""
        self._verify_remnants()
        told = {lease.id: (len(lease.blank), len(lease.held)) for lease in leases}
        known = {holding.id: (len(holding.blank), len(holding.blocks)) for holding in self.leases.values()}
        if told != known:
            raise Violation(f"leases are of {told} slots, their clients know of {known}")
        for holding in self.leases.values():
            memory = self._memories[holding.plan.group][holding.tier]
            for slot, key in holding.blocks.items():
                if memory.contents[slot] != key:
                    raise Violation(f"{holding.tier} slot {slot} is leased and lost its block's bytes")
                if not memory.ready(slot):
                    raise Violation(f"{holding.tier} slot {slot} is leased, READY and its generation odd")
                if memory.owners[slot] is None:
                    raise Violation(f"{holding.tier} slot {slot} is leased and has no owner")
            for slot, content in holding.blank.items():
                if memory.contents[slot] != content:
                    raise Violation(f"{holding.tier} slot {slot} is leased and was written")
                if memory.ready(slot):
                    raise Violation(f"{holding.tier} slot {slot} is blank, its generation even")
                alone = len(holding.writers(slot)) == 1
                if memory.owners[slot] != (holding.session if alone else SEVERAL):
                    raise Violation(f"{holding.tier} slot {slot} has another owner")

    def _verify_remnants(self) -> None:
        for holding in (holding for held in self.remnants.values() for holding in held):
            memory = self._memories[holding.plan.group][holding.tier]
            for slot, content in (*holding.blank.items(), *holding.blocks.items()):
                if memory.contents[slot] != content:
                    raise Violation(
                        f"{holding.tier} slot {slot} was written, and a process of an earlier life may use it"
                    )
            for slot in holding.blank:
                if memory.ready(slot):
                    raise Violation(
                        f"{holding.tier} slot {slot} is READY, and a process of an earlier life may write it"
                    )
