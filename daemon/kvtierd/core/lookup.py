"""Computes the longest prefix that several window groups can serve together.

A prefix of n blocks is usable if every group has the blocks that attention over the prefix needs: a full group all
blocks, a sliding group its sinks and the blocks that its window covers. So a longer prefix may be usable where a
shorter prefix is not, and the answer is never the minimum of the groups' own answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from kvtierd.core.block import Block
from kvtierd.core.group import GroupState
from kvtierd.core.ids import NO_LABEL, TOKEN_BYTES, Key
from kvtierd.core.index import Pins
from kvtierd.core.transfers import BlockSlots, GroupResidency, Listing, ListingRow, PartialMatch

Limit = Callable[[int], int]
"""Maps a prefix length to the largest usable length not above it. Called with falling lengths only."""

Usable = Callable[[GroupState, Block], bool]


def longest(bound: int, limits: Sequence[Limit]) -> int:
    """The greatest length up to ``bound`` that no limit lowers."""
    length = bound
    while True:
        before = length
        for limit in limits:
            length = limit(length)
        if length == before:
            return length


class Cover:
    """A group's side of a match. Looks at no more blocks than needed."""

    def __init__(self, state: GroupState, keys: Sequence[Key], usable: Usable) -> None:
        self.state = state
        self._keys = keys
        self._usable = usable
        self._found: dict[int, Block] = {}
        self._low = len(keys) if state.attention.span else 0
        """All places from here to the last length asked for have a usable block."""

    def prefix(self, bound: int) -> int:
        """Bounds the length by the blocks that every longer prefix needs: all blocks, or the sinks of a window. Returns
        at most ``bound``. Call this before :meth:`unbroken`."""
        attention = self.state.attention
        for place, key in enumerate(islice(self._keys, min(bound, attention.sinks) if attention.span else bound)):
            block = self._get(key)
            if block is None:
                return place
            self._found[place] = block
        return bound

    def unbroken(self, length: int) -> int:
        """A :data:`Limit`: no block that the prefix needs is missing."""
        self._low = min(self._low, length)
        while self._low > self.state.attention.first_block(length):
            self._low -= 1
            block = self._get(self._keys[self._low])
            if block is None:
                length = self._low
            else:
                self._found[self._low] = block
        return length

    def blocks(self, length: int) -> list[Block]:
        """The blocks that a prefix of this length needs, in order. The length was found unbroken."""
        return [self._found[place] for place in self.state.attention.needs(length).pick(range(length))]

    def affordable(self, costs: Callable[[Block], bool], budget: int) -> Limit:
        """A :data:`Limit`: at most ``budget`` (0 or more) of the blocks that a prefix needs cost a slot."""
        sums: list[int] = []

        def cost(length: int) -> int:
            needed = self.state.attention.needs(length)
            return sums[needed.sinks] + sums[length] - sums[needed.first]

        def limit(length: int) -> int:
            if not sums:
                found = map(self.state.index.get, islice(self._keys, length))
                sums.extend(accumulate((block is not None and costs(block) for block in found), initial=0))
            while cost(length) > budget:
                length -= 1
            return length

        return limit

    def _get(self, key: Key) -> Block | None:
        block = self.state.index.get(key)
        return block if block is not None and self._usable(self.state, block) else None


def match(states: Sequence[GroupState], keys: Sequence[Key], usable: Usable) -> tuple[int, list[Cover]]:
    """The greatest length usable in all groups, and each group's side of the match, in order."""
    covers = [Cover(state, keys, usable) for state in states]
    bound = len(keys)
    for cover in covers:
        bound = cover.prefix(bound)
    return longest(bound, [cover.unbroken for cover in covers]), covers


def stored(state: GroupState, block: Block) -> bool:
    """A :data:`Usable` that takes every block with a copy."""
    return block.residency != 0


def _prefix(state: GroupState, keys: Sequence[Key]) -> list[Block]:
    found: list[Block] = []
    for key in keys:
        block = state.index.get(key)
        if block is None or not block.residency:
            break
        found.append(block)
    return found


def spans(states: Sequence[GroupState], keys: Sequence[Key]) -> tuple[int, tuple[GroupResidency, ...]]:
    """The longest prefix that these groups can serve together, and each group's part of it."""
    if len(states) == 1 and states[0].attention.chained:
        (state,) = states
        found = residencies(state, keys)
        return len(found), (GroupResidency(state.group, state.attention.needs(len(found)), found),)
    length, covers = match(states, keys, stored)
    return length, tuple(
        GroupResidency(
            cover.state.group,
            cover.state.attention.needs(length),
            tuple(block.residency for block in cover.blocks(length)),
        )
        for cover in covers
    )


def residencies(state: GroupState, keys: Sequence[Key]) -> tuple[int, ...]:
    """Residencies of the longest stored prefix of a chain in a full group; meaningless if the keys are not a chain.

    In a full group the ancestors of an indexed block are indexed. So bisection finds the end of the prefix, and the
    blocks are read from parent to parent: look-ups in a large index miss the CPU caches.
    """
    length, last = _longest(state, keys)
    found = [0] * length
    for place in range(length - 1, -1, -1):
        if last is None:
            break
        found[place] = last.residency
        last = last.parent
    if 0 in found:  # the keys are no chain, or the chain has a hollow block
        return tuple(block.residency for block in _prefix(state, keys))
    return tuple(found)


def _longest(state: GroupState, keys: Sequence[Key]) -> tuple[int, Block | None]:
    """The length of the longest indexed prefix, and its last block."""
    find = state.index.get
    last = find(keys[-1]) if keys else None
    if last is not None:
        return len(keys), last
    length = bisect_left(keys, True, key=lambda key: find(key) is None)
    return length, find(keys[length - 1]) if length else None


def partial(states: Sequence[GroupState], parent_key: Key | None, tokens: bytes, scope: bytes) -> PartialMatch | None:
    """Finds the block, among a block's children or the roots, that all groups have and that begins with the longest run
    of these tokens in this scope. Looks at the newest blocks of the full group, at most ``Policy.blocks_a_call``.

    A sliding group with the prefix before the block and the block itself has the window of every end in the block.
    """
    full = next(state for state in states if state.attention.chained)
    parent = full.index.get(parent_key) if parent_key is not None else None
    best, run = None, 0
    for child in islice(full.index.children(parent), full.policy.blocks_a_call):
        label = child.traits.label or NO_LABEL
        if label.scope != scope or not all(_prefix(state, [child.key]) for state in states):
            continue
        while run < len(tokens) and label.tokens.startswith(tokens[: run + TOKEN_BYTES]):
            best, run = child, run + TOKEN_BYTES
    return None if best is None else PartialMatch(best.key, run // TOKEN_BYTES, best.residency)


def locate(state: GroupState, keys: Sequence[Key]) -> list[BlockSlots]:
    return [_location(state.index.get(key)) for key in keys]


def _location(block: Block | None) -> BlockSlots:
    if block is None:
        return BlockSlots(0, (None, None, None))
    device, host, disk = (copy.slot if copy is not None and copy.valid else None for copy in block.copies)
    return BlockSlots(block.residency, (device, host, disk))


def listing(state: GroupState, page: int, limit: int) -> Listing:
    """Indexed blocks in the order of indexing, parents before children."""
    blocks, following = state.index.page(page, limit)
    return Listing(tuple(_row(block, state.pins) for block in blocks), following)


def _row(block: Block, pins: Pins) -> ListingRow:
    above = block.parent.traits.label if block.parent is not None else None
    pinned = pins.residency(block)
    return ListingRow(block.key, block.parent_key, block.residency, block.priority, block.traits.label, above, pinned)
