"""Verbs of one window group that look blocks up, move, drop and retain them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final, Self

from kvtier import wire
from kvtier.abi.keys import KEY_BYTES
from kvtier.arena import Binder
from kvtier.chains import Prompt
from kvtier.deadline import Deadline, in_turn
from kvtier.errors import InvalidArgument, require_kind, require_within
from kvtier.reading import Reader
from kvtier.retention import (
    MAX_TOKEN,
    check_priority,
    conversation_tag,
    duration_ms,
    each_duration_ms,
    each_priority,
)
from kvtier.transport import Stubs
from kvtier.types import DEFAULT_PRIORITY, ROOT_PARENT, AnyTier, BlockResult, Cursor
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


class PrefixVerbs:
    """Lookups of a prefix that one or more window groups serve together.

    Args:
        groups: indices of the window groups.
    """

    def __init__(self, binder: Binder, reader: Reader, groups: Sequence[int], default_timeout: float) -> None:
        self.groups = tuple(groups)
        self.reader: Final = reader
        """Reads without a call, of all window groups: for the synchronous client, which does not wait for a loop."""
        self._binder: Final = binder
        self._default_timeout: Final = default_timeout

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._default_timeout if timeout is None else timeout)

    async def prefix_length(self, keys: wire.Keys, *, timeout: float | None = None) -> int:
        """Length of the stored prefix of a chain: :meth:`match` without the residencies. No side effect."""
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        length = self.reader.prefix_length(packed, self.groups) if packed else 0
        return length if length is not None else (await self._ask_match(packed, timeout)).blocks

    async def match(self, keys: wire.Keys, *, remote: bool = False, timeout: float | None = None) -> wire.Match:
        """The longest stored prefix of a chain that the groups can serve together. No side effect.

        The largest n so that every full-attention group holds blocks [0, n) and every group of a sliding window of w
        tokens its sinks and the blocks of tokens [max(0, n * tokens_per_block - w), n * tokens_per_block).

        Looked up in shared memory where the cache is mapped (see :attr:`lookups`). ``keys`` must be a chain then: each
        block was, or would be, committed under the block before. While the daemon does not answer, only blocks in
        mapped tiers count. ``remote``: asks the remote store, too, by a call.
        """
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        found = None if remote else self.reader.match(packed, self.groups)
        if found is None and not packed:  # a prompt shorter than a block, which the daemon is not asked for
            found = wire.Match(0, tuple(wire.GroupSpan(group, 0, b"") for group in self.groups), Cursor(0, 0))
        if found is not None:
            return found
        reply = await self._ask_match(packed, timeout, remote=remote)
        spans = (
            wire.GroupSpan(span.group, span.first_block, span.residency, span.sink_blocks) for span in reply.groups
        )
        return wire.Match(reply.blocks, tuple(spans), wire.same_fields(Cursor, reply.as_of_event), reply.remote_blocks)

    async def match_tokens(self, prompt: Prompt, *, timeout: float | None = None) -> wire.TokenMatch:
        """Number of stored tokens of a prompt: the :meth:`match` of its keys, and of the next block the longest start
        that it shares with a stored full or partial block. No side effect.

        The next block is searched, by a call, only in a cache with the option ``keep_tokens``, and only while the
        daemon answers: in full-attention groups, and in sliding windows beside them. Blocks with extra ids or items, or
        of another scope, do not count.
        """
        require_kind("prompt", prompt, Prompt)
        spec, keys = self._binder.spec, prompt.keys
        if prompt.partial_tokens and any(spec.groups[group].window_tokens > 1 for group in self.groups):
            keys = keys[:-KEY_BYTES]  # the window at the end of a partial block may begin a block earlier
        found = await self.match(keys, timeout=timeout)
        keys, tokens = keys[: found.blocks * KEY_BYTES], prompt.tokens(found.blocks)
        partial = tokens % spec.tokens_per_block
        kept = self._binder.binding.info.options.keep_tokens and self._binder.session.reachable
        following = prompt.following(found.blocks)
        if following and kept and not partial and spec.splits(self.groups):
            scope = prompt.scope
            request = blocks_pb2.MatchRequest(
                groups=self.groups,
                keys=keys[-KEY_BYTES:],
                tokens=following,
                lora_id=scope.lora_id,
                cache_salt=scope.salt,
            )
            reply = await self._call_match(request, timeout)
            partial, keys = reply.partial_tokens, keys + reply.partial_key
            tokens += partial
        whole = len(keys) - KEY_BYTES * (partial > 0)
        return wire.TokenMatch(tokens, keys[:whole], partial, keys[whole:])

    async def _ask_match(
        self, packed: bytes, timeout: float | None, *, remote: bool = False
    ) -> blocks_pb2.MatchResponse:
        request = wire.message(blocks_pb2.MatchRequest, groups=self.groups, keys=packed, remote=remote)
        reply = await self._call_match(request, timeout)
        self.reader.looked_up(packed, self.groups[0], reply.blocks)
        return reply

    async def _call_match(self, request: blocks_pb2.MatchRequest, timeout: float | None) -> blocks_pb2.MatchResponse:
        self.reader.count(calls=1)
        request.counted = True
        return await self._binder.call(lambda stubs: stubs.blocks.Match, request, self._deadline(timeout))


class GroupVerbs(PrefixVerbs):
    """The verbs of a :class:`kvtier.Cache` that need no leases and no arrays."""

    @property
    def group(self) -> int:
        """Index of the window group."""
        return self.groups[0]

    @property
    def lookups(self) -> str:
        """How lookups and gets find blocks now: ``shared memory``, or ``calls`` and why."""
        return self.reader.way

    @property
    def reads(self) -> wire.ReadCounts:
        """Counts of lookups and gets so far, with and without calls."""
        return self.reader.counts

    async def probe(self, keys: wire.Keys, *, timeout: float | None = None) -> bytes:
        """The residency of each key by itself, one byte per key, 0 = absent. Keys may repeat. No side effect."""
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        found = self.reader.probe(packed, self.group)
        if found is not None:
            return found
        each = wire.split_keys(packed)
        once = list(dict.fromkeys(each))
        reply = await self._ask_locate(b"".join(once), timeout)
        residency = dict(zip(once, reply.residency, strict=True))
        return bytes(residency[key] for key in each)

    async def locate(self, keys: wire.Keys, *, timeout: float | None = None) -> list[wire.Location]:
        """Tier, slot and generation of each key. No side effect."""
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        found = self.reader.locate(packed, self.group)
        if found is not None:
            return found
        reply = await self._ask_locate(packed, timeout)
        on_device = reply.device_slots, reply.device_generations
        return wire.locations(reply.residency, *on_device, reply.host_slots, reply.host_generations)

    def pages(self, *, page_blocks: int = 0, timeout: float | None = None) -> PageIterator:
        """All indexed blocks, parents before children, in pages of ``page_blocks`` (0: the daemon's choice)."""
        require_within("page_blocks", page_blocks, 0, wire.MAX_COUNT, "0 or more")

        async def ask(page: int) -> blocks_pb2.ListBlocksResponse:
            request = blocks_pb2.ListBlocksRequest(group=self.group, limit=page_blocks, page=page)
            return await self._binder.call(lambda stubs: stubs.blocks.List, request, self._deadline(timeout))

        return PageIterator(ask)

    def blocks(self, *, timeout: float | None = None) -> PagedBlocks:
        """All indexed blocks. Other clients may change the cache between the pages: see :meth:`pages`."""
        return PagedBlocks(self.pages(timeout=timeout))

    async def move(
        self, keys: wire.Keys, to: AnyTier, *, dry_run: bool = False, timeout: float | None = None
    ) -> list[BlockResult]:
        """Makes blocks READY in a tier without holding them: up is a prefetch, down frees the copies above.

        Blocks move in portions: when the caller gives up or the time is up, portions that have not begun are dropped. A
        disk copy needs the block's ancestors on disk; a block that lacks more than 1,024 of them there gets NO_ROOM.
        ``dry_run``: only returns the best possible results.
        """
        deadline = self._deadline(timeout)
        request = wire.message(
            blocks_pb2.MoveRequest,
            group=self.group,
            to=wire.tier_to_wire(to, "to"),
            keys=wire.packed_keys(keys),
            timeout_ns=deadline.wait_ns(),
            seq=self._binder.session.next_seq(),
            dry_run=dry_run,
        )
        return await self._results(lambda stubs: stubs.blocks.Move, request, deadline)

    async def drop(self, keys: wire.Keys, *, dry_run: bool = False, timeout: float | None = None) -> wire.DropReport:
        """Drops blocks and all their descendants, in every tier. ``dry_run``: only reports the effect."""
        packed, seq = wire.packed_keys(keys), self._binder.session.next_seq()
        request = wire.message(blocks_pb2.DropRequest, group=self.group, keys=packed, seq=seq, dry_run=dry_run)
        if not packed:
            return wire.DropReport([], 0)
        reply = await self._binder.call(lambda stubs: stubs.blocks.Drop, request, self._deadline(timeout))
        return wire.DropReport([BlockResult(result) for result in reply.results], reply.dropped, reply.kept_in_store)

    async def set_retention(
        self,
        keys: wire.Keys,
        priorities: int | Sequence[int],
        durations_s: float | Sequence[float | None] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Sets priorities and durations, for all or one per key. A duration runs from now, or for held blocks from
        their release.

        ``durations_s``: None = for ever. After that time a block's priority is the default of 35 again.
        """
        packed, seq = wire.packed_keys(keys), self._binder.session.next_seq()
        count = len(packed) // KEY_BYTES
        request = blocks_pb2.SetRetentionRequest(
            group=self.group,
            keys=packed,
            priorities=each_priority(count, priorities),
            durations_ms=each_duration_ms(count, durations_s),
            seq=seq,
        )
        return await self._results(lambda stubs: stubs.blocks.SetRetention, request, self._deadline(timeout))

    async def pin(self, keys: wire.Keys, tier: AnyTier, *, timeout: float | None = None) -> list[BlockResult]:
        """Keeps READY copies in a tier, even after the client has gone, until each pin is undone or the daemon ends.
        Results: NOT_READY if there is no READY copy, OVER_CAP if too much of the tier is pinned."""
        return await self._pin(keys, tier, False, timeout)

    async def unpin(self, keys: wire.Keys, tier: AnyTier, *, timeout: float | None = None) -> list[BlockResult]:
        """Undoes one pin of each block. Result NOT_PINNED for a block without a pin."""
        return await self._pin(keys, tier, True, timeout)

    async def hint(self, *hints: Hint, timeout: float | None = None) -> list[HintResult]:
        """Tells the daemon the future of blocks, in every window group. Returns a result per hint.

        A hint that cannot be carried out has an outcome, and changes nothing. Raises :class:`InvalidArgument`.
        """
        require_within("hints", len(hints), 1, MAX_HINTS, f"1 to {MAX_HINTS} hints")
        request = blocks_pb2.HintRequest(hints=[each.message() for each in hints], seq=self._binder.session.next_seq())
        reply = await self._binder.call(lambda stubs: stubs.blocks.Hint, request, self._deadline(timeout))
        return [wire.same_fields(HintResult, each) for each in reply.results]

    async def keep(
        self, keys: wire.Keys, tier: AnyTier, for_s: float = 600.0, *, timeout: float | None = None
    ) -> HintResult:
        """Brings blocks into a tier and keeps them there for a time, as far as the client's bounds allow."""
        packed = wire.packed_keys(keys)
        await self.move(packed, tier, timeout=timeout)
        (result,) = await self.hint(Hint("pin", keys=packed, tier=tier, for_s=for_s), timeout=timeout)
        return result

    async def reset(
        self, *, force: bool = False, dry_run: bool = False, repeats: int = 0, timeout: float | None = None
    ) -> wire.ResetReport:
        """Drops all blocks of the cache, in every window group.

        Raises :class:`kvtier.errors.StillHeld` while blocks are leased or pinned, unless forced: then the other blocks
        go. ``dry_run``: only counts the blocks that a forced reset would drop. ``repeats``: the generation of an
        earlier reset; drops only the blocks that this reset kept.
        """
        seq = self._binder.session.next_seq()
        request = wire.message(blocks_pb2.ResetRequest, force=force, dry_run=dry_run, seq=seq, repeats=repeats)
        reply = await self._binder.call(lambda stubs: stubs.blocks.Reset, request, self._deadline(timeout))
        return wire.ResetReport(reply.dropped, reply.kept, reply.kept_in_store, reply.generation)

    async def _pin(self, keys: wire.Keys, tier: AnyTier, unpin: bool, timeout: float | None) -> list[BlockResult]:
        packed, seq = wire.packed_keys(keys), self._binder.session.next_seq()
        request = blocks_pb2.PinRequest(
            group=self.group, tier=wire.tier_to_wire(tier), keys=packed, unpin=unpin, seq=seq
        )
        return await self._results(lambda stubs: stubs.blocks.Pin, request, self._deadline(timeout))

    async def _results(self, method: Callable[[Stubs], Any], request: Any, deadline: Deadline) -> list[BlockResult]:
        """A result per key. The daemon refuses a request without keys, which has none."""
        if not request.keys:
            return []
        return [BlockResult(result) for result in (await self._binder.call(method, request, deadline)).results]

    async def _ask_locate(self, packed: bytes, timeout: float | None) -> blocks_pb2.LocateResponse:
        if not packed:
            return blocks_pb2.LocateResponse()
        self.reader.count(calls=1)
        request = blocks_pb2.LocateRequest(group=self.group, keys=packed)
        return await self._binder.call(lambda stubs: stubs.blocks.Locate, request, self._deadline(timeout))
