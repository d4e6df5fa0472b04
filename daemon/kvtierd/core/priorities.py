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

    __slots__ = ("_group", "_reconsider", "_recorder")

    def __init__(self, group: GroupId, recorder: Recorder, reconsider: Callable[[Block], None]) -> None:
        self._group = group
        self._recorder = recorder
        self._reconsider = reconsider

    def give(self, block: Block, priority: int, cause: Cause) -> None:
        """A new priority of its own."""
        old = block.priority
        tops = [child.priority for child in block.children] if old == block.own_priority else [old] * block.top_children
        highest = max(tops, default=0)
        new = max(priority, highest)
        block.own_priority = priority
        block.top_children = tops.count(highest) if highest > priority else 0
        if new != old:
            self._change(block, new, cause)
            self.carry_up(block.parent, old, new, cause)

    def carry_up(self, parent: Block | None, old: int | None, new: int | None, cause: Cause) -> None:
        """A child's effective priority went from ``old`` to ``new`` (None: not a child)."""
        while parent is not None:
            effective = _effective(parent, old, new)
            if effective == parent.priority:
                return
            old, new = parent.priority, effective
            self._change(parent, effective, cause)
            parent = parent.parent

    def _change(self, block: Block, effective: int, cause: Cause) -> None:
        block.reprioritise(effective)
        self._recorder.change(UPDATED, cause, self._group, block)
        self._reconsider(block)


def _effective(parent: Block, old: int | None, new: int | None) -> int:
    """The parent's effective priority after a child's change."""
    if old is not None and old == parent.priority > parent.own_priority:
        parent.top_children -= 1
    if new is not None and new > parent.priority:
        parent.top_children = 1
        return new
    if new is not None and new == parent.priority > parent.own_priority:
        parent.top_children += 1
    if parent.top_children or parent.priority == parent.own_priority:
        return parent.priority
    priorities = [child.priority for child in parent.children]
    highest = max(priorities, default=0)
    if highest <= parent.own_priority:
        return parent.own_priority
    parent.top_children = priorities.count(highest)
    return highest
