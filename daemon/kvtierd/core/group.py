"""The blocks of one window group: their copies, and every change of these.

Only this module, and ``core/recovery.py`` at a start, changes residency, holds or recency. Each change also puts its
event, generations and owners into the recorder, so no caller can forget to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvtier.abi.words import ENDED_MS
from kvtierd.core.ancestry import Ancestry
from kvtierd.core.block import DOWNWARDS, FILLING, LEAVING, READY, UPWARDS, Block, Copy
from kvtierd.core.conversations import Conversations
from kvtierd.core.errors import InvariantViolation, TierOutOfService
from kvtierd.core.events import CAPACITY, REMOVED, STORED, UPDATED, Cause
from kvtierd.core.eviction import CLEAN, DEMOTABLE, DIRTY, LEAF, REDUNDANT, UNSETTLED, Candidates, Evictor
from kvtierd.core.ids import BITS, DEVICE, DISK, HOST, NOBODY, TOKEN_BYTES, Key, MoveId, SessionId, SlotId, Tier, Traits
from kvtierd.core.index import BlockIndex, Departed, Pins, Residencies
from kvtierd.core.outcome import Recorder, Transfer
from kvtierd.core.policy import DEFAULT_PRIORITY, NEVER, GroupShape, Policy, WriteMode
from kvtierd.core.remote import GroupRemote
from kvtierd.core.retention import Clocks
from kvtierd.core.slots import (
    SLOT_BLANK,
    SLOT_FILLING,
    SLOT_QUARANTINED,
    SLOT_READY,
    SLOT_RETIRING,
    SlotTable,
)


class GroupState:
    """State of one window group."""

    def __init__(self, shape: GroupShape, recorder: Recorder, policy: Policy) -> None:
        self.group = shape.group
        self.shape = shape
        self.attention = shape.attention
        self.policy = policy
        self.recorder = recorder
        self.tiers: tuple[Tier, ...] = tuple(sorted(tier for tier, slots in shape.slots.items() if slots > 0))
        self.above = {tier: tuple(t for t in self.tiers if t < tier) for tier in self.tiers}
        self.below = {tier: tuple(t for t in self.tiers if t > tier) for tier in self.tiers}
        self.slots = {tier: SlotTable(shape.slots[tier]) for tier in self.tiers}
        slots = shape.slots[self.tiers[-1]]
        self.evictor = Evictor(policy.eviction, slots)
        self._candidates = {
            tier: Candidates(tier, shape.slots[tier], None if self.below[tier] else self.evictor) for tier in self.tiers
        }
        self.now = 0
        """Time of the last call that asked for blocks."""
        self.ledgers = recorder.ledgers(self.group, self.tiers)
        self._changed: dict[Block, None] = {}
        """Blocks changed since the last placement, which may belong on other candidate lists."""
        self.held = dict.fromkeys(self.tiers, 0)
        """READY or FILLING slots under at least one hold."""
        self.clean_copies: dict[Tier, set[Block]] = {tier: set() for tier in self.tiers}
        """Blocks copied down ahead of their eviction, by source tier, that have neither left nor been used since."""
        self.residencies = Residencies()
        self.lost: set[Tier] = set()
        self.corrupt: dict[Tier, set[SlotId]] = {tier: set() for tier in self.tiers}
        self.steps_left = policy.blocks_a_call
        """Steps through subtrees that the call has left."""
        self.losing: dict[Copy | Tier, Iterator[None]] = {}
        """Lost copies and tiers, with the steps that remove their dependants: see ``core/removal.py``."""
        self.index = BlockIndex()
        self.departed = Departed(slots)
        self.wanted_by = NOBODY
        """The session for whose request room is being made."""
        self.clocks = Clocks()
        self.conversations = Conversations(self.index, self.retain)
        self.pins = Pins(self.tiers)
        self.ancestry = Ancestry(shape.group, recorder, policy.blocks_a_call, self.reconsider, self._use)
        self.stored = 0
        self.removed = 0
        self.floor = {
            tier: min((policy.threshold(tier, low) for low in self.below[tier]), default=NEVER) for tier in self.tiers
        }
        """Least priority at which a block goes down from the tier."""
        self.reused: set[Block] = set()
        """With selective writes: blocks used again since their commit."""
        self._selective = policy.write_policy is WriteMode.SELECTIVE
        self.remote = None if policy.remote is None else GroupRemote(self, policy.remote)
        self._retirements: dict[MoveId, list[tuple[Block, SlotId]]] = {}
        self.undeleted: list[tuple[Block, SlotId]] = []
        """Disk slots, with their blocks, whose record could not be deleted, in the order of the failures."""
        self._retire_again_at = 0
        self._used_on_disk: dict[Block, None] = {}

    def require(self, tier: Tier) -> None:
        """Raises :class:`TierOutOfService` while the tier is out of service."""
        if tier in self.lost:
            raise TierOutOfService(tier)

    def lasting(self, block: Block) -> int:
        """The block's residency without tiers out of service."""
        lost = self.lost
        return block.residency & ~sum(BITS[tier] for tier in lost) if lost else block.residency

    @property
    def behind(self) -> bool:
        """Whether calls have left work to do."""
        return bool(self.losing or self.ancestry.due)

    # -- candidates ------------------------------------------------------------------------------------------------

    def reconsider(self, block: Block) -> None:
        """Marks a block that may belong on other candidate lists. The block is placed before the next victim is chosen,
        at the latest at the end of the call."""
        self._changed[block] = None

    def candidates(self, tier: Tier) -> Candidates:
        """The blocks that may leave the tier, until the next change."""
        self._place_changed()
        return self._candidates[tier]

    def victims(self, tier: Tier) -> Candidates:
        """Like :meth:`candidates`, after due changes of rank. Call this before taking a victim."""
        self.ancestry.climb()
        return self.candidates(tier)

    def _place_changed(self) -> None:
        changed = self._changed
        while changed:
            self._place(changed.popitem()[0])

    def _place(self, block: Block) -> None:
        """Puts the block on exactly the candidate lists where it belongs."""
        movable, copies = block.indexed and block.claims == 0, block.copies
        for tier in self.tiers:
            copy = copies[tier]
            if copy is None:
                continue
            lists = 0
            if movable and copy.holds == 0 and copy.phase is READY:
                if copy.reads == 0:
                    lists = self._lists(block, tier)
                elif copy.reads == DOWNWARDS:
                    lists = DEMOTABLE
            if lists or copy.listed:
                self._candidates[tier].put(block, copy, lists)

    def _lists(self, block: Block, tier: Tier) -> int:
        """The candidate lists for a block whose copy in the tier may leave."""
        bit = BITS[tier]
        residency = block.residency
        low = residency > 2 * bit - 1
        lists = CLEAN if low else 0
        if self.redundant(block, tier):
            lists |= REDUNDANT
        elif self.below[tier] and (low or not self.expendable(block, tier)):
            lists |= DEMOTABLE
        if lists == DEMOTABLE and all(block.copies[t] is None for t in self.below[tier]):
            lists |= DIRTY
        if residency == bit and block.first_child is None and block.copies.count(None) == 2:
            lists |= LEAF
        if self.remote is not None and self.remote.is_candidate(block, tier):
            lists |= UNSETTLED
        return lists

    def redundant(self, block: Block, tier: Tier) -> bool:
        """Whether the block is valid above too and not about to leave there, and no child needs this copy."""
        above = block.residency & (BITS[tier] - 1) != 0 and (tier is not DISK or block.disk_children == 0)
        return above and not self.copied_from_above(block, tier)

    def copied_from_above(self, block: Block, tier: Tier) -> bool:
        """Whether this copy makes a slot above clean."""
        return any(block in self.clean_copies[high] for high in self.above[tier])

    def forget_clean_copies(self, tier: Tier) -> bool:
        """Last resort: lets copies leave the tier that keep slots above clean. Returns whether there were any."""
        found = [
            block for high in self.above[tier] for block in self.clean_copies[high] if block.residency & BITS[tier]
        ]
        for block in found:
            self.needed(block)
        return bool(found)

    def needed(self, block: Block) -> None:
        """Forgets that the block was copied ahead: it is not to leave soon."""
        for blocks in self.clean_copies.values():
            if block in blocks:
                blocks.discard(block)
                self._changed[block] = None

    def _left(self, block: Block) -> None:
        """Forgets that the block was copied ahead in tiers where it has gone, or has no copy below any more."""
        for tier, blocks in self.clean_copies.items():
            if block in blocks and not (block.copies[tier] is not None and block.residency > 2 * BITS[tier] - 1):
                blocks.discard(block)
                self._changed[block] = None

    def expendable(self, block: Block, tier: Tier) -> bool:
        """Whether the block may go down no edge from ``tier``, so that it is dropped rather than demoted."""
        return block.priority < self.floor[tier] or (self._selective and block not in self.reused)

    def goes_down(self, block: Block, src: Tier, dst: Tier) -> bool:
        """Whether policy lets the block go down this edge."""
        return block.priority >= self.policy.threshold(src, dst) and not (self._selective and block not in self.reused)

    # -- slots -----------------------------------------------------------------------------------------------------

    def take_blanks(self, tier: Tier, session: SessionId, count: int) -> list[SlotId]:
        """Takes ``count`` slots. The caller has checked that they are free."""
        slots, ledger = self.slots[tier].take(count, SLOT_BLANK), self.ledgers[tier]
        for slot in slots:
            ledger.begin_write(slot)
        ledger.own(slots, session)
        return slots

    def give_back(self, tier: Tier, slot: SlotId) -> None:
        """Frees a slot in any state. A disk slot with a record goes through :meth:`retire` first."""
        if tier is not DISK:
            self.ledgers[tier].free(slot)
        if tier in self.lost:
            self.slots[tier].change(slot, SLOT_QUARANTINED)
        else:
            self.slots[tier].give_back(slot)

    def retire(self, block: Block, slot: SlotId) -> None:
        """Plans the deletion of a disk slot's record, before which the slot must not be written."""
        if DISK in self.lost:
            self.slots[DISK].change(slot, SLOT_QUARANTINED)
            return
        bad = slot in self.corrupt[DISK]
        self.slots[DISK].change(slot, SLOT_QUARANTINED if bad else SLOT_RETIRING)
        move = self.recorder.plan(self.group, DISK, None, CAPACITY, block, slot, None)
        self._retirements.setdefault(move, []).append((block, slot))

    def retired(self, move: MoveId, failed: Iterable[int], now: int) -> bool:
        """Applies the end of a deletion move; False if the move is no deletion. A slot whose deletion failed stays out
        of use until a deletion succeeds: see :meth:`retire_again`."""
        retirements = self._retirements.pop(move, None)
        if retirements is None:
            return False
        for position, (block, slot) in enumerate(retirements):
            if position in failed and DISK not in self.lost:
                self.undeleted.append((block, slot))
                self._retire_again_at = now + self.policy.degraded_ns
            if position in failed or slot in self.corrupt[DISK]:
                self.slots[DISK].change(slot, SLOT_QUARANTINED)
            else:
                self.give_back(DISK, slot)
        return True

    def retire_again(self, now: int) -> None:
        """Plans failed deletions again, a slice a call, once none has failed for as long as an edge stays degraded."""
        if self.undeleted and self._retire_again_at <= now:
            most = self.policy.blocks_a_call
            some, self.undeleted = self.undeleted[:most], self.undeleted[most:]
            for block, slot in some:
                self.retire(block, slot)

    def slots_being_retired(self) -> list[SlotId]:
        """For the checker: disk slots whose deletion is planned."""
        return [slot for retirements in self._retirements.values() for _, slot in retirements]

    @property
    def retiring_moves(self) -> int:
        return len(self._retirements)

    # -- copies ----------------------------------------------------------------------------------------------------

    def start_copy(self, block: Block, src: Tier, dst: Tier, cause: Cause) -> tuple[MoveId, Copy, Copy]:
        """Plans one copy into a free slot of ``dst``."""
        source = block.copies[src]
        if source is None or not source.valid:
            raise InvariantViolation(f"block {block} is not in {src}")
        if block.copies[dst] is not None:
            raise InvariantViolation(f"block {block} is in {dst}, or on its way there")
        if source.phase is LEAVING:
            self.stay(block, src)
        (slot,) = self.slots[dst].take(1, SLOT_FILLING)
        copy = Copy(slot, FILLING)
        self._attach(block, dst, copy)
        if dst is not DISK:
            self.ledgers[dst].begin_write(slot)
        source.reads += DOWNWARDS if dst > src else UPWARDS
        move = self.recorder.plan(self.group, src, dst, cause, block, source.slot, slot)
        self._changed[block] = None
        return move, source, copy

    def leave(self, block: Block, tier: Tier) -> None:
        """Marks the copy as leaving: it goes when the copy downwards that reads it has arrived."""
        copy = block.copies[tier]
        if copy is None or not copy.demoting:
            raise InvariantViolation(f"block {block} leaves {tier} without a copy downwards")
        copy.phase = LEAVING
        self.slots[tier].change(copy.slot, SLOT_RETIRING)
        self._changed[block] = None

    def stay(self, block: Block, tier: Tier) -> None:
        """Keeps the source of a demotion after a hit; the copy downwards goes on."""
        copy = block.copies[tier]
        if copy is not None and copy.phase is LEAVING:
            copy.phase = READY
            self.slots[tier].change(copy.slot, SLOT_READY)
            self._changed[block] = None

    def arrive(self, block: Block, tier: Tier) -> None:
        """Makes a FILLING copy READY. The caller records the event."""
        copy = block.copies[tier]
        if copy is None or copy.phase is not FILLING:
            raise InvariantViolation(f"block {block} arrives in {tier} unplanned")
        copy.phase = READY
        self.residencies.change(block, block.residency | BITS[tier])
        self.slots[tier].change(copy.slot, SLOT_READY)
        if tier is not DISK:
            self.ledgers[tier].end_write(copy.slot, block)
        if self.remote is not None and tier is not DEVICE:
            self.remote.arrived(block)

    def detach(self, block: Block, tier: Tier) -> Copy:
        """Takes the copy off the block. Its slot is freed once no hold, read or fill is left. Records no event."""
        copy = block.copies[tier]
        if copy is None:
            raise InvariantViolation(f"block {block} has no copy in {tier}")
        block.copies[tier] = None
        self.residencies.change(block, (block.residency | BITS[tier]) ^ BITS[tier])
        self._left(block)
        if copy.holds:
            self._end_pin(tier, copy)
            self.clocks.start(block)
        if (copy.holds or copy.reads) and tier is not DISK:
            self.ledgers[tier].disown(copy.slot)
        if copy.listed:
            self._candidates[tier].put(block, copy, 0)
        if tier is DISK and block.indexed and block.parent is not None:
            block.parent.disk_children -= 1
            self._changed[block.parent] = None
        self.settle(block, tier, copy)
        return copy

    def settle(self, block: Block, tier: Tier, copy: Copy) -> None:
        """Frees a detached copy's slot if its last hold, read or fill has ended."""
        if copy.phase is FILLING:
            self.slots[tier].change(copy.slot, SLOT_RETIRING)
        elif copy.holds > 0:
            self.slots[tier].change(copy.slot, SLOT_READY)
        elif copy.reads > 0:
            self.slots[tier].change(copy.slot, SLOT_RETIRING)
        elif tier is DISK:
            self.retire(block, copy.slot)
        else:
            self.give_back(tier, copy.slot)

    def abandon(self, block: Block, tier: Tier, copy: Copy, *, written: bool) -> None:
        """Ends a fill whose bytes are not to be used. ``written``: a disk record exists."""
        if block.copies[tier] is copy:
            self.detach(block, tier)
            self._changed[block] = None
        copy.phase = READY
        if copy.holds:
            copy.holds = 0
            self.held[tier] -= 1
        if tier is DISK and written:
            self.retire(block, copy.slot)
        else:
            self.give_back(tier, copy.slot)

    def free_copy(self, block: Block, tier: Tier, cause: Cause) -> None:
        """Gives up one copy of a block that is valid in another tier."""
        self.detach(block, tier)
        self.recorder.change(UPDATED, cause, self.group, block, Transfer(tier))
        self._changed[block] = None

    def _attach(self, block: Block, tier: Tier, copy: Copy) -> None:
        block.copies[tier] = copy
        if copy.valid:
            self.residencies.change(block, block.residency | BITS[tier])
        if tier is DISK and block.parent is not None:
            block.parent.disk_children += 1
            self._changed[block.parent] = None

    # -- holds and recency -----------------------------------------------------------------------------------------

    def hold(self, block: Block, tier: Tier, session: SessionId) -> Copy:
        copy = block.copies[tier]
        if copy is None:
            raise InvariantViolation(f"block {block} is held in {tier} but is not there")
        self._keep(block, tier, copy)
        self.ledgers[tier].own((copy.slot,), session)
        return copy

    def unhold(self, block: Block, tier: Tier, copy: Copy) -> None:
        if copy.holds == 1 or (copy.holds == 2 and self.pins.count(tier, copy)):
            self.ledgers[tier].own((copy.slot,), None)
        self._let_go(block, tier, copy)

    def pin(self, block: Block, tier: Tier, copy: Copy) -> None:
        """Adds a pin to a valid copy. Each pin is undone by one :meth:`unpin`."""
        if self.pins.change(tier, block, copy, 1) == 1:
            self._keep(block, tier, copy)

    def unpin(self, block: Block, tier: Tier, copy: Copy) -> None:
        if self.pins.change(tier, block, copy, -1) == 0:
            self._let_go(block, tier, copy)

    def _end_pin(self, tier: Tier, copy: Copy) -> None:
        if self.pins.forget(tier, copy):
            copy.holds -= 1
            self.held[tier] -= copy.holds == 0

    def _keep(self, block: Block, tier: Tier, copy: Copy) -> None:
        if copy.phase is LEAVING:
            self.stay(block, tier)
        copy.holds += 1
        if copy.holds == 1:
            self.held[tier] += 1
            self.clocks.stop(block)
        self._changed[block] = None

    def _let_go(self, block: Block, tier: Tier, copy: Copy) -> None:
        copy.holds -= 1
        if copy.holds > 0:
            return
        self.held[tier] -= 1
        if block.copies[tier] is copy:
            self.clocks.start(block)
            self._changed[block] = None
        else:
            self.settle(block, tier, copy)

    def claim(self, block: Block) -> None:
        block.claims += 1
        self._changed[block] = None

    def unclaim(self, block: Block) -> None:
        block.claims -= 1
        self._changed[block] = None

    def touch(self, blocks: Iterable[Block]) -> None:
        """Uses these blocks and all their ancestors, children before parents, otherwise in this order."""
        self.ancestry.use(blocks)
        self.ancestry.climb()

    def ask(self, found: Sequence[Block], made: Sequence[Block]) -> None:
        """Counts a request that found some blocks and made others, parents before children."""
        self.conversations.found(found)
        self.evictor.asked(found, made, self.now)

    def _use(self, block: Block) -> None:
        self.evictor.use(block)
        self.needed(block)
        self._changed[block] = None
        if block.copies[DISK] is not None:
            self._used_on_disk.pop(block, None)
            self._used_on_disk[block] = None

    # -- retention -------------------------------------------------------------------------------------------------

    def retain(self, block: Block, priority: int, duration_ms: int, cause: Cause) -> None:
        """Sets the block's own priority, and for how long it holds (0 = for ever); see ``core/retention.py``."""
        self.ancestry.give(block, priority, cause)
        self.clocks.give(block, duration_ms)

    def stamp(self, now: int) -> None:
        """Ends a call: started clocks run from ``now``, slot records get changed retention, changed blocks go on their
        lists."""
        self.ancestry.climb()
        self._place_changed()
        self.ancestry.end_call()
        self.steps_left = self.policy.blocks_a_call
        self.clocks.stamp(now)
        self.departed.stamp(now)
        for block in self.clocks.take_changed():
            for tier in (DEVICE, HOST):
                copy = block.copies[tier]
                if copy is not None and copy.valid:
                    self.ledgers[tier].restate(copy.slot, block)

    def expire(self, now: int) -> None:
        """Ends retentions whose deadline has passed, a slice a call; later calls do the rest."""
        moved: list[Block] = []
        for block in islice(self.clocks.due(now), self.policy.blocks_a_call):
            before = block.priority
            self.ancestry.give(block, DEFAULT_PRIORITY, Cause.EXPIRED)
            if block.priority != before:
                moved.append(block)
        if moved:
            self.touch(moved)

    def reuse(self, blocks: Iterable[Block]) -> list[Block]:
        """With selective writes, marks blocks as used again. Returns the blocks for which this is the second use."""
        if not self._selective:
            return []
        fresh = [block for block in blocks if block not in self.reused]
        self.reused.update(fresh)
        for block in fresh:
            self._changed[block] = None
        return fresh

    def take_disk_uses(self) -> list[Key]:
        """Keys of blocks with a disk copy that were used since the last call, in the order of their last use."""
        used, self._used_on_disk = self._used_on_disk, {}
        return [block.key for block in used if (copy := block.copies[DISK]) is not None and copy.valid]

    # -- indexing and removal --------------------------------------------------------------------------------------

    def unsupported(self, parent_key: Key | None) -> bool:
        """Whether a block under this parent could not be indexed: the parent is absent, hollow or a partial block."""
        if parent_key is None or not self.attention.chained:
            return False
        parent = self.index.get(parent_key)
        return parent is None or parent.hollow or self.is_partial(parent)

    def is_partial(self, block: Block) -> bool:
        """Whether the block has fewer tokens than ``tokens_per_block``. A partial block has no children."""
        label = block.traits.label
        return label is not None and 0 < len(label.tokens) < TOKEN_BYTES * self.shape.tokens_per_block

    def insert(self, key: Key, parent_key: Key | None, traits: Traits, tier: Tier, slot: SlotId, cause: Cause) -> Block:
        """Indexes a new block whose bytes are READY in a slot of memory that is not FREE.

        In a sliding or flat group a block gets neither parent nor children: a window slides off the front of its chain,
        and flat keys form no chains.
        """
        block = self.enter(key, parent_key, traits)
        if (departure := self.departed.get(key)) is not None:
            block.use = departure.use
        self.evictor.use(block)
        block.copies[tier] = Copy(slot, FILLING)
        self.arrive(block, tier)
        self.introduce(block, cause)
        if block.parent is not None:
            self._changed[block.parent] = None  # the parent is no leaf any more
            self.ancestry.use([block.parent])
        return block

    def enter(self, key: Key, parent_key: Key | None, traits: Traits) -> Block:
        """Adds a block without copies to the index, under its parent."""
        parent = None
        if parent_key is not None and self.attention.chained:
            parent = self.index.get(parent_key)
            if parent is None:
                raise InvariantViolation(f"block {key.hex()} is to be indexed before its parent")
            parent_key = parent.key  # one object shared by all children
        block = Block(key, parent_key, parent, traits)
        block.indexed = True
        self.conversations.some_ended |= traits.duration_ms == ENDED_MS
        self.clocks.enter(block)
        self.index.add(block)
        if parent is not None:
            parent.add_child(block)
        return block

    def introduce(self, block: Block, cause: Cause) -> None:
        """Counts a block that was just indexed and records its event; its ancestors' priorities may rise."""
        self.stored += 1
        self.recorder.change(STORED, cause, self.group, block)
        self.ancestry.born(block, cause)
        self._changed[block] = None

    def remove(self, block: Block, cause: Cause) -> None:
        """Takes a block without indexed children out of the index and gives up its copies."""
        if block.first_child is not None:
            raise InvariantViolation(f"block {block} is removed before its children")
        self.conversations.leave(block)
        held = [tier for tier in self.tiers if block.copies[tier] is not None]
        for tier in held:
            self.detach(block, tier)
        self.index.remove(block)
        self.clocks.stop(block)
        if self._selective:
            self.reused.discard(block)
        if self.remote is not None:
            self.remote.forget(block)
        block.indexed = False
        self.removed += 1
        self.departed.add(block, cause, self.wanted_by if cause is CAPACITY else NOBODY)
        evicted = cause is CAPACITY and len(held) == 1
        self.recorder.change(REMOVED, cause, self.group, block, Transfer(held[0]) if evicted else None)
        if block.parent is not None:
            block.parent.remove_child(block)
            self._changed[block.parent] = None
        self.ancestry.died(block, cause)
