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

from kvtier.abi.words import ENDED_MS
from kvtierd.core.block import Block
from kvtierd.core.events import Cause
from kvtierd.core.ids import NOBODY, Key, SessionId
from kvtierd.core.index import BlockIndex
from kvtierd.core.policy import DEFAULT_PRIORITY, MIN_PRIORITY

IDLE_NS: Final = 3_600 * 10**9
"""A conversation without a request is forgotten after once to twice this time."""
MOST: Final = 65_536
"""Largest number of conversations of a cache. Beyond it, the session with the most forgets its oldest."""
MOST_A_SESSION: Final = 8_192
"""Largest number of conversations of a session. Beyond it, the session's oldest is forgotten."""
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
        self._tips: dict[SessionId, dict[bytes, Block]] = {NOBODY: {}}
        """The last block of each conversation, by the session that told of it last: ``NOBODY`` for an ended session.
        A session's oldest conversation comes first."""
        self._tags: dict[Block, bytes | set[bytes]] = {}
        """The conversation that a block is the last of, or several."""
        self._kept: dict[bytes, Kept] = {}
        self._turned = 0
        self._unswept: list[SessionId] = []
        """Sessions whose idle conversations are to be forgotten. Each request forgets them for one session."""
        self.some_ended = False
        """Whether there may be an ended block. Ended blocks have the duration ``ENDED_MS``, also after a restart."""

    def reach(self, session: SessionId, tag: bytes, key: Key, now: int) -> None:
        """Notes that the conversation, from now on the session's, has got as far as this block. A block that the
        conversation has passed already is no return: it changes nothing else."""
        if now > self._turned + IDLE_NS:
            self._turned, self._unswept = now, [*self._tips]
        if self._unswept:
            self._forget_idle(self._unswept.pop(), now - IDLE_NS)
        block, others = self._index.get(key), self._of(tag, session)
        if block is None:
            return
        own, old = self._tips.setdefault(session, {}), others.pop(tag, None)
        if old is not None:
            self._untag(tag, old)
        if old is None or not _is_above(block, old):
            self._pass_on(tag, old, block, now)
        else:
            block = old
        own[tag] = block
        self._tag(tag, block)
        if own is not others and (len(own) > MOST_A_SESSION or sum(map(len, self._tips.values())) > MOST):
            crowded = max(self._tips.values(), key=len)
            self._take_back(next(iter(crowded)), None)

    def disown(self, session: SessionId) -> None:
        """Gives the conversations of an ended session to ``NOBODY``, until another session tells of them."""
        nobodys = self._tips[NOBODY]
        nobodys.update(self._tips.pop(session, {}))
        for tag in [*nobodys][:-MOST_A_SESSION]:
            self._take_back(tag, None)

    @property
    def astray(self) -> bool:
        """For the checker: whether a conversation is at a block that is not indexed, or not known to be there."""
        tips = sorted((tag, tip.key) for tips in self._tips.values() for tag, tip in tips.items())
        known = sorted((tag, block.key) for block in self._tags for tag in self._at(block))
        return known != tips or not all(block.indexed for block in self._tags)

    def tip(self, tag: bytes) -> Block | None:
        return self._of(tag).get(tag)

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
        self._kept.pop(tag, None)
        self._take_back(tag, None if block is None else block.parent)

    def end(self, keys: Sequence[Key]) -> list[Key]:
        """Lets blocks go first, with the lowest priority, unless a conversation is there or a later block stays.

        Args:
            keys: the deepest block first.
        Returns: Keys of the blocks that are to go.
        """
        ended = []
        for block in filter(None, map(self._index.get, keys)):
            if block not in self._tags and not any(child.priority > MIN_PRIORITY for child in block.children):
                self._retain(block, MIN_PRIORITY, ENDED_MS, Cause.HINT)
                self.some_ended = True
                ended.append(block.key)
        return ended

    def found(self, blocks: Iterable[Block]) -> None:
        """Gives ended blocks that a request found the default priority again."""
        if self.some_ended:
            for block in [block for block in blocks if block.traits.duration_ms == ENDED_MS]:
                self._retain(block, DEFAULT_PRIORITY, 0, Cause.DEMAND)

    def leave(self, block: Block) -> None:
        """Takes the conversations of a block that is about to go back to its parent."""
        for tag in self._at(block):
            self._take_back(tag, block.parent)

    def _of(self, tag: bytes, session: SessionId = NOBODY) -> dict[bytes, Block]:
        """The conversations of the session that has this one; none if no session has. ``session``: has it probably."""
        likely = self._tips.get(session, {})
        return likely if tag in likely else next((tips for tips in self._tips.values() if tag in tips), {})

    def _at(self, block: Block) -> tuple[bytes, ...]:
        tags = self._tags.get(block, ())
        return (tags,) if isinstance(tags, bytes) else tuple(tags)

    def _tag(self, tag: bytes, block: Block) -> None:
        tags = self._tags.setdefault(block, tag)
        if isinstance(tags, set):
            tags.add(tag)
        elif tags is not tag:
            self._tags[block] = {tags, tag}

    def _untag(self, tag: bytes, block: Block) -> None:
        tags = self._tags.pop(block)
        if isinstance(tags, set):
            tags.remove(tag)
            self._tags[block] = tags if len(tags) > 1 else tags.pop()

    def _take_back(self, tag: bytes, block: Block | None, session: SessionId = NOBODY) -> None:
        """Takes the conversation back to a block; None: forgets it."""
        tips = self._of(tag, session)
        if tag in tips:
            self._untag(tag, tips[tag])
            if block is None:
                del tips[tag]
                self._kept.pop(tag, None)
            else:
                tips[tag] = block
                self._tag(tag, block)

    def _forget_idle(self, session: SessionId, since: int) -> None:
        for tag, tip in [*self._tips.get(session, {}).items()]:
            if tip.use is None or tip.use.at < since:
                self._take_back(tag, None, session)

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
