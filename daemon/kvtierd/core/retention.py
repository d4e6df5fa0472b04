"""Retention: for how long a block keeps the priority that it was given.

The rules, which are TensorRT-LLM's wherever it has one:

- A block has a priority of its own (0 to 100, default 35) and a duration in milliseconds, 0 = for ever. Both are given
  at commit, by an acquire of the block, or by ``set_retention``; what is given last holds, the duration with the
  priority. An acquire that gives none leaves both as they are.
- The clock starts when the block is released, i.e. when the last hold on any of its copies ends (a pin is a hold), and
  then runs for the whole duration. An acquire that matches the block starts it anew, a hold stops it. A block that
  nobody holds when it is given a duration has its clock started there and then.
- At the deadline its own priority becomes 35, whether it was higher or lower, and its duration is forgotten. If that
  changes its effective priority, the block goes to the tail of the queue of its new one, as if it had just been used,
  with its prefix before it, and one ``updated`` event of cause ``expired`` says so; where a child holds it up, nothing
  visible has changed, nothing moves and nothing is said.
- A duration given with priority 35 says nothing, and is dropped.
- Durations and running clocks survive on disk; a record is brought up to date within about a second. In memory that
  another daemon takes over they survive too, and a record is brought up to date at once. A block whose clock stood then
  starts it when it is found at start.

Deadlines are kept to the caller's tick, not to the nanosecond.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count, repeat
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.ids import DISK
from kvtierd.core.policy import DEFAULT_PRIORITY

_NS_PER_MS: Final = 1_000_000


class Clocks:
    """The clocks of one window group's blocks.

    A heap whose stale entries are skipped when they surface: an entry counts only while it is its block's deadline.
    Within one deadline the deepest block comes first, so that a chain that expires at once does so tail first.
    Clocks that were started run from the end of the call, where :meth:`stamp` is told the time.
    """

    __slots__ = ("_changed", "_heap", "_numbers", "_restated", "_running", "_started")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Block]] = []
        self._numbers = count()
        """One an entry, so that no two of the heap are alike."""
        self._running = 0
        self._started: dict[Block, None] = {}
        self._restated: dict[Block, None] = {}
        """Blocks on disk whose record there is out of date."""
        self._changed: dict[Block, None] = {}
        """Blocks whose retention has changed in this call."""

    def give(self, block: Block, duration_ms: int) -> None:
        """A new duration for the block; its clock starts if nobody holds it. Its own priority is set already."""
        self.stop(block)
        own, _, deadline_ns, _ = block.traits
        block.retain(own, duration_ms if own != DEFAULT_PRIORITY else 0, deadline_ns)
        self.start(block)
        self._note(block)

    def start(self, *blocks: Block) -> None:
        """From now on, with the whole duration, for blocks that are not held and have one."""
        for block in blocks:
            _, duration_ms, _, _ = block.traits
            if duration_ms:
                self._started[block] = None

    def stop(self, block: Block) -> None:
        own, duration_ms, deadline_ns, _ = block.traits
        if deadline_ns:
            block.retain(own, duration_ms, 0)
            self._running -= 1

    def enter(self, block: Block) -> None:
        """A block is indexed, with the duration and deadline that it was made with."""
        own, duration_ms, deadline_ns, _ = block.traits
        if deadline_ns:
            block.retain(own, duration_ms, 0)
        if not duration_ms:
            return
        self.give(block, duration_ms)
        if block.traits.duration_ms and deadline_ns:
            del self._started[block]
            self._run(block, deadline_ns)
            del self._changed[block]  # its records say so, or are about to

    def stamp(self, now: int) -> None:
        """The end of a call: clocks that were started in it run from ``now``."""
        for block in self._started:
            duration_ms = block.traits.duration_ms
            if duration_ms and block.indexed and not block.held:
                self._run(block, now + duration_ms * _NS_PER_MS)
        self._started.clear()

    def take_due(self, now: int) -> Block | None:
        """The next block whose deadline has passed; its clock stands again and its duration is forgotten."""
        block = self._first(now)
        if block is not None:
            self.stop(block)
            block.retain(block.traits.priority, 0, 0)
            self._note(block)
        return block

    def take_changed(self) -> list[Block]:
        """At the end of a call, after :meth:`stamp`: blocks whose retention has changed in it."""
        if not self._changed:
            return []
        changed, self._changed = list(self._changed), {}
        return changed

    def take_restated(self) -> list[Block]:
        """Blocks whose retention has changed since the last call, or since they got on disk, whichever is later."""
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

    def _first(self, now: int) -> Block | None:
        while self._heap and self._heap[0][0] <= now:
            deadline, _, _, block = self._heap[0]
            if block.traits.deadline_ns == deadline:
                return block
            heapq.heappop(self._heap)
        return None


def pairs(priorities: Sequence[int], durations_ms: Sequence[int]) -> list[tuple[int, int]]:
    """(priority, duration) a block; no durations: for ever."""
    return list(zip(priorities, durations_ms or repeat(0), strict=False))
