"""Hints, which a cache takes, and listings of its blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final, Self

from kvtier import wire
from kvtier.errors import InvalidArgument, require_kind, require_within
from kvtier.retention import MAX_TOKEN, check_priority, conversation_tag, duration_ms
from kvtier.types import DEFAULT_PRIORITY, ROOT_PARENT, AnyTier, Cursor
from kvtier.v1 import blocks_pb2, common_pb2

MAX_HINTS: Final = 256


class HintOutcome(IntEnum):
    """``DEFERRED``: begun, and events tell of its effects. ``MISSING``: no block of the target is stored."""

    ACCEPTED = 1
    CLIPPED = 2
    DEFERRED = 3
    REJECTED = 4
    MISSING = 5


@dataclass(slots=True, frozen=True)
class HintResult:
    """``reason``: of every outcome but ``ACCEPTED``. ``blocks``: number of blocks that the hint was carried out for."""

    outcome: HintOutcome
    reason: str
    blocks: int


@dataclass(slots=True, frozen=True)
class Hint:
    """A fact about the future of blocks: of ``keys``, or of a conversation (see :class:`kvtier.Retention`).

    ``action``: ``reached``: nothing but how far the conversation has got, ``retain`` at ``priority``, ``pin`` in
    ``tier``, ``prefetch`` into it, ``demote`` to it, ``end``: they will not be asked for again, ``return``: they will
    be, in ``for_s`` seconds. ``tokens``: a conversation's blocks within this half-open range. ``for_s``: at most an
    hour; None: an hour. With ``keys`` and ``conversation``, the conversation has got as far as the last key.
    """

    action: str
    conversation: bytes | str = b""
    keys: wire.Keys = b""
    tokens: tuple[int, int | None] = (0, None)
    tier: AnyTier | None = None
    priority: int = DEFAULT_PRIORITY
    for_s: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Makes a hint of JSON values. Raises :class:`InvalidArgument`."""
        require_kind("hint", given, Mapping)
        if unknown := sorted(set(given) - {each.name for each in fields(cls)}):
            raise InvalidArgument(f"hint.{unknown[0]}", given[unknown[0]], "left out: a hint has no such field")
        tokens = given.get("tokens", (0, None))
        return cls(**{"action": "", **given, "tokens": tuple(tokens) if isinstance(tokens, list) else tokens})

    def message(self) -> blocks_pb2.Hint:
        """The hint on the wire. Raises :class:`InvalidArgument`."""
        require_kind("hint.action", self.action, str)
        require_kind("hint.tokens", self.tokens, tuple)
        if len(self.tokens) != 2:
            raise InvalidArgument("hint.tokens", self.tokens, "a half-open range: its start, and its end or None")
        first, end = self.tokens
        if end is not None:
            require_within("hint.tokens[1]", end, first + 1, MAX_TOKEN, "more than the start of the range")
        return blocks_pb2.Hint(
            action=self.action,
            version=1,
            keys=wire.packed_keys(self.keys),
            conversation=conversation_tag(self.conversation),
            first_token=require_within("hint.tokens[0]", first, 0, MAX_TOKEN),
            end_token=end or 0,
            tier=common_pb2.TIER_UNSPECIFIED if self.tier is None else wire.tier_to_wire(self.tier),
            priority=check_priority("hint.priority", self.priority),
            for_ms=duration_ms("hint.for_s", self.for_s),
        )


class PageIterator:
    """``async for page in cache.pages()``. A step that was cancelled or failed is repeated by the next step."""

    def __init__(self, ask: Callable[[int], Awaitable[blocks_pb2.ListBlocksResponse]]) -> None:
        self._ask = ask
        self._next: int | None = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.Page:
        if self._next is None:
            raise StopAsyncIteration
        reply = await self._ask(self._next)
        self._next = reply.next_page or None
        rows = zip(
            wire.split_keys(reply.keys),
            wire.split_keys(reply.parents),
            reply.residency,
            reply.priorities,
            reply.pinned or bytes(len(reply.residency)),
            strict=True,
        )
        blocks = (
            wire.ListedBlock(key, None if up == ROOT_PARENT else up, where, rank, pinned)
            for key, up, where, rank, pinned in rows
        )
        return wire.Page(tuple(blocks), wire.same_fields(Cursor, reply.as_of_event))


class PagedBlocks:
    """``async for block in cache.blocks()``: the blocks of :class:`Pages`, which a cancelled step keeps in place."""

    def __init__(self, pages: PageIterator) -> None:
        self._pages = pages
        self._page: Iterator[wire.ListedBlock] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.ListedBlock:
        while (block := next(self._page, None)) is None:
            self._page = iter((await anext(self._pages)).blocks)
        return block
