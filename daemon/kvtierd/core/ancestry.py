"""What a block passes on to all that it stands on: its uses, and its effective priority.

Of one window group. A chain may have a million blocks, so what reaches the ancestors climbs deepest first, a slice a
call; what a call leaves is done by the next ones. Until its turn comes a block is ``due``: it may rank under its
children, and its priority may not be the highest of theirs. It cannot be dropped meanwhile, since it has children.
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
"""Children whose priorities are looked at one by one; those of larger families are counted."""


class Ancestry:
    """``reconsider`` is told of each block whose rank changes, ``used`` of each that is used."""

    __slots__ = (
        "_families",
        "_group",
        "_heap",
        "_left",
        "_numbers",
        "_reconsider",
        "_recorder",
        "_slice",
        "_used",
        "due",
    )

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
        """Whether it is to be used; why its priority is to be reckoned anew, None: it is not."""
        self._heap: list[tuple[int, int, Block]] = []
        self._numbers = count()
        self._families: dict[Block, Counter[int]] = {}
        """The priorities of its children, of a block that has had more than a few at once."""

    def use(self, blocks: Iterable[Block]) -> None:
        """All of these and all that they stand on are used: children before parents, else in this order."""
        for block in blocks:
            if block.indexed:
                self._owe(block, True, None)

    def give(self, block: Block, priority: int, cause: Cause) -> None:
        """A new priority of its own, which what it stands on is told of later."""
        block.retain(priority, block.traits.duration_ms, block.traits.deadline_ns)
        self._reckon(block, cause)

    def born(self, block: Block, cause: Cause) -> None:
        """It is a child of its parent now."""
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
        """It is no longer indexed, nor a child of its parent."""
        self.due.pop(block, None)
        self._families.pop(block, None)
        if block.parent is not None:
            self._child_leaves(block.parent, block.priority, cause)

    def climb(self) -> None:
        """Does what is due, within the slice of a call."""
        while self.due and self._left:
            block = heapq.heappop(self._heap)[2]
            owed = self.due.pop(block, None)
            if owed is None:
                continue  # it was removed, or has had its turn
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
        """The next slice begins."""
        self._left = self._slice

    def expected(self, block: Block) -> int:
        """The effective priority: the highest of its own and of its children's."""
        family = self._families.get(block)
        children = family if family is not None else [child.priority for child in block.children]
        return max(block.own_priority, max(children, default=0))

    def miscounted(self, block: Block) -> bool:
        """For the checker: its large family is counted wrongly, or not at all."""
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
        """The parent has one child less of this priority."""
        family = self._families.get(parent)
        if family is not None:
            family[priority] -= 1
            if not family[priority]:
                del family[priority]
        if priority == parent.priority > parent.own_priority:
            self._owe(parent, False, cause)
