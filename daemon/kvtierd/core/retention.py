"""Retention: how long a block keeps the priority that it was given.

The rules follow TensorRT-LLM where it has one:

- A block has a priority of its own (0 to 100, default 35) and a duration in milliseconds, 0 = for ever. A commit, an
  acquire of the block or ``set_retention`` sets both; the latest values hold. An acquire without values keeps both.
- The clock starts when the last hold on any of the block's copies ends (a pin is a hold), and runs for the whole
  duration. An acquire that matches the block restarts the clock; a hold stops it. If a block is given a duration while
  it is not held, its clock starts at once.
- At the deadline the block's own priority becomes 35, whether it was higher or lower, and the duration is forgotten. If
  that changes the effective priority, the block goes to the tail of its new priority's queue, as after a use, with its
  prefix before it, and one ``updated`` event of cause ``expired`` is sent. If a child keeps the effective priority up,
  the block does not move and no event is sent.
- A duration with priority 35 has no effect and is dropped.
- Durations and running clocks survive on disk; a record is updated within about a second. In memory that another daemon
  takes over they survive too, and a record is updated at once. A block whose clock was stopped then starts it when it
  is found at start.

A call that may evict first ends the retentions whose deadline has passed, so none of them protects a block. If no call
comes, the caller's tick ends them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import Final

from kvtier.abi.words import ENDED_MS
from kvtierd.core.block import Block
from kvtierd.core.ids import DISK
from kvtierd.core.policy import DEFAULT_PRIORITY

_NS_PER_MS: Final = 1_000_000


class Clocks:
    """The clocks of one window group's blocks.

    A heap whose stale entries are skipped when they surface: an entry counts only while it is its block's deadline.
    Within one deadline the deepest block comes first, so a chain that expires at once does so tail first. A started
    clock runs from the end of the call: :meth:`stamp` gets the time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Block]] = []
        self._numbers = count()
        """Numbers of the entries, so that no two entries compare equal."""
        self._running = 0
        self._started: dict[Block, None] = {}
        self._restated: dict[Block, None] = {}
        """Blocks whose disk record is out of date."""
        self._changed: dict[Block, None] = {}
        """Blocks whose retention has changed in this call."""

    def give(self, block: Block, duration_ms: int) -> None:
        """Sets a new duration; the clock starts if the block is not held. The caller has set the own priority."""
        self.stop(block)
        own, _, deadline_ns, _ = block.traits
        block.retain(own, duration_ms if own != DEFAULT_PRIORITY else 0, deadline_ns)
        self.start(block)
        self._note(block)

    def start(self, *blocks: Block) -> None:
        """Starts the clocks of these blocks for their whole duration, if they have one and are not held at the end of
        the call."""
        for block in blocks:
            _, duration_ms, _, _ = block.traits
            if duration_ms and duration_ms != ENDED_MS:
                self._started[block] = None

    def stop(self, block: Block) -> None:
        own, duration_ms, deadline_ns, _ = block.traits
        if deadline_ns:
            block.retain(own, duration_ms, 0)
            self._running -= 1

    def enter(self, block: Block) -> None:
        """Adds a newly indexed block with its given duration and deadline."""
        own, duration_ms, deadline_ns, _ = block.traits
        if deadline_ns:
            block.retain(own, duration_ms, 0)
        if duration_ms in (0, ENDED_MS):
            return
        self.give(block, duration_ms)
        if block.traits.duration_ms and deadline_ns:
            del self._started[block]
            self._run(block, deadline_ns)
            del self._changed[block]  # the block's records have this deadline, or are about to

    def stamp(self, now: int) -> None:
        """Ends a call: clocks started in the call run from ``now``."""
        for block in self._started:
            duration_ms = block.traits.duration_ms
            if duration_ms and block.indexed and not block.held:
                self._run(block, now + duration_ms * _NS_PER_MS)
        self._started.clear()

    def due(self, now: int) -> Iterator[Block]:
        """Takes each block whose deadline has passed. Its clock stops and its duration is forgotten."""
        while self._heap and self._heap[0][0] <= now:
            deadline, _, _, block = heapq.heappop(self._heap)
            if block.traits.deadline_ns == deadline:
                self.stop(block)
                block.retain(block.traits.priority, 0, 0)
                self._note(block)
                yield block

    def take_changed(self) -> list[Block]:
        """Takes the blocks whose retention has changed in this call. Call this after :meth:`stamp`."""
        changed, self._changed = list(self._changed), {}
        return changed

    def take_restated(self) -> list[Block]:
        """Takes the disk blocks whose retention has changed since the last call, or since they arrived on disk,
        whichever is later."""
        taken: list[Block] = []
        coming: dict[Block, None] = {}
        for block in self._restated:
            copy = block.copies[DISK]
            if copy is not None and copy.valid:
                taken.append(block)
            elif copy is not None:
                coming[block] = None
        self._restated = coming
        return taken

    def _note(self, block: Block) -> None:
        self._changed[block] = None
        if block.copies[DISK] is not None:
            self._restated[block] = None

    def running(self) -> set[Block]:
        """For the checker: blocks with a live entry."""
        return {block for deadline, _, _, block in self._heap if block.traits.deadline_ns == deadline}

    def _run(self, block: Block, deadline_ns: int) -> None:
        self.stop(block)
        block.retain(block.traits.priority, block.traits.duration_ms, deadline_ns)
        self._running += 1
        self._note(block)
        heapq.heappush(self._heap, (deadline_ns, -block.depth, next(self._numbers), block))
        if len(self._heap) > 4 * self._running + 64:
            self._heap = [entry for entry in self._heap if entry[3].traits.deadline_ns == entry[0]]
            heapq.heapify(self._heap)


def pairs(priorities: Sequence[int], durations_ms: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of priority and duration, one a block. Without durations, all are 0 (for ever)."""
    return list(zip(priorities, durations_ms or repeat(0), strict=False))
