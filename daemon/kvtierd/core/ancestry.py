"""Propagates uses and effective priorities from blocks to their ancestors, in one window group.

A chain may have a million blocks, so propagation runs deepest block first, a slice a call; later calls go on. Until
propagation reaches a block, the block is ``due``: it may rank under its children, and its priority may differ from the
highest of its own and theirs. A block with children cannot be dropped, so a wrong rank does no harm.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.events import UPDATED, Cause
from kvtierd.core.ids import GroupId
from kvtierd.core.outcome import Recorder

SCANNED: Final = 32
"""Number of children up to which their priorities are read one by one; larger families are counted by priority."""


class Ancestry:
    """Propagation of uses and priorities. ``reconsider``: called with each block whose rank changes. ``used``: called
    with each block that is used."""

    def __init__(
        self,
        group: GroupId,
        recorder: Recorder,
        slice: int,
        reconsider: Callable[[Block], None],
        used: Callable[[Block], None],
    ) -> None:
        self._group = group
        self._recorder = recorder
        self._slice = slice
        self._left = slice
        self._reconsider = reconsider
        self._used = used
        self.due: dict[Block, tuple[bool, Cause | None]] = {}
        """Blocks with work left: whether to count a use, and the cause of a change of priority (None: no change)."""
        self._heap: list[tuple[int, int, Block]] = []
        self._numbers = count()
        self._families: dict[Block, Counter[int]] = {}
        """Priorities of the children, for blocks that have had more than ``SCANNED`` children at once."""

    def use(self, blocks: Iterable[Block]) -> None:
        """Uses these blocks and all their ancestors, children before parents, otherwise in this order."""
        for block in blocks:
            if block.indexed:
                self._owe(block, True, None)

    def give(self, block: Block, priority: int, cause: Cause) -> None:
        """Sets the block's own priority; :meth:`climb` passes it on to the ancestors."""
        block.retain(priority, block.traits.duration_ms, block.traits.deadline_ns)
        self._reckon(block, cause)

    def born(self, block: Block, cause: Cause) -> None:
        """Counts a new child of the block's parent."""
        parent = block.parent
        if parent is None:
            return
        family = self._families.get(parent)
        if family is not None:
            family[block.priority] += 1
        elif block.next_sibling is not None and sum(1 for _ in islice(parent.children, SCANNED + 1)) > SCANNED:
            self._families[parent] = Counter(child.priority for child in parent.children)
        if block.priority > parent.priority:
            self._owe(parent, False, cause)

    def died(self, block: Block, cause: Cause) -> None:
        """Forgets a block that is no longer indexed and no longer its parent's child."""
        self.due.pop(block, None)
        self._families.pop(block, None)
        if block.parent is not None:
            self._child_leaves(block.parent, block.priority, cause)

    def climb(self) -> None:
        """Propagates due uses and priorities, within the slice of the call."""
        while self.due and self._left:
            block = heapq.heappop(self._heap)[2]
            owed = self.due.pop(block, None)
            if owed is None:
                continue  # removed, or handled already
            self._left -= 1
            uses, cause = owed
            if uses:
                self._used(block)
                if block.parent is not None:
                    self._owe(block.parent, True, None)
            if cause is not None:
                self._reckon(block, cause)
        if not self.due:
            self._heap.clear()

    def end_call(self) -> None:
        """Starts the slice of the next call."""
        self._left = self._slice

    def expected(self, block: Block) -> int:
        """The effective priority: the highest of the block's own and its children's."""
        family = self._families.get(block)
        children = family if family is not None else [child.priority for child in block.children]
        return max(block.own_priority, max(children, default=0))

    def miscounted(self, block: Block) -> bool:
        """For the checker: whether the children's priorities are miscounted, or a large family is not counted."""
        children = Counter(child.priority for child in block.children)
        return self._families.get(block, children if children.total() <= SCANNED else None) != children

    def _owe(self, block: Block, use: bool, cause: Cause | None) -> None:
        owed = self.due.get(block)
        if owed is None:
            heapq.heappush(self._heap, (-block.depth, next(self._numbers), block))
            self.due[block] = (use, cause)
        else:
            self.due[block] = (use or owed[0], cause or owed[1])

    def _reckon(self, block: Block, cause: Cause) -> None:
        old, new = block.priority, self.expected(block)
        if new == old:
            return
        block.reprioritise(new)
        self._recorder.change(UPDATED, cause, self._group, block)
        self._reconsider(block)
        parent = block.parent
        if parent is None:
            return
        if parent in self._families:
            self._families[parent][new] += 1
        if new > parent.priority:
            self._owe(parent, False, cause)
        self._child_leaves(parent, old, cause)

    def _child_leaves(self, parent: Block, priority: int, cause: Cause) -> None:
        """Counts one child of this priority less."""
        family = self._families.get(parent)
        if family is not None:
            family[priority] -= 1
            if not family[priority]:
                del family[priority]
        if priority == parent.priority > parent.own_priority:
            self._owe(parent, False, cause)
