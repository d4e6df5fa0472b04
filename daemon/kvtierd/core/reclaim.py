"""Making room: exact, recursive, and waiting only downward.

A slot in the tier below is secured before a victim is chosen for it, so every planned demotion can be carried out. The
lowest tier can always drop, so no requests wait in a circle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.events import CAPACITY, WATERMARK, WRITE_THROUGH, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DEVICE, DISK, HOST, NOBODY, TIERS, Key, SessionId, TicketId, Tier
from kvtierd.core.policy import WriteMode
from kvtierd.core.removal import remove_all, walk
from kvtierd.core.transfers import BlockResult, Transfers

SOURCE_ORDER: Final = (HOST, DEVICE, DISK)
"""Order of preference for the source of a copy: host reads disturb no other work, the device's copy engines are busy,
the disk is slowest."""
_SOURCES: Final = {
    residency: next(tier for tier in SOURCE_ORDER if residency & tier.bit) for residency in range(1, 1 << len(TIERS))
}
"""The preferred source tier by residency."""

MOST_MISSING: Final = 16
"""Limit of ancestors copied to disk for one block, in multiples of ``Policy.blocks_a_call``."""


class Prospect(Enum):
    NOW = 0
    """The slots are free."""
    COMING = 1
    """Work in flight, or planned just now, frees enough slots."""
    NEVER = 2
    """No further step makes room: the tier is lost, an edge rests, or no block may leave. Moves in flight may still
    change that."""


NOW: Final = Prospect.NOW
COMING: Final = Prospect.COMING
NEVER: Final = Prospect.NEVER
LAST: Final = TicketId(1 << 62)
"""Stands for a ticket: the caller comes after all requests."""


class Reclaimer:
    """Frees slots of one window group.

    From :meth:`begin` to :meth:`end` no slot is promised twice and no block is sent down twice, even if the slots are
    still on their way. A victim that waits for slots below is chosen again in each round, so only
    ``Policy.waiting_victims`` victims are chosen at a time. Work is in flight then, and its end starts the next round.

    Args:
        older_wants: Slots of a tier that requests older than a ticket still wait for.
    """

    def __init__(self, state: GroupState, transfers: Transfers, older_wants: Callable[[Tier, TicketId], int]) -> None:
        self._state = state
        self._transfers = transfers
        self._older_wants = older_wants
        self._now = 0
        self._ticket = LAST
        self._followed: tuple[Block, ...] = ()
        """The block that the request's new blocks will follow. Neither it nor its ancestors are dropped."""
        self._older: dict[Tier, int] = {}
        self._promised = dict.fromkeys(state.tiers, 0)
        self._of_heads = dict.fromkeys(state.tiers, 0)
        """Slots promised to the head of each tier's queue. The head's wants count the same slots."""
        self._going: list[Block] = []
        """Victims that wait for slots below. Claimed, so that the next victim is another block."""
        self._coming = dict.fromkeys(state.tiers, 0)
        """Slots that the waiting victims will free."""
        self._lacking: dict[Block, int] = {}
        """Least number of ancestors that a block lacks on disk, for parents of blocks that lack too many."""
        self._to_disk: set[Block] = set()
        """Waiting victims and their ancestors with promised disk slots."""
        self._spared: list[Block] = []
        """Blocks that must stay while slots below are secured for one of them."""
        self._sparing = False

    def begin(self, now: int) -> None:
        self._now = now
        self._promised = dict.fromkeys(self._state.tiers, 0)
        self._of_heads = dict.fromkeys(self._state.tiers, 0)
        self._coming = dict.fromkeys(self._state.tiers, 0)

    def end(self) -> None:
        for block in self._going:
            self._state.unclaim(block)
        self._going.clear()
        self._lacking.clear()
        self._to_disk.clear()

    def serve(self, ticket: TicketId, after: Block | None = None, session: SessionId = NOBODY) -> None:
        """Sets the request for which the next calls make room. Older requests go first. ``after``: stays stored."""
        self._ticket = ticket
        self._state.wanted_by = session
        self._followed = () if after is None else (after,)
        self._older.clear()

    def available(self, tier: Tier) -> int:
        """Free slots that no older request was promised or waits for."""
        older = self._older.get(tier)
        if older is None:
            older = self._older_wants(tier, self._ticket) - (self._of_heads[tier] if self._ticket is LAST else 0)
            self._older[tier] = older
        return self._state.slots[tier].free - self._promised[tier] - older

    def secure(self, tier: Tier, count: int, *, desperate: bool) -> Prospect:
        """Makes ``count`` slots of a tier free, now or by work in flight.

        Args:
            desperate: Drops whole subtrees as the last resort. False for a demotion, since the parents below are worth
                more than the demoted block.
        """
        if tier in self._state.lost:
            return NEVER
        while self._short_of(tier, count) > 0:  # one step may free several
            if len(self._going) >= self._state.policy.waiting_victims:
                break
            if not (self._vacate(tier) or (desperate and self._drop_some_subtree(tier))):
                return NEVER
        if self.available(tier) >= count:
            return NOW
        self._promised[tier] += count
        if desperate:  # only the head of a queue is desperate
            self._of_heads[tier] = count
        return COMING

    def _short_of(self, tier: Tier, count: int) -> int:
        """Number of these slots that are neither free nor on their way."""
        return count - self.available(tier) - self._state.slots[tier].retiring - self._coming[tier]

    def _vacate(self, tier: Tier) -> bool:
        """Frees one slot of the tier, or starts the work that will. False if no block can leave."""
        state, lists = self._state, self._state.victims(tier)
        spared, kept = self._spared, [*self._spared, *self._followed]
        if (block := lists.redundant.victim(spared)) is not None:
            state.free_copy(block, tier, CAPACITY)
            return True
        if (block := lists.leaf.victim(kept)) is not None and state.expendable(block, tier):
            state.remove(block, CAPACITY)
            return True
        block = lists.demotable.victim(spared)
        cleans = self._sparing and block is not None and state.copied_from_above(block, tier)
        if block is not None and not cleans and self._demote(block, tier):
            return True
        if (block := lists.clean.victim(spared)) is not None:
            state.free_copy(block, tier, CAPACITY)
            return True
        if (block := lists.leaf.victim(kept)) is not None:
            state.remove(block, CAPACITY)
            return True
        return not self._sparing and state.forget_clean_copies(tier) and self._vacate(tier)

    def _demote(self, block: Block, tier: Tier) -> bool:
        """Sends the block down to the nearest tier that can take it now or soon."""
        for low in self._state.below[tier]:
            copy = block.copies[tier]
            if copy is not None and copy.demoting:  # securing the previous tier may have sent it to disk for a child
                self._state.leave(block, tier)
                return True
            copy = block.copies[low]
            if copy is not None and not copy.valid:
                continue  # already on its way there from below
            if copy is not None:
                self._state.free_copy(block, tier, CAPACITY)
                return True
            if self._state.goes_down(block, tier, low) and self._send_down(block, tier, low):
                return True
        return False

    def _send_down(self, block: Block, tier: Tier, low: Tier) -> bool:
        prospect, chain, fresh = self._secure_below(block, tier, low)
        if prospect is NOW:
            self._copy(chain, tier, low, CAPACITY)
            self._state.leave(block, tier)
        elif prospect is COMING:
            self._state.claim(block)
            self._going.append(block)
            self._coming[tier] += 1
            if low is DISK:
                self._to_disk.update(fresh)
        return prospect is not NEVER

    def copy_down(self, block: Block, tier: Tier, low: Tier, cause: Cause) -> Prospect:
        """Copies a block down after its ancestors that must be there first; all sources stay. COMING: no room yet."""
        prospect, chain, _ = self._secure_below(block, tier, low)
        if prospect is NOW:
            self._copy(chain, tier, low, cause)
        return prospect

    def clean(self, block: Block, tier: Tier, low: Tier, most: int) -> int | None:
        """Copies a block down ahead of need, after its ancestors that must be there first. Copies at most ``most``
        blocks, root first, so that a chain lies in one piece. Makes no room from copies that keep slots above clean.

        Returns:
            The number of blocks on their way; 0: no room yet; None: there will be no room.
        """
        self._sparing = True
        prospect, chain, _ = self._secure_below(block, tier, low, most)
        self._sparing = False
        if prospect is not NOW:
            return None if prospect is NEVER else 0
        for member in chain:
            here = member.copies[tier]
            source = tier if here is not None and here.valid else self.source(member)
            self._transfers.start(member, source, low, WATERMARK if source is tier else WRITE_THROUGH)
        self._older.pop(low, None)
        return len(chain)

    def _secure_below(
        self, block: Block, tier: Tier, low: Tier, most: int | None = None
    ) -> tuple[Prospect, list[Block], list[Block]]:
        """Secures slots in a lower tier for a block after its ancestors that must be there first, or for the first
        ``most`` of these blocks.

        Returns the prospect, these blocks, root first, and the blocks among them that had no slot promised before.
        """
        if not self._transfers.usable(tier, low, self._now):
            return NEVER, [], []
        if low is DISK and self._state.losing:
            return COMING, [], []  # an ancestor on disk may be about to go, and would take a new copy with it
        found = self._missing_ancestors(block, low)
        if found is None:
            return NEVER, [], []
        missing, anchor = found
        chain = [*missing, block][:most]
        fresh = [m for m in chain if low is not DISK or m not in self._to_disk]
        guarded = [block] if anchor is None else [block, anchor]  # the copy builds on the anchor's
        self._spared += guarded
        prospect = self.secure(low, len(fresh), desperate=False)
        del self._spared[-len(guarded) :]
        if prospect is NOW and low is DISK and not self._to_disk.isdisjoint(guarded):
            prospect = COMING  # a copy that this copy builds on is only promised a slot, and not planned yet
            self._promised[low] += len(fresh)
        return prospect, chain, fresh

    def _copy(self, chain: list[Block], tier: Tier, low: Tier, cause: Cause) -> None:
        """Copies a block down, after its ancestors from their best source. All sources stay."""
        *missing, block = chain
        for ancestor in missing:
            self._transfers.start(ancestor, self.source(ancestor), DISK, WRITE_THROUGH)
        self._transfers.start(block, tier, low, cause)
        self._older.pop(DISK, None)  # older moves to disk may have wanted slots for the same ancestors

    def refill_disk(self) -> None:
        """Frees disk slots ahead of need while blocks are on their way to disk: a slot is free only after the deletion
        of its old record has committed."""
        if not self._transfers.to_disk:
            return
        policy, slots = self._state.policy, self._state.slots[DISK]
        reserve = min(slots.capacity >> policy.reserve_shift, policy.reserve_max)
        self._sparing = True
        for _ in range(reserve - slots.free - slots.retiring):
            if not self._vacate(DISK):
                break
        self._sparing = False

    def _missing_ancestors(self, block: Block, low: Tier) -> tuple[list[Block], Block | None] | None:
        """Ancestors that must be on disk before the block, root first, and the nearest ancestor on disk. None if the
        disk or one call cannot take as many; then the parent's count is kept, since the parent is looked up next."""
        missing: list[Block] = []
        if low is not DISK:
            return missing, None
        policy = self._state.policy
        most = min(self._state.slots[DISK].capacity, MOST_MISSING * policy.blocks_a_call) - 1
        anchor, lacking = None, self._lacking.get(block, 0)
        if lacking <= most:
            for ancestor in block.ancestors():
                if ancestor.copies[DISK] is not None or ancestor in self._to_disk:
                    anchor = ancestor
                    break
                missing.append(ancestor)
                if len(missing) > most + policy.blocks_a_call:
                    break
            lacking = len(missing)
        if lacking <= most:
            return missing[::-1], anchor
        if block.parent is not None:
            self._lacking[block.parent] = lacking - 1
        return None

    def missing_on_disk(self, blocks: list[Block]) -> list[Block]:
        """The blocks, and their ancestors, without a disk copy; each before its descendants."""
        seen: set[Block] = set()
        missing: list[Block] = []
        for block in blocks:
            fresh: list[Block] = []
            member: Block | None = block
            # If a block is on disk or in ``seen``, so are its ancestors.
            while member is not None and member not in seen and member.copies[DISK] is None:
                seen.add(member)
                fresh.append(member)
                member = member.parent
            fresh.reverse()
            missing += fresh
        return missing

    def source(self, block: Block) -> Tier:
        """The tier to copy the block from. A tier out of service is used only if the block is in no other."""
        return _SOURCES[self._state.lasting(block) or block.residency]

    def _drop_some_subtree(self, tier: Tier) -> bool:
        """Last resort, when only parents are left that cannot go down: drops the first subtree by rank that is unused,
        leaves first. False if there is none."""
        state = self._state
        kept = {member for block in self._followed for member in (block, *block.ancestors())}
        stuck = [b for b in state.index if (c := b.copies[tier]) is not None and c.still and b.claims == 0]
        for block in sorted(set(stuck) - kept, key=lambda block: block.rank):
            if all(member is None or self._unused(member) for member in walk(block)):
                for _ in remove_all(state, block, CAPACITY, CAPACITY):
                    pass
                return True
        return False

    def _unused(self, block: Block) -> bool:
        return block.claims == 0 and all(copy is None or copy.still for copy in block.copies)


MOST_IN_FLIGHT: Final = 256
"""Limit of a group's background copies in flight."""
BYTES_IN_FLIGHT: Final = 64 << 20
"""Limit of their bytes. A quarter is enough for a disk to write at full speed."""
WINDOW_BITS: Final = 27
"""Demand is counted in windows of 2^27 ns, an eighth of a second."""


class Demand:
    """Slots of a tier taken in a window of time: the recent maximum, which fades by an eighth a window."""

    def __init__(self) -> None:
        self._window = 0
        self._before = 0
        self._most = 0

    def slots(self, taken: int, now: int) -> int:
        """Number of slots to keep ready. ``taken``: slots taken since the start."""
        if now >> WINDOW_BITS != self._window:
            self._most = max(self._most - (self._most >> 3), taken - self._before)
            self._window, self._before = now >> WINDOW_BITS, taken
        return max(self._most, taken - self._before)


class Background:
    """Background copies of one window group. :meth:`work` is called once all requests have been served."""

    def __init__(self, state: GroupState, transfers: Transfers, reclaimer: Reclaimer) -> None:
        self._state = state
        self._transfers = transfers
        self._reclaimer = reclaimer
        self._due: OrderedDict[Block, None] = OrderedDict()
        """Blocks to be copied to the lowest tier, in this order."""
        self._demand = {tier: Demand() for tier in state.tiers}
        self._most = {
            tier: max(1, min(MOST_IN_FLIGHT, BYTES_IN_FLIGHT // state.shape.slot_bytes[tier])) for tier in state.tiers
        }
        """Background copies in flight, from all tiers, below which :meth:`work` plans copies from each tier."""

    def committed(self, blocks: Sequence[Block]) -> None:
        if self._state.policy.write_policy is WriteMode.THROUGH:
            self._due.update(dict.fromkeys(blocks))

    def used_again(self, blocks: Sequence[Block]) -> None:
        if self._state.remote is not None:
            self._state.remote.used_again(blocks)
        self._due.update(dict.fromkeys(self._state.reuse(blocks)))

    def work(self, now: int) -> None:
        """Plans some copies. Blocks without room wait for work in flight; blocks that may not go down are forgotten."""
        if self._state.losing:
            return  # a loss, a slice a call, would have its blocks copied to disk again for ever
        self._write_down(self._most[self._state.tiers[-1]] - self._transfers.background)
        for tier in self._state.tiers[:-1]:
            self._clean(tier, now)

    def _write_down(self, left: int) -> None:
        low = self._state.tiers[-1]
        while self._due and left > 0:
            block = next(iter(self._due))
            if self._wanted(block, low):
                prospect = self._reclaimer.copy_down(block, self._reclaimer.source(block), low, WRITE_THROUGH)
                if prospect is COMING:
                    return
                left -= prospect is NOW
            del self._due[block]

    def _wanted(self, block: Block, low: Tier) -> bool:
        if not block.indexed or block.copies[low] is not None:
            return False
        return self._state.goes_down(block, self._reclaimer.source(block), low)

    def _clean(self, tier: Tier, now: int) -> None:
        """Copies down some dirty blocks, in eviction order, if fewer slots are clean than demand takes. Each call plans
        as many copies as a disk writes well at once."""
        state, slots = self._state, self._state.slots[tier]
        below = max(state.slots[low].capacity for low in state.below[tier])
        most = int(state.policy.clean_most * min(slots.capacity, below))
        wanted = min(self._demand[tier].slots(slots.taken, now), most)
        short = wanted - slots.free - len(state.clean_copies[tier]) - self._transfers.cleaning[tier]
        left, batch = self._most[tier] - self._transfers.background, self._most[tier] // 4
        if short <= 0 or left < batch:
            return
        left = min(left, short + min(batch, wanted // 4))
        while left > 0:
            block = state.victims(tier).dirty.victim()
            planned = 0 if block is None else self._clean_some(block, tier, left)
            if not planned:
                return
            left -= planned

    def _clean_some(self, block: Block, tier: Tier, most: int) -> int:
        """Sends part of a block's chain down the first edge allowed. Returns the number of blocks sent."""
        for low in self._state.below[tier]:
            # Making room in the tier between may have sent a child to disk, and the block before it.
            if block.copies[low] is None and self._state.goes_down(block, tier, low):
                planned = self._reclaimer.clean(block, tier, low, most)
                if planned is not None:
                    return planned
        return 0


def pin(state: GroupState, tier: Tier, keys: Sequence[Key], *, unpin: bool) -> tuple[BlockResult, ...]:
    change = _unpin if unpin else _pin
    found = (state.index.get(key) for key in keys)
    return tuple(BlockResult.NOT_FOUND if block is None else change(state, tier, block) for block in found)


def _pin(state: GroupState, tier: Tier, block: Block) -> BlockResult:
    copy = block.copies[tier]
    if copy is None or not copy.valid:
        return BlockResult.NOT_READY
    room = state.policy.pinnable(state.slots[tier].capacity) > state.pins.slots(tier)
    if not room and not state.pins.count(tier, copy):
        return BlockResult.OVER_CAP
    state.pin(block, tier, copy)
    return BlockResult.OK


def _unpin(state: GroupState, tier: Tier, block: Block) -> BlockResult:
    copy = block.copies[tier]
    if copy is None or not state.pins.count(tier, copy):
        return BlockResult.NOT_PINNED
    state.unpin(block, tier, copy)
    return BlockResult.OK
