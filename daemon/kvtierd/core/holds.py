"""Slots and blocks that leases hold in one window group: from the grant, through commits, to the release, and after a
restart."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.errors import BadArgument
from kvtierd.core.events import COMMIT, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import NO_LABEL, SEVERAL, Key, Label, SlotId, Traits
from kvtierd.core.leases import SlotLease
from kvtierd.core.policy import MIN_PRIORITY
from kvtierd.core.reclaim import Background
from kvtierd.core.slots import SLOT_BLANK, SLOT_ORPHANED
from kvtierd.core.transfers import EXISTS, OK, PARENT_CONFLICT, PARENT_MISSING, BlockResult, CommitItem

_SIBLINGS: Final = 32
"""Limit of siblings that a new block is compared with, newest first."""


class Holds:
    """Changes the slots and blocks that leases hold. ``core/leases.py`` knows the owners of leases."""

    def __init__(self, state: GroupState, background: Background) -> None:
        self._state = state
        self._window = state.attention
        self._background = background

    def store(
        self, lease: SlotLease, items: Sequence[CommitItem], *, hold: bool, cause: Cause = COMMIT
    ) -> tuple[BlockResult, ...]:
        """Makes blocks of blank slots. If the key is indexed, the existing block stays and the lease lets go of the
        slot. If the parent is not indexed, is a partial block, or is not the existing block's parent, the slot stays
        blank. All blocks found or made count as used. ``hold``: the lease holds the blocks made; other leases over the
        slots always do. In a flat group parents are ignored.

        Raises :class:`BadArgument` for a slot that is not blank in the lease.
        """
        state, tier = self._state, lease.tier
        for item in items:
            if item.slot not in lease.blank:
                raise BadArgument("slots", item.slot, f"a blank slot of lease {lease.id}")
        results: list[BlockResult] = []
        used: list[Block] = []
        made: list[Block] = []
        found: list[Block] = []
        for slot, key, parent, priority, duration_ms, label in items:
            parent_key = None if state.shape.flat else parent
            block = state.index.get(key)
            if block is not None:
                if block.parent_key != parent_key:
                    results.append(PARENT_CONFLICT)
                    continue
                self._keep(lease, slot, block)
                found.append(block)
                results.append(EXISTS)
            elif state.unsupported(parent_key):
                results.append(PARENT_MISSING)
                continue
            else:
                block = state.insert(key, parent_key, Traits(priority, duration_ms, 0, label), tier, slot, cause)
                made.append(block)
                if label is not None and label.tokens and self._window.chained:
                    self._outgrow(block, label)
                if not hold:
                    del lease.blank[slot]
                    state.ledgers[tier].own((slot,), None)
                writers = lease.writers(slot)
                for writer in writers:
                    del writer.blank[slot]
                    writer.held[block] = state.hold(block, tier, writer.session)
                    if self._window.span:
                        self._slide(writer, block)
                if len(writers) > 1:  # a restart may find the slot half committed
                    state.ledgers[tier].own((slot,), SEVERAL)
                results.append(OK)
            used.append(block)
        self._background.committed(made)
        state.ask(found, made)
        state.touch(reversed(used))
        return tuple(results)

    def _outgrow(self, block: Block, label: Label) -> None:
        """Gives the lowest priority to partial blocks with which the new block begins. Partial blocks stay:
        a partial block on disk survives a crash, and the new block is not on disk yet."""
        for sibling in islice(self._state.index.children(block.parent), _SIBLINGS):
            other = sibling.traits.label or NO_LABEL
            shorter = 0 < len(other.tokens) < len(label.tokens)
            if shorter and other.scope == label.scope and label.tokens.startswith(other.tokens):
                self._state.retain(sibling, MIN_PRIORITY, 0, COMMIT)

    def _keep(self, lease: SlotLease, slot: SlotId, block: Block) -> None:
        """Handles a commit of an existing block: the block stays, and the lease lets go of the slot."""
        self._background.used_again([block])
        self._let_go(lease, slot)
        if self._window.span and block not in lease.held:
            self._slide(lease, block)

    def _slide(self, lease: SlotLease, block: Block) -> None:
        """Appends the newest block of a chain, and lets go of blocks that its window no longer reaches. The sinks of a
        chain that began in this lease stay held."""
        trail = lease.trails.get(block.key)
        if trail is not None:
            self._let_slide(lease, trail.pop(), unless=block)  # the block was lost and stored again
        else:
            trail = lease.trails.pop(block.parent_key, None) if block.parent_key is not None else None
        trail = trail if trail is not None else deque()
        trail.append(block)
        lease.trails[block.key] = trail
        sinks = self._window.sinks if trail[0].parent_key is None else 0
        if len(trail) > sinks + self._window.span:
            self._let_slide(lease, trail[sinks])
            del trail[sinks]

    def _let_slide(self, lease: SlotLease, block: Block, unless: Block | None = None) -> None:
        copy = lease.held.pop(block, None) if block is not unless else None
        if copy is not None:
            self._state.unhold(block, lease.tier, copy)

    def join(self, lease: SlotLease, joined: SlotLease) -> None:
        """Gives ``joined``, a new lease, all that ``lease`` holds, except blocks that have left their slots."""
        joined.family = lease.family
        joined.family.append(joined)
        joined.blank = dict(lease.blank)
        self._restate(joined, joined.blank)
        for block, copy in lease.held.items():
            if block.copies[lease.tier] is copy:
                joined.held[block] = self._state.hold(block, lease.tier, joined.session)
        joined.trails = {key: deque(trail) for key, trail in lease.trails.items()}

    def give_back(self, lease: SlotLease, slots: Collection[SlotId]) -> None:
        """Lets go of these slots. A blank slot is freed if no other lease holds it. Blocks are released tails first, so
        prefixes outlive their tails."""
        for slot in [slot for slot in lease.blank if slot in slots]:
            self._let_go(lease, slot)
        released = [(block, copy) for block, copy in lease.held.items() if copy.slot in slots][::-1]
        for block, copy in released:
            del lease.held[block]
            self._state.unhold(block, lease.tier, copy)
        self._state.touch(block for block, _ in released if block.indexed)

    def orphan(self, lease: SlotLease, orphaned: bool) -> None:
        lease.orphaned = orphaned
        self._restate(lease, lease.blank)

    def _let_go(self, lease: SlotLease, slot: SlotId) -> None:
        """Lets go of a blank slot. The slot is freed with its last lease."""
        del lease.blank[slot]
        writers = lease.writers(slot)
        if writers:
            self._restate(writers[0], [slot])
        else:
            self._state.give_back(lease.tier, slot)

    def _restate(self, lease: SlotLease, slots: Iterable[SlotId]) -> None:
        """Sets state and owner of blank slots from all leases that hold them. A restarted daemon cannot know several
        owners: it keeps slots of :data:`SEVERAL` while any process from before the restart lives."""
        table, ledger = self._state.slots[lease.tier], self._state.ledgers[lease.tier]
        for slot in slots:
            writers = lease.writers(slot)
            table.change(slot, SLOT_ORPHANED if all(one.orphaned for one in writers) else SLOT_BLANK)
            ledger.own((slot,), writers[0].session if len(writers) == 1 else SEVERAL)

    def restore(self, lease: SlotLease, blank: Iterable[SlotId], keys: Iterable[Key]) -> None:
        """Restores a lease from before a restart, whose process may still use its slots: free slots, and READY blocks
        of its tier."""
        state = self._state
        lease.orphaned = True
        lease.blank = dict.fromkeys(blank)
        state.slots[lease.tier].claim(lease.blank, SLOT_ORPHANED)
        self._restate(lease, lease.blank)
        for block in filter(None, map(state.index.get, keys)):
            lease.held[block] = state.hold(block, lease.tier, lease.session)


TOUCHED_A_CALL: Final = 4_096
"""Limit of blocks that one touch counts as used, from the last key back. Other blocks only become more recent."""


class UseCounts:
    """Use counts. ``hits``: blocks used, by the tier where they were found. ``queried``: blocks of requested chains,
    each chain counted once. ``found``: the blocks found among them."""

    def __init__(self, state: GroupState, background: Background) -> None:
        self._state = state
        self._background = background
        self.hits = dict.fromkeys(state.tiers, 0)
        self.queried = 0
        self.found = 0

    def asked(self, queried: int, found: int) -> None:
        """Counts a request for ``queried`` blocks of chains, of which ``found`` were there."""
        self.queried += queried
        self.found += found

    def acquired(self, blocks: Sequence[Block], found_in: Sequence[int]) -> None:
        """Counts an acquire. ``found_in``: each block's residency at the match."""
        self._used(blocks, found_in)
        self._state.touch(reversed(blocks))

    def touch(self, keys: Sequence[Key]) -> None:
        """Counts these blocks and their ancestors as used, as by an acquire. The last key was read last."""
        touched: dict[Block, None] = {}
        for key in reversed(keys):
            block = self._state.index.get(key)
            while block is not None and not block.hollow and block not in touched and len(touched) < TOUCHED_A_CALL:
                touched[block] = None
                block = block.parent
        oldest_first = list(touched)[::-1]
        blocks = sorted(oldest_first, key=lambda block: block.depth)
        self._used(blocks, [block.residency for block in blocks])
        named = filter(None, map(self._state.index.get, keys))
        self._state.touch(chain((block for block in named if block not in touched), blocks))

    def _used(self, blocks: Sequence[Block], found_in: Sequence[int]) -> None:
        """Applies all effects of a use but recency. ``blocks``: parents before children."""
        for residency, times in Counter(found_in).items():
            self.hits[next(tier for tier in self._state.tiers if residency & tier.bit)] += times
        self._background.used_again(blocks)
        self._state.ask(blocks, ())
        self._state.clocks.start(*blocks)
