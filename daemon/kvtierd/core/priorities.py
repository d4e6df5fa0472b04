"""Effective priorities: of every block the highest of its own and its children's; no parent ranks under a child.

The only module that changes a priority. Most changes end where they begin: a parent counts the children that give it
its priority, and its children are looked through only where the last of those has gone.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtierd.core.block import Block
from kvtierd.core.events import UPDATED, Cause
from kvtierd.core.ids import GroupId
from kvtierd.core.recorder import Recorder


class Priorities:
    """Of one window group. ``reconsider`` is told of each block whose effective priority changes."""

    __slots__ = ("_group", "_reconsider", "_recorder", "_tops")

    def __init__(self, group: GroupId, recorder: Recorder, reconsider: Callable[[Block], None]) -> None:
        self._group = group
        self._recorder = recorder
        self._reconsider = reconsider
        self._tops: dict[Block, int] = {}
        """Few: mostly a block has its own priority."""

    def top_children(self, block: Block) -> int:
        """How many children have just the block's effective priority, where its own is lower."""
        return self._tops.get(block, 0)

    def forget(self, block: Block) -> None:
        """It is no longer indexed."""
        if self._tops:
            self._tops.pop(block, None)

    def give(self, block: Block, priority: int, cause: Cause) -> None:
        """A new priority of its own."""
        old = block.priority
        tops = (
            [child.priority for child in block.children]
            if old == block.own_priority
            else [old] * self.top_children(block)
        )
        highest = max(tops, default=0)
        new = max(priority, highest)
        block.retain(priority, block.traits.duration_ms, block.traits.deadline_ns)
        self._count(block, tops.count(highest) if highest > priority else 0)
        if new != old:
            self._change(block, new, cause)
            self.carry_up(block.parent, old, new, cause)

    def carry_up(self, parent: Block | None, old: int | None, new: int | None, cause: Cause) -> None:
        """A child's effective priority went from ``old`` to ``new`` (None: not a child)."""
        while parent is not None:
            own = parent.own_priority
            if parent.priority == own and (new is None or new <= own):
                return  # as mostly: what it has is its own
            effective = self._effective(parent, old, new)
            if effective == parent.priority:
                return
            old, new = parent.priority, effective
            self._change(parent, effective, cause)
            parent = parent.parent

    def _change(self, block: Block, effective: int, cause: Cause) -> None:
        block.reprioritise(effective)
        self._recorder.change(UPDATED, cause, self._group, block)
        self._reconsider(block)

    def _effective(self, parent: Block, old: int | None, new: int | None) -> int:
        """The parent's effective priority after a child's change."""
        own, tops = parent.own_priority, self.top_children(parent)
        if old is not None and old == parent.priority > own:
            tops -= 1
        if new is not None and new > parent.priority:
            self._count(parent, 1)
            return new
        if new is not None and new == parent.priority > own:
            tops += 1
        if not tops and parent.priority != own:
            priorities = [child.priority for child in parent.children]
            highest = max(priorities, default=0)
            self._count(parent, priorities.count(highest) if highest > own else 0)
            return max(highest, own)
        self._count(parent, tops)
        return parent.priority

    def _count(self, block: Block, tops: int) -> None:
        if tops:
            self._tops[block] = tops
        else:
            self._tops.pop(block, None)
