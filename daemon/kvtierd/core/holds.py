"""What leases hold in one window group: from a grant, through commits, to release; and what leases of an earlier life
still hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.errors import BadArgument
from kvtierd.core.events import COMMIT, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import NO_LABEL, SEVERAL, Key, Label, SlotId, traits_of
from kvtierd.core.leases import Lease
from kvtierd.core.policy import MIN_PRIORITY
from kvtierd.core.reclaim import Background
from kvtierd.core.slots import SLOT_BLANK, SLOT_ORPHANED
from kvtierd.core.transfers import EXISTS, OK, PARENT_CONFLICT, PARENT_MISSING, BlockResult, CommitItem

_SIBLINGS: Final = 32
"""A new block is compared with so many others of its parent, the newest."""


class Holding:
    """See the module. Whose a lease is, ``core/leases.py`` knows."""

    def __init__(self, state: GroupState, background: Background) -> None:
        self._state = state
        self._window = state.attention
        self._background = background

    def store(
        self, lease: Lease, items: Sequence[CommitItem], *, hold: bool, cause: Cause = COMMIT
    ) -> tuple[BlockResult, ...]:
        """Makes blocks of blank slots. Where an equal key is indexed, that block stays and the lease lets go of the
        slot; where the parent is not indexed or is a partial block, or is not that of the equal key, the slot stays
        blank. All blocks found or made are used. ``hold``: the lease holds the blocks made. All other leases over their
        slots do in any case. In a flat group parents say nothing.

        Raises :class:`BadArgument` where a slot is not a blank one of the lease.
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
                block = state.insert(key, parent_key, traits_of(priority, duration_ms, label), tier, slot, cause)
                made.append(block)
                if label is not None and label.tokens and self._window.chained:
                    self._outgrow(block, label)
                if not hold:
                    del lease.blank[slot]
                    state.disown(tier, slot)
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
        """Partial blocks with which the new one begins are of no more use: they are the first to go. They do not go at
        once: one on disk survives a crash that the new one, which is not there yet, does not."""
        for sibling in islice(self._state.index.children(block.parent), _SIBLINGS):
            other = sibling.traits.label or NO_LABEL
            shorter = 0 < len(other.tokens) < len(label.tokens)
            if shorter and other.scope == label.scope and label.tokens.startswith(other.tokens):
                self._state.retain(sibling, MIN_PRIORITY, 0, COMMIT)

    def _keep(self, lease: Lease, slot: SlotId, block: Block) -> None:
        """A commit of a block that exists: it stays, and the lease lets go of the slot."""
        self._background.used_again([block])
        self._let_go(lease, slot)
        if self._window.span and block not in lease.held:
            self._slide(lease, block)

    def _slide(self, lease: Lease, block: Block) -> None:
        """The block is the newest of its chain: what its window does not reach is let go, but for the sinks of a chain
        that began here."""
        trail = lease.trails.get(block.key)
        if trail is not None:
            self._let_slide(lease, trail.pop(), unless=block)  # lost since, and stored again
        else:
            trail = lease.trails.pop(block.parent_key, None) if block.parent_key is not None else None
        trail = trail if trail is not None else deque()
        trail.append(block)
        lease.trails[block.key] = trail
        sinks = self._window.sinks if trail[0].parent_key is None else 0
        if len(trail) > sinks + self._window.span:
            self._let_slide(lease, trail[sinks])
            del trail[sinks]

    def _let_slide(self, lease: Lease, block: Block, unless: Block | None = None) -> None:
        copy = lease.held.pop(block, None) if block is not unless else None
        if copy is not None:
            self._state.unhold(block, lease.tier, copy)

    def join(self, lease: Lease, joined: Lease) -> None:
        """``joined``, which holds nothing yet, holds what the lease does, but for blocks that have left its slots or
        whose bytes are bad."""
        joined.family = lease.family
        joined.family.append(joined)
        joined.blank = dict(lease.blank)
        self._restate(joined, joined.blank)
        for block, copy in lease.held.items():
            if self._state.stands(block, lease.tier, copy):
                joined.held[block] = self._state.hold(block, lease.tier, joined.session)
        joined.trails = {key: deque(trail) for key, trail in lease.trails.items()}

    def give_back(self, lease: Lease, slots: Collection[SlotId]) -> None:
        """The lease lets go of these slots: blank ones become free where no other lease holds them, and blocks lose its
        hold, tails first, so prefixes outlive their tails."""
        for slot in [slot for slot in lease.blank if slot in slots]:
            self._let_go(lease, slot)
        released = [(block, copy) for block, copy in lease.held.items() if copy.slot in slots][::-1]
        for block, copy in released:
            del lease.held[block]
            self._state.unhold(block, lease.tier, copy)
        self._state.touch(block for block, _ in released if block.indexed)

    def orphan(self, lease: Lease, orphaned: bool) -> None:
        lease.orphaned = orphaned
        self._restate(lease, lease.blank)

    def _let_go(self, lease: Lease, slot: SlotId) -> None:
        """A blank slot is free when the last lease lets go of it."""
        del lease.blank[slot]
        writers = lease.writers(slot)
        if writers:
            self._restate(writers[0], [slot])
        else:
            self._state.give_back(lease.tier, slot)

    def _restate(self, lease: Lease, slots: Iterable[SlotId]) -> None:
        """Blank slots of the lease follow all leases that hold them. A restarted daemon cannot know several owners: it
        honours slots of :data:`SEVERAL` as long as any process of this life does."""
        table, ledger = self._state.slots[lease.tier], self._state.ledgers[lease.tier]
        for slot in slots:
            writers = lease.writers(slot)
            table.enter(slot, SLOT_ORPHANED if all(one.orphaned for one in writers) else SLOT_BLANK)
            ledger.own((slot,), writers[0].session if len(writers) == 1 else SEVERAL)

    def restore(self, lease: Lease, blank: Iterable[SlotId], keys: Iterable[Key]) -> None:
        """A lease of an earlier life, whose process lives and may still use what it had: free slots, and READY blocks
        of the lease's tier."""
        state = self._state
        lease.orphaned = True
        lease.blank = dict.fromkeys(blank)
        state.slots[lease.tier].claim(lease.blank, SLOT_ORPHANED)
        self._restate(lease, lease.blank)
        for block in filter(None, map(state.index.get, keys)):
            lease.held[block] = state.hold(block, lease.tier, lease.session)


TOUCHED_A_CALL: Final = 4_096
"""Blocks that a touch counts as used, from the last key back; others become more recent, no more."""


class Uses:
    """``hits``: blocks that were used, by the tier that they were found in. ``queried``: blocks of chains that were
    asked for, each chain once; ``found``: of them."""

    def __init__(self, state: GroupState, background: Background) -> None:
        self._state = state
        self._background = background
        self.hits = dict.fromkeys(state.tiers, 0)
        self.queried = 0
        self.found = 0

    def asked(self, queried: int, found: int) -> None:
        """Chains of so many blocks were asked for."""
        self.queried += queried
        self.found += found

    def acquired(self, blocks: Sequence[Block], found_in: Sequence[int]) -> None:
        """``found_in``: the residency of each at the match."""
        self._used(blocks, found_in)
        self._state.touch(reversed(blocks))

    def touch(self, keys: Sequence[Key]) -> None:
        """As if an acquire had found these blocks with all that they stand on; the last key was read last."""
        touched: dict[Block, None] = {}
        for key in reversed(keys):
            block = self._state.index.get(key)
            while block is not None and block not in touched and len(touched) < TOUCHED_A_CALL:
                touched[block] = None
                block = block.parent
        oldest_first = list(touched)[::-1]
        blocks = sorted(oldest_first, key=lambda block: block.depth)
        self._used(blocks, [block.residency for block in blocks])
        named = filter(None, map(self._state.index.get, keys))
        self._state.touch(chain((block for block in named if block not in touched), blocks))

    def _used(self, blocks: Sequence[Block], found_in: Sequence[int]) -> None:
        """All that a use means but recency. ``blocks``: parents before children."""
        for residency, times in Counter(found_in).items():
            self.hits[next(tier for tier in self._state.tiers if residency & tier.bit)] += times
        self._background.used_again(blocks)
        self._state.ask(blocks, ())
        self._state.clocks.start(*blocks)
