"""Fills an empty window group with the blocks that its tiers held before a restart, all at once.

Besides ``core/group.py``, only this module gives blocks residency and recency. :meth:`GroupState.insert`, block by
block, would make the restart several times longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from kvtierd.core.block import READY, Block, Copy
from kvtierd.core.events import Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import BITS, TIERS, Key, SlotId, Tier, Traits
from kvtierd.core.slots import SlotState


class RecoveredBlock(NamedTuple):
    """A block found at start, with its traits as of the write of its bytes. ``slot``: on disk."""

    slot: SlotId | None
    key: Key
    parent: Key | None
    traits: Traits
    device: SlotId | None = None
    host: SlotId | None = None

    @property
    def places(self) -> dict[Tier, SlotId]:
        found = zip(TIERS, (self.device, self.host, self.slot), strict=True)
        return {tier: slot for tier, slot in found if slot is not None}


def recover(state: GroupState, found: Sequence[RecoveredBlock]) -> list[Block]:
    """Indexes blocks whose bytes are READY, in the order of ``found``: parents before children, otherwise least
    recently used first. Returns the blocks in this order.

    Raises :class:`InvariantViolation` for a block whose parent is not there yet, and for a slot that is not free.
    """
    _claim(state, found)
    blocks = _indexed(state, found)
    _order_by_use(state, blocks)
    for tier in state.tiers:
        state.candidates(tier)  # else the first request for a victim would wait while all blocks are placed
    if state.remote is not None:
        state.remote.recovered(blocks)
    return blocks


def reachable(keys: Sequence[Key], parents: Sequence[Key | None]) -> list[int]:
    """Places of the blocks whose ancestors are all in the lists: parents before children, otherwise in the order
    given."""
    place_of = dict(zip(keys, range(len(keys)), strict=True))
    ready: list[int] = []
    # Two arrays link the children of a block: most blocks have one child, and a list a block would cost too much.
    first_child = [-1] * len(keys)
    next_child = [-1] * len(keys)
    for place, parent in enumerate(parents):
        if parent is None:
            ready.append(place)
        elif (above := place_of.get(parent)) is not None:
            next_child[place] = first_child[above]
            first_child[above] = place
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        child = first_child[place]
        while child >= 0 and next_child[child] < 0:  # an only child, which usually comes next
            place = heapq.heappushpop(ready, child)
            order.append(place)
            child = first_child[place]
        while child >= 0:
            heapq.heappush(ready, child)
            child = next_child[child]
    return order


def _claim(state: GroupState, found: Sequence[RecoveredBlock]) -> None:
    for tier, name in zip(TIERS, ("device", "host", "slot"), strict=True):
        slots = [slot for one in found if (slot := getattr(one, name)) is not None]
        if slots:
            state.slots[tier].claim(slots, SlotState.READY)


def _indexed(state: GroupState, found: Sequence[RecoveredBlock]) -> list[Block]:
    blocks: list[Block] = []
    for slot, key, parent_key, traits, device, host in found:
        block = state.enter(key, parent_key, traits)
        residency = 0
        for tier, place in enumerate((device, host, slot)):
            if place is not None:
                block.copies[tier] = Copy(place, READY)
                residency |= BITS[tier]
        if slot is not None and block.parent is not None:
            block.parent.disk_children += 1
        state.residencies.change(block, residency)
        state.introduce(block, Cause.RECOVERED)
        blocks.append(block)
    while state.ancestry.due:  # all at once: no request waits
        state.ancestry.climb()
        state.ancestry.end_call()
    return blocks


def _order_by_use(state: GroupState, blocks: Sequence[Block]) -> None:
    """Enters the blocks into the eviction order by their place in the list. A block counts as used no earlier than its
    descendants, so every parent comes after its children."""
    for place, block in enumerate(blocks):
        block.rank = place  # place of the last use, until the block is entered
    for block in reversed(blocks):
        parent = block.parent
        if parent is not None and parent.rank < block.rank:
            parent.rank = block.rank
    use = state.evictor.use
    for place, last in enumerate(blocks):
        used: Block | None = last
        while used is not None and used.rank == place:
            use(used)
            used = used.parent
