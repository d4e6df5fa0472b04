"""What one window group says to those who only look: prefixes, places and pages of its blocks. Nothing changes."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.block import Block
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Key
from kvtierd.core.pins import Pins
from kvtierd.core.verbs import Listing, ListingRow, Location


def prefix(state: GroupState, keys: Sequence[Key]) -> list[Block]:
    """The blocks of the longest indexed prefix of a chain."""
    found: list[Block] = []
    for key in keys:
        block = state.index.get(key)
        if block is None:
            break
        found.append(block)
    return found


def residencies(state: GroupState, keys: Sequence[Key]) -> tuple[int, ...]:
    """Of the longest indexed prefix of a chain: where its keys are not one, of nothing in particular.

    In a full group whatever an indexed block stands on is indexed, so the prefix ends where bisection says, and its
    blocks are found from parent to parent: a look-up in an index of a million keys misses the caches three times.
    """
    if state.shape.sliding or not keys:
        return tuple(block.residency for block in prefix(state, keys))
    length, last = _longest(state, keys)
    found = [0] * length
    for place in range(length - 1, -1, -1):
        if last is None:
            return tuple(block.residency for block in prefix(state, keys))
        found[place] = last.residency
        last = last.parent
    return tuple(found)


def _longest(state: GroupState, keys: Sequence[Key]) -> tuple[int, Block | None]:
    """The length of the longest indexed prefix, and its last block."""
    find = state.index.get
    last = find(keys[-1])
    if last is not None:
        return len(keys), last
    known, unknown = 0, len(keys) - 1
    while known < unknown:
        middle = (known + unknown) // 2
        block = find(keys[middle])
        if block is None:
            unknown = middle
        else:
            known, last = middle + 1, block
    return known, last


def locate(state: GroupState, keys: Sequence[Key]) -> list[Location]:
    return [_location(state.index.get(key)) for key in keys]


def _location(block: Block | None) -> Location:
    if block is None:
        return Location(0, (None, None, None))
    device, host, disk = (copy.slot if copy is not None and copy.valid else None for copy in block.copies)
    return Location(block.residency, (device, host, disk))


def listing(state: GroupState, page: int, limit: int) -> Listing:
    """Indexed blocks in the order of indexing, parents before children."""
    blocks, following = state.index.page(page, limit)
    return Listing(tuple(_row(block, state.pins) for block in blocks), following)


def _row(block: Block, pins: Pins) -> ListingRow:
    above = block.parent.traits.label if block.parent is not None else None
    pinned = pins.residency(block)
    return ListingRow(block.key, block.parent_key, block.residency, block.priority, block.traits.label, above, pinned)
