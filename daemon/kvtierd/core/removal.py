"""Blocks that go for another reason than room: by a drop or a reset, or because their bytes are lost.

A subtree may have a million blocks. So it is gone through by generators that yield at each step, and a call takes
``Policy.blocks_a_call`` of these: leaves first, so that what is there stands on what is there. Between two calls others
have their turn: what they have removed is passed over, and what they have stored below goes, too.
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
"""Above the numbers of all blocks."""


def advance(state: GroupState, steps: Iterator[None]) -> bool:
    """Takes the steps that are left to this call. Returns whether there are no more."""
    taken = sum(1 for _ in islice(steps, state.steps_left))
    state.steps_left -= taken
    return state.steps_left > 0


def walk(root: Block, enters: Callable[[Block], bool] = lambda child: True) -> Iterator[Block | None]:
    """The block and all under it, children before parents; None: a step between two of them.

    ``enters``: what is under other children is left out, as they are.
    """
    block, child = root, root.first_child
    while True:
        if child is not None and not child.indexed:
            child = block.first_child  # it has gone meanwhile, and its place among the others is not known any more
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
    """Removes a block and everything under it, or goes until it gets to a block that it ``spares``. Returns how many
    blocks went."""
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
    """Somebody holds, pins or waits for it."""
    return block.claims > 0 or block.held


@dataclass(slots=True, frozen=True)
class DropReport:
    """``dropped``: blocks gone, subtrees included."""

    results: tuple[BlockResult, ...]
    dropped: int


class Drop:
    """Forgets blocks and everything under them; those of which any part is held, pinned or claimed are HELD, and stay.

    A subtree of more than one call is looked through first. If somebody gets hold of a part while it goes, that part
    and what it stands on stay, and the block is HELD.
    """

    def __init__(self, state: GroupState, keys: Sequence[Key], *, dry_run: bool) -> None:
        self.report: DropReport | None = None
        """None: there is more to do."""
        self._state = state
        self._wanted = [state.index.get(key) for key in keys]
        self._dry_run = dry_run
        self._roots: dict[Block, Block] = {}
        """On a dry run: with which of those named a block was looked at."""
        self._going: set[Block] = set()
        """Those of them that would go."""
        self._steps = self._all()

    def go_on(self) -> None:
        """Does a call's share."""
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
        self.report = DropReport(tuple(results), dropped)

    def _look(self, root: Block) -> Generator[None, None, int | None]:
        """How many blocks a subtree has that would not go anyway; None where any part of it is needed."""
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
    """Removes a slice of the blocks with numbers under ``before``, the newest first, so children before their parents.
    A block in use stays, and so does a block with children left.

    Returns how many blocks went, how many stayed, the number to go on from (0: the end), and the keys of the blocks
    that stayed and have no parent.
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
    """How many blocks a reset keeps: these, of which some are not indexed any more, and all that they stand on."""
    seen: set[Block] = set()
    for block in roots:
        current: Block | None = block if block.indexed else None
        while current is not None and current not in seen:
            seen.add(current)
            current = current.parent
    return len(seen)


def lose_bytes(state: GroupState, block: Block, tier: Tier, copy: Copy) -> None:
    """A copy failed verification: the block loses it, with all that needs it. A disk's slot is never used again; memory
    that fails for good is the machine's to report."""
    if tier is DISK:
        state.corrupt[DISK].add(copy.slot)
    if block.copies[tier] is copy and copy not in state.losing:
        state.losing[copy] = _lose_copy(state, block, tier, copy, Cause.CORRUPT)
        state.reconsider(block)
        lose_on(state)
        if copy in state.losing and tier is not DISK:  # nobody believes these bytes while what needs them goes
            ledger = state.ledgers[tier]
            (ledger.disown if copy.holds else ledger.begin_write)(copy.slot)


def lose_on(state: GroupState) -> None:
    """Goes on with what :meth:`lose_bytes` has begun."""
    for copy, steps in list(state.losing.items()):
        if not advance(state, steps):
            return
        del state.losing[copy]


def lose_tier(state: GroupState, tier: Tier) -> Iterator[None]:
    """All blocks lose their copies in the tier, the newest first. A block that is nowhere else goes with all its
    descendants. The tier's slots are out of use."""
    state.lost.add(tier)
    state.slots[tier].shut()
    if tier is DISK:
        state.undeleted.clear()  # the disk is emptied before it is taken back
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
    """The disk is back, empty."""
    state.lost.discard(DISK)
    state.slots[DISK].reopen(state.corrupt[DISK])


def _lose_copy(state: GroupState, root: Block, tier: Tier, copy: Copy, cause: Cause) -> Iterator[None]:
    """With the residency goes all that needs it: on disk the copies of what stands on the block there."""
    while tier is DISK and root.disk_children:  # others may get there meanwhile
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
    others = block.residency & ~tier.bit
    if copy.valid and not others:
        yield from remove_all(state, block, cause, Cause.ANCESTOR)
    else:
        state.detach(block, tier)
        if copy.valid:
            state.recorder.change(UPDATED, cause, state.group, block, Transfer(tier))
        state.reconsider(block)
        yield
