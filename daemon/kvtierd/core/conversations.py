"""Conversations: how far each of them has got in one window group, and which blocks have ended with them.

A conversation is a client's tag. Requests with the tag say which chain the conversation has, and hints about its future
need only the tag. A hint on a conversation keeps its last block, whose priority its ancestors share: an earlier turn
needs no retention of its own once the conversation has gone on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.events import Cause
from kvtierd.core.ids import Key
from kvtierd.core.index import BlockIndex
from kvtierd.core.policy import DEFAULT_PRIORITY, MIN_PRIORITY

IDLE_NS: Final = 3_600 * 10**9
"""A conversation without a request is forgotten after once to twice this time."""
MOST: Final = 65_536
"""Largest number of conversations of a cache. Beyond it, the half with the oldest requests is forgotten."""
_NS_PER_MS: Final = 1_000_000
_LATE: Final = 3
_SOONEST: Final = 60


def expected(in_ms: int) -> tuple[int, int]:
    """Priority and duration in milliseconds of a block that is expected to be asked for in this time.

    A block is kept for three times as long. Its priority is 60 if it is expected at once; each doubling of the time
    takes 2 off, down to just above the default after an hour.
    """
    return max(DEFAULT_PRIORITY + 1, _SOONEST - int(2 * log2(1 + in_ms / 1000))), _LATE * in_ms


@dataclass(slots=True, frozen=True)
class Kept:
    """A retention that a hint gave a conversation. ``lasting``: it goes on to the conversation's later blocks."""

    priority: int
    until_ns: int
    lasting: bool


class Conversations:
    """The conversations of one window group. A forgotten conversation leaves its blocks as they are."""

    def __init__(self, index: BlockIndex, retain: Callable[[Block, int, int, Cause], None]) -> None:
        """``retain``: :meth:`GroupState.retain`."""
        self._index = index
        self._retain = retain
        self._tips: dict[bytes, Block] = {}
        """The last block of each conversation told of since ``_turned``."""
        self._older: dict[bytes, Block] = {}
        """The same, of conversations told of only before."""
        self._tags: dict[Block, tuple[bytes, ...]] = {}
        self._kept: dict[bytes, Kept] = {}
        self._turned = 0
        self._ended: set[Block] = set()

    def reach(self, tag: bytes, key: Key, now: int) -> None:
        """Notes that the conversation has got as far as this block. A block that the conversation has passed already
        changes nothing: requests for the first part of its chain are no return."""
        block, old = self._index.get(key), self.tip(tag)
        if block is None:
            return
        if old is None or not _is_above(block, old):
            self._pass_on(tag, old, block, now)
        else:
            block = old
        self._place(tag, block)
        if now > self._turned + IDLE_NS or len(self._tips) > MOST // 2:
            for each in list(self._older):
                self.forget(each)
            self._older, self._tips, self._turned = self._tips, {}, now

    @property
    def astray(self) -> bool:
        """For the checker: whether a conversation is at a block that is not indexed, or not known to be there."""
        tips = {**self._older, **self._tips}
        known = {(tag, block) for block, tags in self._tags.items() for tag in tags}
        return known != set(tips.items()) or not all(block.indexed for block in (*tips.values(), *self._ended))

    def tip(self, tag: bytes) -> Block | None:
        return self._tips.get(tag) or self._older.get(tag)

    def chain(self, tag: bytes, first: int, end: int | None) -> list[Key]:
        """Keys of the conversation's blocks from number ``first`` to ``end``, parents first."""
        tip = self.tip(tag)
        blocks = [] if tip is None else [*reversed([*tip.ancestors()]), tip]
        return [block.key for block in blocks[first:end]]

    def keep(self, tag: bytes, kept: Kept, now: int) -> None:
        """Retains the conversation's last block."""
        tip = self.tip(tag)
        if tip is not None:
            self._kept[tag] = kept
            self._extend(tip, kept, now)

    def shorten(self, tag: bytes, key: Key) -> None:
        """Takes the conversation back to the block before this one, if there is one."""
        block = self._index.get(key)
        if block is None or block.parent is None:
            self.forget(tag)
        else:
            self._kept.pop(tag, None)
            self._place(tag, block.parent)

    def forget(self, tag: bytes) -> None:
        block = self._tips.pop(tag, None) or self._older.pop(tag, None)
        self._kept.pop(tag, None)
        if block is not None:
            left = tuple(other for other in self._tags.pop(block) if other != tag)
            if left:
                self._tags[block] = left

    def end(self, keys: Sequence[Key]) -> list[Key]:
        """Lets blocks go first, with the lowest priority, unless a conversation is there or a later block stays.

        Args:
            keys: the deepest block first.
        Returns: Keys of the blocks that are to go.
        """
        ended = []
        for block in filter(None, map(self._index.get, keys)):
            if block not in self._tags and not any(child.priority > MIN_PRIORITY for child in block.children):
                self._retain(block, MIN_PRIORITY, 0, Cause.HINT)
                self._ended.add(block)
                ended.append(block.key)
        return ended

    def found(self, blocks: Iterable[Block]) -> None:
        """Gives ended blocks that a request found the default priority again."""
        if self._ended:
            for block in self._ended.intersection(blocks):
                self._ended.remove(block)
                self._retain(block, DEFAULT_PRIORITY, 0, Cause.DEMAND)

    def leave(self, block: Block) -> None:
        """Takes the conversations of a block that is about to go back to its parent."""
        self._ended.discard(block)
        for tag in self._tags.get(block, ()):
            if block.parent is None:
                self.forget(tag)
            else:
                self._place(tag, block.parent)

    def _place(self, tag: bytes, block: Block) -> None:
        kept = self._kept.pop(tag, None)
        self.forget(tag)
        self._tips[tag] = block
        self._tags[block] = (*self._tags.get(block, ()), tag)
        if kept is not None:
            self._kept[tag] = kept

    def _pass_on(self, tag: bytes, old: Block | None, new: Block, now: int) -> None:
        """Moves the conversation's retention to its new last block."""
        kept = self._kept.pop(tag, None)
        if kept is None or old is None:
            return
        self._retain(old, DEFAULT_PRIORITY, 0, Cause.HINT)
        if kept.lasting and kept.until_ns > now:
            self._kept[tag] = kept
            self._extend(new, kept, now)

    def _extend(self, block: Block, kept: Kept, now: int) -> None:
        self._retain(block, kept.priority, max(1, (kept.until_ns - now) // _NS_PER_MS), Cause.HINT)


def _is_above(block: Block, other: Block) -> bool:
    """Whether ``block`` is ``other`` or one of its ancestors."""
    while other.depth > block.depth and other.parent is not None:
        other = other.parent
    return other is block
