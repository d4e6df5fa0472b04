"""Fills an empty window group with what its tiers held before a restart, all at once.

Besides ``core/group.py`` the only module that gives blocks residency and recency. Block by block through
:meth:`GroupState.insert` a restart would take three times as long, and nobody is served meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvtierd.core.block import READY, Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DEVICE, DISK, HOST, Key, SlotId, Tier, Traits
from kvtierd.core.slots import SlotState

_DEVICE_BIT: Final = Tier.DEVICE.bit
_HOST_BIT: Final = Tier.HOST.bit
_DISK_BIT: Final = Tier.DISK.bit


class Recovered(NamedTuple):
    """A block found at start, its traits as they were when its bytes were written. ``slot``: on disk."""

    slot: SlotId | None
    key: Key
    parent: Key | None
    traits: Traits
    device: SlotId | None = None
    host: SlotId | None = None

    @property
    def places(self) -> dict[Tier, SlotId]:
        found = {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.slot}
        return {tier: slot for tier, slot in found.items() if slot is not None}


def recover(state: GroupState, found: Sequence[Recovered]) -> list[Block]:
    """Indexes blocks whose bytes are READY: in the order of ``found``, parents before their children, least recently
    used first among the rest. Returns them in this order.

    Raises :class:`InvariantViolation` for a block whose parent is not there yet, and for a slot that is not free.
    """
    _claim(state, found)
    blocks = _indexed(state, found)
    _order_by_use(state, blocks)
    for tier in state.tiers:
        state.candidates(tier)  # else the first to want a victim would wait until all of these have been looked at
    if state.remote is not None:
        state.remote.recovered(blocks)
    return blocks


def reachable(keys: Sequence[Key], parents: Sequence[Key | None]) -> list[int]:
    """Places in these lists of the blocks whose ancestors are all there: parents before children, otherwise in the
    order given."""
    place_of = dict(zip(keys, range(len(keys)), strict=True))
    ready: list[int] = []
    # Children of a block are a chain through two arrays: most have one, and a list each would cost more than the rest.
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
        while child >= 0 and next_child[child] < 0:  # an only child, which mostly is the next
            place = heapq.heappushpop(ready, child)
            order.append(place)
            child = first_child[place]
        while child >= 0:
            heapq.heappush(ready, child)
            child = next_child[child]
    return order


def _claim(state: GroupState, found: Sequence[Recovered]) -> None:
    taken = {
        Tier.DEVICE: [one.device for one in found if one.device is not None],
        Tier.HOST: [one.host for one in found if one.host is not None],
        Tier.DISK: [one.slot for one in found if one.slot is not None],
    }
    for tier, slots in taken.items():
        if slots:
            state.slots[tier].claim(slots, SlotState.READY)


def _indexed(state: GroupState, found: Sequence[Recovered]) -> list[Block]:
    chained = state.attention.chained
    blocks: list[Block] = []
    for slot, key, parent_key, traits, device, host in found:
        parent = None
        if parent_key is not None and chained:
            parent = state.index.get(parent_key)
            if parent is None:
                raise InvariantViolation(f"block {key.hex()} is to be indexed before its parent")
            parent_key = parent.key  # one object for all that name it
        block = Block(key, parent_key, parent, traits)
        block.indexed = True
        state.clocks.enter(block)
        residency = 0
        if device is not None:
            block.copies[DEVICE] = Copy(device, READY)
            residency |= _DEVICE_BIT
        if host is not None:
            block.copies[HOST] = Copy(host, READY)
            residency |= _HOST_BIT
        if slot is not None:
            block.copies[DISK] = Copy(slot, READY)
            residency |= _DISK_BIT
            if parent is not None:
                parent.disk_children += 1
        state.residencies.change(block, residency)
        state.index.add(block)
        if parent is not None:
            parent.add_child(block)
        state.introduce(block, Cause.RECOVERED)
        blocks.append(block)
    while state.ancestry.due:  # nobody waits
        state.ancestry.climb()
        state.ancestry.end_call()
    return blocks


def _order_by_use(state: GroupState, blocks: Sequence[Block]) -> None:
    """The place in the list is the last use, but a block was used no earlier than those that stand on it: every parent
    comes after its children."""
    for place, block in enumerate(blocks):
        block.rank = place  # of its last use, until it is entered
    for block in reversed(blocks):
        parent = block.parent
        if parent is not None and parent.rank < block.rank:
            parent.rank = block.rank
    enter = state.evictor.enter
    for place, last in enumerate(blocks):
        used: Block | None = last
        while used is not None and used.rank == place:
            enter(used)
            used = used.parent
