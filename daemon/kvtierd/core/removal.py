"""Removal of blocks for reasons other than room: a drop, a reset, or lost bytes.

A subtree may have a million blocks. Generators walk it and yield at each step; a call takes ``Policy.blocks_a_call``
steps. Leaves go first, so every indexed block keeps its parent. Other calls run in between: the walk skips the blocks
that they removed, and removes the blocks that they stored below.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvtier.abi.words import BlockResult
from kvtierd.core.block import Block, Copy
from kvtierd.core.events import UPDATED, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DISK, Key, Tier
from kvtierd.core.outcome import Transfer

NEWEST: Final = 1 << 62
"""Larger than the number of any block."""


def advance(state: GroupState, steps: Iterator[None]) -> bool:
    """Takes the steps that the call has left. Returns whether none remain."""
    taken = sum(1 for _ in islice(steps, state.steps_left))
    state.steps_left -= taken
    return state.steps_left > 0


def walk(root: Block, enters: Callable[[Block], bool] = lambda child: True) -> Iterator[Block | None]:
    """Yields the block and its subtree, children before parents, and None for a step between two blocks.

    ``enters``: children for which it is false are left out, with their subtrees.
    """
    block, child = root, root.first_child
    while True:
        if child is not None and not child.indexed:
            child = block.first_child  # the child was removed meanwhile, and its place among its siblings is lost
        if child is None:
            parent = block.parent
            following = block.next_sibling if block.indexed or parent is None else parent.first_child
            yield block
            if block is root or parent is None:
                return
            block, child = parent, following
        else:
            if enters(child):
                block, child = child, child.first_child
            else:
                child = child.next_sibling
            yield None


def remove_all(
    state: GroupState, root: Block, cause: Cause, below: Cause, spares: Callable[[Block], bool] = lambda block: False
) -> Generator[None, None, int]:
    """Removes a block and its subtree, or stops at a block that it ``spares``. Returns the number of blocks removed."""
    block, gone = root, 0
    while root.indexed:
        yield
        if block.indexed and block.first_child is not None:
            block = block.first_child
            continue
        parent = block.parent
        if block.indexed:
            if spares(block):
                break
            state.remove(block, cause if block is root else below)
            gone += 1
        if parent is not None:
            block = parent
    return gone


def needed(block: Block) -> bool:
    """Whether the block is held, pinned or claimed."""
    return block.claims > 0 or block.held


@dataclass(slots=True, frozen=True)
class DropResult:
    """``dropped``: number of blocks removed, subtrees included."""

    results: tuple[BlockResult, ...]
    dropped: int


class Drop:
    """Drops blocks with their subtrees. A subtree of which any block is held, pinned or claimed stays; the result is
    HELD.

    A subtree that needs several calls is checked first. If a block in it is held meanwhile, that block and its
    ancestors stay, and the result is HELD.
    """

    def __init__(self, state: GroupState, keys: Sequence[Key], *, dry_run: bool) -> None:
        self.report: DropResult | None = None
        """None while there is more to do."""
        self._state = state
        self._wanted = [state.index.get(key) for key in keys]
        self._dry_run = dry_run
        self._roots: dict[Block, Block] = {}
        """On a dry run: the named block whose subtree counted each block."""
        self._going: set[Block] = set()
        """Named blocks whose subtree would go."""
        self._steps = self._all()

    def go_on(self) -> None:
        advance(self._state, self._steps)

    def _all(self) -> Iterator[None]:
        results = []
        dropped = 0
        for block in self._wanted:
            if block is None:
                results.append(BlockResult.NOT_FOUND)
                continue
            held = False
            if block.indexed and self._roots.get(block) not in self._going:
                there = yield from self._look(block)
                held = there is None
                if self._dry_run:
                    dropped += there or 0
                elif not held:
                    dropped += yield from remove_all(self._state, block, Cause.EXPLICIT, Cause.ANCESTOR, needed)
                    held = block.indexed
            results.append(BlockResult.HELD if held else BlockResult.OK)
        self.report = DropResult(tuple(results), dropped)

    def _look(self, root: Block) -> Generator[None, None, int | None]:
        """Counts the blocks of a subtree that no other subtree has counted; None if any block of it is needed."""
        count = 0
        for member in walk(root):
            yield
            if member is None:
                continue
            if needed(member):
                return None
            if self._dry_run and self._roots.get(member) not in self._going:
                self._roots[member] = root
                count += 1
        self._going.add(root)
        return count


def reset(state: GroupState, before: int) -> tuple[int, int, int, list[Key]]:
    """Removes a slice of the blocks with numbers under ``before``, newest first, so children before parents. A block
    that is in use or has children left stays.

    Returns the numbers of blocks removed and kept, the number to go on from (0: the end), and the keys of the kept
    blocks without a parent.
    """
    members, following = state.index.before(before, state.policy.blocks_a_call)
    stayed = []
    for block in members:
        if block.first_child is None and not needed(block):
            state.remove(block, Cause.RESET)
        else:
            stayed.append(block)
    roots = [block.key for block in stayed if block.parent is None]
    return len(members) - len(stayed), len(stayed), following, roots


def kept(roots: Iterable[Block]) -> int:
    """Number of blocks that a reset keeps: the indexed ``roots`` and all their ancestors."""
    seen: set[Block] = set()
    for block in roots:
        current: Block | None = block if block.indexed else None
        while current is not None and current not in seen:
            seen.add(current)
            current = current.parent
    return len(seen)


def lose_bytes(state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
    """Handles a copy that failed verification: the block loses the copy, with all that depends on it. A bad disk slot
    is never used again. A memory slot is used again: failing memory is for the machine to report."""
    if tier is DISK:
        state.corrupt[DISK].add(copy.slot)
    if block.copies[tier] is copy and copy not in state.losing:
        state.losing[copy] = steps = _lose_copy(state, block, tier, copy, Cause.CORRUPT)
        next(steps, None)  # detaches a copy in memory, however little of the call is left
        if tier is not DISK and copy.reads and not copy.holds:
            state.ledgers[tier].begin_write(copy.slot)  # no reader may trust these bytes meanwhile
        lose_on(state)


def lose_on(state: GroupState) -> None:
    """Continues losses that :meth:`lose_bytes` and :meth:`lose_tier` have begun."""
    for lost, steps in list(state.losing.items()):
        if not advance(state, steps):
            return
        del state.losing[lost]


def lose_tier(state: GroupState, tier: Tier) -> None:
    """Takes the tier's slots out of use and removes all copies in the tier, newest block first. A block without another
    copy goes with its subtree."""
    state.lost.add(tier)
    state.slots[tier].shut()
    if tier is DISK:
        state.undeleted.clear()  # the disk is emptied before it returns to service
    state.losing[tier] = _lose_copies(state, tier)
    lose_on(state)


def _lose_copies(state: GroupState, tier: Tier) -> Iterator[None]:
    before = NEWEST
    while before:
        blocks, before = state.index.before(before, state.policy.blocks_a_call)
        for block in blocks:
            copy = block.copies[tier]
            if copy is None:
                yield
            else:
                yield from _lose_copy(state, block, tier, copy, Cause.IO_ERROR)


def restore_disk(state: GroupState) -> None:
    """Puts the disk, which is empty, back in service."""
    state.lost.discard(DISK)
    state.slots[DISK].reopen(state.corrupt[DISK])


def _lose_copy(state: GroupState, root: Block, tier: Tier, copy: Copy, cause: Cause) -> Iterator[None]:
    """Detaches a copy, on disk after the disk copies of the descendants: a parent's record outlives its children's. A
    block that is hollow then goes after its subtree."""
    while tier is DISK and root.disk_children:  # more children may arrive on disk meanwhile
        for member in walk(root, _on_disk):
            yield
            above = member is not None and (member is root or member.disk_children > 0)
            its = None if member is None else member.copies[DISK]
            if member is not None and its is not None and not above:
                yield from _lose_one_copy(state, member, DISK, its, Cause.ANCESTOR)
    yield from _lose_one_copy(state, root, tier, copy, cause)


def _on_disk(block: Block) -> bool:
    return block.copies[DISK] is not None


def _lose_one_copy(state: GroupState, block: Block, tier: Tier, copy: Copy, cause: Cause) -> Iterator[None]:
    if block.copies[tier] is not copy:
        return
    if block.residency == tier.bit and block.first_child is None and copy.valid:
        state.remove(block, cause)
        yield
        return
    state.detach(block, tier)
    if copy.valid:
        state.recorder.change(UPDATED, cause, state.group, block, Transfer(tier))
    state.reconsider(block)
    yield
    if block.hollow:
        yield from remove_all(state, block, cause, Cause.ANCESTOR)
