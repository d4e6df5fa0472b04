"""Making room: exact, recursive, and waiting only downward.

A slot in the tier below is secured before a victim is chosen for it, so a demotion is never planned that cannot be
carried out. The lowest tier can always drop, so nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.events import CAPACITY, WRITE_THROUGH, Cause
from kvtierd.core.flights import Flights
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DEVICE, DISK, HOST, Tier

SOURCE_ORDER: Final = (HOST, DEVICE, DISK)
"""Reading the host disturbs nobody; the device's copy engines are wanted elsewhere; the disk is slowest."""
_SOURCES: Final = {
    residency: next(tier for tier in SOURCE_ORDER if residency & tier.bit) for residency in range(1, 1 << len(Tier))
}
"""By residency set: the first in that order."""


class Prospect(Enum):
    NOW = 0
    """The slots are free."""
    COMING = 1
    """Enough slots become free by what is already in flight, or planned just now."""
    NEVER = 2
    """Nothing that nobody holds could make room."""


PLACED_A_ROUND: Final = 128
"""Blocks put on lists of candidates before victims are chosen: a fraction of a millisecond."""
PLACED_LIKE_ONE: Final = 8
"""So many take as long as to vacate a slot."""
LEAST_A_ROUND: Final = 4
"""Slots that a round may vacate or fill however many blocks it has placed."""
FEW_SHIFT: Final = 3
"""One in 2^3 of the disk slots kept ahead: so many are not worth a transaction of their own."""
NOW: Final = Prospect.NOW
COMING: Final = Prospect.COMING
NEVER: Final = Prospect.NEVER


class Room:
    """Frees slots of one window group.

    Its work is done in rounds, from :meth:`begin` to :meth:`end`: within one, no slot is promised twice and no block
    is sent down twice, whether the slots it goes to are free already or still on their way. A round does a bounded
    amount of work, or, unless it is ``working``, none; ``again`` says that it came to that bound and that another one,
    a working one, would get on. It chooses victims only where all candidates have been placed, so that the order of
    eviction is exact; where too many have not been, it places a part of them and makes no room.
    ``older_wants(tier, seq)``: slots that requests older than ``seq`` still wait for in the tier.
    """

    def __init__(self, state: GroupState, flights: Flights, older_wants: Callable[[Tier, int], int]) -> None:
        self._state = state
        self._flights = flights
        self._older_wants = older_wants
        self._promised = dict.fromkeys(state.tiers, 0)
        self._going: list[Block] = []
        """Victims that wait for slots below; claimed until the round ends, so that the next victim is another."""
        self._coming = dict.fromkeys(state.tiers, 0)
        """Slots that those will free."""
        self._to_disk: set[Block] = set()
        """Those, and ancestors of theirs, that disk slots are promised to."""
        self._spared: list[Block] = []
        """No victims while slots below are secured for one of them."""
        self._older: dict[Tier, tuple[int, int]] = {}
        """What older requests want, and the tier's placings of which that is true."""
        self._seq = 0
        self._now = 0
        self._left = 0
        """How many slots this round may still vacate or fill."""
        self._allowance = 0
        """How many it might at first."""
        self._placed = 0
        """Blocks that it has put on lists of candidates."""
        self.working = False
        self._chooses: bool | None = False
        """Whether all candidates have been placed in this round, so that victims may be chosen; None: they will be
        when the first is wanted, while there is room anyway."""
        self._kept_waiting = False
        """A round could not make room for want of that, so the next one follows at once."""
        self._unplaced = 0
        """How many the round before this one left."""
        self._postponed = False
        self._got_on = False
        self._sparing = False
        self._refills = False
        """Disk slots kept free ahead have been used: once no block is on its way there, others take their place."""
        self.again = False

    def begin(self, now: int, *, working: bool, places: bool) -> None:
        """``places``: the round may choose victims once candidates are placed; always where it is ``working``."""
        self._promised = dict.fromkeys(self._state.tiers, 0)
        self._coming = dict.fromkeys(self._state.tiers, 0)
        self._now = now
        self.working = working
        self._placed = 0
        self._left = self._allowance = self._state.policy.victims_a_call if working else 0
        self._postponed = self._got_on = False
        self._chooses = None if places else False
        if places and self._state.room_is_scarce:
            self._chooses = self._place()

    def _place(self) -> bool:
        """Whether all candidates are placed. While somebody waits for that, more than have come since the last round:
        so it ends, whatever others touch meanwhile."""
        state = self._state
        came = max(0, state.unplaced - self._unplaced) if self._kept_waiting else 0
        unplaced = state.unplaced
        all_placed = state.place_some(PLACED_A_ROUND + came)
        self._unplaced = state.unplaced
        self._kept_waiting = False
        self._placed = unplaced - self._unplaced
        cost = min(self._placed // PLACED_LIKE_ONE, max(0, self._left - LEAST_A_ROUND))
        self._left -= cost
        self._allowance -= cost
        return all_placed

    def may_choose(self) -> bool:
        """Whether victims may be chosen in this round. Where not, the round says that another one would get on."""
        if self._chooses is None:
            self._chooses = self._place()
        if not self._chooses:
            self._kept_waiting = True
            self.postpone()
        return self._chooses

    @property
    def worked(self) -> bool:
        """Whether this round has vacated or filled any slots."""
        return self.working and self._left < self._allowance

    @property
    def got_on(self) -> bool:
        """Whether this round has done more than to choose again what waits for slots below, or another one would."""
        return self._got_on

    def takes(self, slots: int) -> bool:
        """Whether to fill so many is for this round: one that has done nothing yet fills any number."""
        return not self.worked or slots <= self._left

    def end(self) -> None:
        self.again = (self._postponed and self._got_on) or (self.again and not self.working)
        if self._flights.to_disk and self._lacking_on_disk > self._kept_ahead >> FEW_SHIFT:
            self._refills = True
        for block in self._going:
            self._state.unclaim(block)
        self._going.clear()
        self._to_disk.clear()

    def serve(self, seq: int) -> None:
        """The following calls are on behalf of the request ``seq``; older ones go first. Queues change between these
        calls only."""
        self._seq = seq
        self._older.clear()

    def postpone(self) -> None:
        """There is work that can be done, but not in this round."""
        self._postponed = self._got_on = True

    def filled(self, slots: int) -> bool:
        """That much of this round's work has gone into a request. Whether any of it is left."""
        self._left -= slots
        return self._left > 0

    def available(self, tier: Tier) -> int:
        """Free slots that nobody older was promised or waits for."""
        placings = self._state.placings[tier]
        at, older = self._older.get(tier, (-1, 0))
        if at != placings:
            older = self._older_wants(tier, self._seq)
            self._older[tier] = placings, older
        return self._state.slots[tier].free - self._promised[tier] - older

    def secure(self, tier: Tier, count: int, *, desperate: bool) -> Prospect:
        """Sees to it that ``count`` slots of a tier are, or become, free.

        ``desperate``: where nothing else is left, whole subtrees go. Not for a demotion: every parent below ranks
        above its children, so above the block that would be demoted into its place.
        """
        if tier in self._state.offline:
            return NEVER
        short = count - self.available(tier) - self._state.slots[tier].retiring - self._coming[tier]
        for _ in range(short):
            if not self.may_choose():
                break
            if self._left <= 0:
                self._postponed = True
                break
            if not self._vacate(tier, desperate=desperate):
                return NEVER
        if self.available(tier) >= count:
            return NOW
        self._promised[tier] += count
        return COMING

    def _vacate(self, tier: Tier, *, desperate: bool = False) -> bool:
        """One slot of the tier is freed, or on its way to be."""
        waiting = len(self._going)
        vacated = self._vacate_one(tier) or (desperate and self._drop_some_subtree(tier))
        self._left -= vacated  # after the slots below it: a round that cannot vacate those would never get on
        self._got_on |= vacated and len(self._going) == waiting
        return vacated

    def _vacate_one(self, tier: Tier) -> bool:
        state, lists = self._state, self._state.candidates(tier)
        spared = self._spared
        if not self._sparing and (block := lists.redundant.victim(spared)) is not None:
            state.free_copy(block, tier, CAPACITY)
            return True
        if (block := lists.leaf.victim(spared)) is not None and state.expendable(block, tier):
            state.remove(block, CAPACITY)
            return True
        if (block := lists.demotable.victim(spared)) is not None and self._demote(block, tier):
            return True
        if (block := lists.clean.victim(spared)) is not None:
            state.free_copy(block, tier, CAPACITY)
            return True
        if (block := lists.leaf.victim(spared)) is not None:
            state.remove(block, CAPACITY)
            return True
        return False

    def _demote(self, block: Block, tier: Tier) -> bool:
        """Sends the block down to the nearest tier that can take it, or sees to it that one can soon."""
        copy = block.copy(tier)
        if copy is not None and copy.sinking:
            self._state.leave(block, tier)
            return True
        for low in self._state.below[tier]:
            copy = block.copy(low)
            if copy is not None and not copy.valid:
                continue  # On its way there from below already.
            if copy is not None:
                self._state.free_copy(block, tier, CAPACITY)
                return True
            if self._state.goes_down(block, tier, low) and self._send_down(block, tier, low):
                return True
        return False

    def _send_down(self, block: Block, tier: Tier, low: Tier) -> bool:
        if not self._flights.usable(tier, low, self._now):
            return False
        prospect, missing, fresh = self._secure_below(block, low)
        if prospect is NOW:
            self._copy(block, tier, low, missing, CAPACITY)
            self._state.leave(block, tier)
        elif prospect is COMING:
            self._state.claim(block)
            self._going.append(block)
            self._coming[tier] += 1
            if low is DISK:
                self._to_disk.update(fresh)
        return prospect is not NEVER

    def copy_down(
        self, block: Block, tier: Tier, low: Tier, cause: Cause, now: int, *, sparing: bool = False
    ) -> Prospect:
        """Copies a block down, and those of its ancestors that must be there first; their sources stay. COMING: there
        will be room, but not yet. ``sparing``: room is not made of what makes slots above clean."""
        if not self._flights.usable(tier, low, now):
            return NEVER
        self._sparing = sparing
        prospect, missing, _ = self._secure_below(block, low)
        self._sparing = False
        if prospect is NOW:
            self._copy(block, tier, low, missing, cause)
        return prospect

    def _secure_below(self, block: Block, low: Tier) -> tuple[Prospect, list[Block], list[Block]]:
        """Slots in a lower tier for a block and those of its ancestors that must be there first.

        Also returns those ancestors, and what of all this nothing was promised before.
        """
        missing, anchor = self._missing_ancestors(block, low)
        fresh = [m for m in (*missing, block) if low is not DISK or m not in self._to_disk]
        guarded = [block] if anchor is None else [block, anchor]
        prospect = self._secure_guarded(low, len(fresh), guarded)
        if prospect is NOW and self._promised_only(low, guarded):
            prospect = COMING
            self._promised[low] += len(fresh)
        return prospect, missing, fresh

    def _copy(self, block: Block, tier: Tier, low: Tier, missing: list[Block], cause: Cause) -> None:
        self.copy_ancestors(missing)
        self._left -= len(missing)
        self._flights.start(block, tier, low, cause)

    def _promised_only(self, low: Tier, needed: list[Block]) -> bool:
        """One of these disk copies is not planned yet, only promised room: its slots are still on their way."""
        return low is DISK and any(block in self._to_disk for block in needed)

    def _secure_guarded(self, tier: Tier, count: int, guarded: list[Block]) -> Prospect:
        """Secures slots without giving up these blocks: the one to be moved, and the ancestor that its copy builds
        on."""
        if self.available(tier) >= count:
            return NOW
        self._spared += guarded
        prospect = self.secure(tier, count, desperate=False)
        del self._spared[-len(guarded) :]
        return prospect

    def replenish_disk(self) -> None:
        """Disk slots are freed for the blocks after those that go there now: there a slot is free only after a deletion
        has committed.

        While blocks are on their way, only what keeps half of the reserve, and with an allowance of its own, since it
        is in a rush that the reserve is used up and that others use up theirs: deletions take as long to plan, to
        commit and to tell as copies, and whoever moves blocks waits for those alone.
        """
        policy = self._state.policy
        self.working = True
        self._left = max(LEAST_A_ROUND, policy.victims_a_call - self._placed // PLACED_LIKE_ONE)
        self._sparing = policy.clean_high > 0  # else what the background wrote down would go first, again and again
        while self.disk_is_short and self.may_choose():
            if self._left <= 0:
                self._postponed = True
                break
            if not self._vacate(DISK):
                self._refills = False
                break
        self._sparing = False
        self._refills = self._refills and self._lacking_on_disk > 0

    @property
    def disk_is_short(self) -> bool:
        """Few slots are free on disk, or soon to be, for the blocks after those that are on their way there; or, once
        none is, fewer than are kept."""
        if self._flights.to_disk:
            return 2 * self._lacking_on_disk > self._kept_ahead
        return self._refills and self._lacking_on_disk > 0

    @property
    def disk_is_low(self) -> bool:
        """So few that they are to be seen to before anybody else is served."""
        return self._flights.to_disk > 0 and 8 * self._lacking_on_disk > 7 * self._kept_ahead

    @property
    def _kept_ahead(self) -> int:
        """Disk slots, where blocks go to disk at all."""
        policy = self._state.policy
        return min(self._state.slots[DISK].capacity >> policy.reserve_shift, policy.reserve_max)

    @property
    def _lacking_on_disk(self) -> int:
        """How many of them are neither free nor soon to be."""
        slots = self._state.slots[DISK]
        return self._kept_ahead - slots.free - slots.retiring

    def _missing_ancestors(self, block: Block, low: Tier) -> tuple[list[Block], Block | None]:
        """Ancestors that must be on disk before the block, the root first, and the nearest that is there already."""
        missing: list[Block] = []
        if low is DISK:
            for ancestor in block.ancestors():
                if ancestor.copy(DISK) is not None or ancestor in self._to_disk:
                    return missing[::-1], ancestor
                missing.append(ancestor)
        return missing[::-1], None

    def missing_on_disk(self, blocks: list[Block]) -> list[Block]:
        """These blocks and those of their ancestors that have no disk copy, each before its descendants."""
        seen: set[Block] = set()
        missing: list[Block] = []
        for block in blocks:
            fresh: list[Block] = []
            member: Block | None = block
            # Where one is known or there, all that it stands on is, too.
            while member is not None and member not in seen and member.on_disk is None:
                seen.add(member)
                fresh.append(member)
                member = member.parent
            fresh.reverse()
            missing += fresh
        return missing

    def copy_ancestors(self, missing: list[Block]) -> None:
        """Copies down to disk from wherever they are; their upper copies stay."""
        for ancestor in missing:
            self._flights.start(ancestor, self.source(ancestor), DISK, WRITE_THROUGH)

    def source(self, block: Block) -> Tier:
        """Where to copy the block from: a tier that is lost, but not altogether yet, only where there is no other."""
        if self._state.offline:
            valid = (tier for tier in SOURCE_ORDER if block.residency & tier.bit)
            return min(valid, key=lambda tier: tier in self._state.offline)
        return _SOURCES[block.residency]

    def _drop_some_subtree(self, tier: Tier) -> bool:
        """Only parents are left that cannot go down: the first by rank whose subtree nobody needs goes, leaves
        first."""
        state = self._state
        stuck = [b for b in state.index if (c := b.copy(tier)) is not None and c.still and b.claims == 0]
        for block in sorted(stuck, key=lambda block: block.rank):
            if all(map(self._unused, state.subtree(block))):
                state.remove_subtree(block, CAPACITY, CAPACITY)
                return True
        return False

    def _unused(self, block: Block) -> bool:
        return block.claims == 0 and all(copy is None or copy.still for copy in block.copies)
