"""Copies chains of blocks as arrays into and out of a cache, piece by piece, through mapped memory or streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from grpc.aio import InternalError, StreamUnaryCall

from kvtier import buffers
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.stream import CHECKSUM_BYTES, GO_AHEAD_KEY, Progress, StreamError
from kvtier.arena import Binder, Binding
from kvtier.buffers import Blocks, GroupRows, PrefixRows, Rows, of_cpu
from kvtier.chains import ChainPart
from kvtier.deadline import PASSED, Backoff, Deadline
from kvtier.errors import (
    DaemonError,
    DamagedTransfer,
    InvalidArgument,
    LeaseLost,
    StaleRead,
    TierFull,
    TooShort,
    chain_error,
)
from kvtier.lease import LeaseBook, Owner, ReadLease
from kvtier.memory.arrays import Bytes
from kvtier.memory.planes import Pages
from kvtier.reading import Reader, digests_of
from kvtier.transport import Link
from kvtier.types import BlockResult, Tier
from kvtier.v1 import blocks_pb2, transfer_pb2
from kvtier.wire import granted, tier_to_wire

MAX_PART: Final = 1_024
"""Most blocks that one call brings into the daemon's core."""

_LOSSES: Final = 3
"""Lost leases, as in a restart or a resize, after which a piece is stored once more."""

Way: TypeAlias = "MappedCopies | StreamedCopies"
"""The way that the bytes of a piece take."""


class MappedCopies:
    """Copies through mapped memory: reserve, copy, commit and release; acquire, copy, check, release."""

    def __init__(self, book: LeaseBook) -> None:
        self._book: Final = book

    def max_blocks(self, cache: Owner) -> int:
        """Most blocks of a piece."""
        return MAX_PART

    async def store(self, cache: Owner, tier: Tier, part: ChainPart, timeout: float | None) -> list[BlockResult]:
        """Stores a piece. Raises :class:`LeaseLost` if the daemon restarts meanwhile."""
        lease = await self._book.reserve(cache, tier, len(part.chain), timeout, part.parents[0])
        try:
            memory = lease.arena.memory(tier)
            copy = partial(memory.write, cache.group, lease.slots, part.blocks)
            await buffers.run_copy(copy, len(lease) * cache.block_bytes, waits=memory.waits(part.blocks))
            return await self._book.store(lease, part, timeout)
        finally:
            await self._book.release([lease], PASSED, timeout)

    async def get(
        self, caches: Sequence[Owner], tier: Tier, keys: bytes, targets: GroupRows, timeout: float | None
    ) -> dict[int, PrefixRows]:
        """Copies out a stored prefix of packed keys, by group. Raises :class:`TooShort` if no block is stored."""
        (leases,) = await self._book.acquire(caches, [keys], tier, 1, None, timeout, for_read=True)
        if leases[0].error is not None:
            raise leases[0].error
        try:
            return {lease.cache.group: await _copied_out(lease, targets.get(lease.cache.group)) for lease in leases}
        finally:
            await self._book.release(leases, PASSED, timeout)


async def _copied_out(lease: ReadLease, targets: Rows | None) -> PrefixRows:
    """Copies the blocks of a lease into their targets. Raises :class:`StaleRead` if a slot changed during the copy."""
    cache, memory = lease.cache, lease.arena.memory(lease.tier)
    into = None if targets is None else buffers.for_needed(targets, lease.needed)
    rows: Rows = np.empty((lease.blocks, cache.block_bytes), np.uint8) if into is None else into
    before = lease.unchanged()
    nbytes = lease.blocks * cache.block_bytes
    await buffers.run_copy(lambda: memory.read(cache.group, lease.slots, rows), nbytes, waits=memory.waits(rows))
    if not (before and lease.unchanged()):
        raise StaleRead("a slot changed under its lease", reason="STALE_READ")
    return [*lease.needed.spread([*rows])]


def pieces(cache: Owner, tier: Tier, way: Way) -> int:
    """Blocks per piece: at most half of a tier's slots, so that two clients fit side by side."""
    return max(1, min(cache.slots(tier) // 2, way.max_blocks(cache)))


async def put(
    cache: Owner, reader: Reader, way: Way, tier: Tier, whole: ChainPart, timeout: float | None
) -> list[BlockResult]:
    def absent() -> Sequence[int] | None:
        return reader.absent(b"".join(whole.chain), cache.group)

    step, count = pieces(cache, tier, way), len(whole.chain)
    results, again = [BlockResult.EXISTS] * count, True
    places = absent()
    if whole.kept.conversation and places is not None and count - 1 not in places:
        places = [*places, count - 1]  # only a commit tells the daemon how far the conversation has got
    left = deque(range(count) if places is None else places)
    while left:
        places = [left.popleft() for _ in range(min(step, len(left)))]
        try:
            stored = await _stored(cache, way, tier, whole.only(places), timeout)
        except InvalidArgument:
            if (step := pieces(cache, tier, way)) >= len(places):
                raise
            left.extendleft(reversed(places))  # the tier has become smaller meanwhile
            continue
        except TierFull as full:
            step = len(places) // 2
            if full.reason != "TIER_FULL" or (not step and places[0] < cache.slots(tier)):
                raise  # there is room for this block once others release
            left.extendleft(reversed(places))
            if step:
                continue  # fewer may fit
            for place in left:
                results[place] = BlockResult.NO_ROOM
            break
        for place, result in zip(places, stored, strict=True):
            results[place] = result
        if stored[-1] is not BlockResult.PARENT_MISSING:
            continue
        orphan = places[stored.index(BlockResult.PARENT_MISSING)]
        lost = absent() if orphan else None  # the parent of the first key is not the caller's to store
        if lost is None or not again:
            short = lost is not None and orphan - 1 in lost  # other calls evicted blocks of this put
            results[orphan:] = [BlockResult.NO_ROOM if short else BlockResult.PARENT_MISSING] * (count - orphan)
            for place in lost if lost is not None and short else ():
                results[place] = BlockResult.NO_ROOM
            break
        results[orphan:] = [BlockResult.EXISTS] * (count - orphan)
        left, again = deque(lost), False
    return results


async def _stored(cache: Owner, way: Way, tier: Tier, part: ChainPart, timeout: float | None) -> list[BlockResult]:
    for _ in range(_LOSSES):
        with suppress(LeaseLost):  # the caller's arrays still have the bytes
            return await way.store(cache, tier, part, timeout)
    return await way.store(cache, tier, part, timeout)


async def get(
    caches: Sequence[Owner], way: Way, tier: Tier, keys: bytes, targets: GroupRows, timeout: float
) -> dict[int, PrefixRows]:
    """See :meth:`kvtier.Cache.get`; ``targets`` are flat. A prefix with a sliding window, or of several groups, is read
    in one piece: a window of a piece is not the chain's."""
    count, whole = len(keys) // KEY_BYTES, is_whole(caches)
    step = count if whole else pieces(caches[0], tier, way)
    found: dict[int, PrefixRows] = {cache.group: [] for cache in caches}
    start = 0
    while start < count:
        end = min(start + step, count)
        into = {group: rows[start:end] for group, rows in targets.items()}
        try:
            piece = await _with_room(way, caches, tier, keys[start * KEY_BYTES : end * KEY_BYTES], into, timeout)
        except TooShort:
            break
        except TierFull:
            if whole or (step := pieces(caches[0], tier, way)) >= end - start:
                raise
            continue  # the tier has become smaller meanwhile
        for group, rows in piece.items():
            found[group] += rows
        start = count if whole else len(found[caches[0].group])
    return found


async def _with_room(
    way: Way, caches: Sequence[Owner], tier: Tier, keys: bytes, into: GroupRows, timeout: float
) -> dict[int, PrefixRows]:
    """Gets a piece. The daemon refuses at once while others hold all slots; they may release until the time is up."""
    deadline, backoff = Deadline(timeout), Backoff(most=0.25)
    while True:
        try:
            return await way.get(caches, tier, keys, into, max(deadline.left(), 0.1))
        except TierFull as full:
            if not full.holders or not deadline.left():
                raise
            await asyncio.sleep(min(backoff.next(), deadline.left()))


def is_whole(caches: Sequence[Owner]) -> bool:
    """Whether a prefix is of use only as a whole: in several groups, or with a sliding window."""
    return len(caches) > 1 or caches[0].spec.attention(caches[0].group).span > 0


async def delivered(out: Blocks | None, rows: PrefixRows) -> list[Any]:
    """The blocks as the caller gets them: its own arrays or pages, filled, or else the rows."""
    if out is None:
        return rows
    late = buffers.late(out, rows)
    if late:
        await buffers.run_copy(partial(buffers.fill, late), sum(len(row) for _, row, _ in late))
    return [row if row is None else block for block, row in zip(out, rows, strict=False)]


PutCall = StreamUnaryCall[transfer_pb2.PutChunk, transfer_pb2.PutResponse]

MAX_PART_BYTES: Final = 64 << 20
"""Most bytes in one stream, which is sent again if a connection breaks."""


class StreamedCopies:
    """Puts and gets pieces of chains through streams."""

    def __init__(self, binder: Binder, deadline: Callable[[float | None], Deadline]) -> None:
        self._binder: Final = binder
        self._deadline: Final = deadline

    def max_blocks(self, cache: Owner) -> int:
        return max(1, MAX_PART_BYTES // cache.block_bytes)

    async def store(self, cache: Owner, tier: Tier, part: ChainPart, timeout: float | None) -> list[BlockResult]:
        blocks = await _gathered(part.blocks)
        checksums = b"".join(await digests_of(blocks))
        self._binder.asked.stored(part.chain[-1])
        deadline, seq = self._deadline(timeout), self._binder.session.next_seq()
        wait_ns = deadline.wait_ns()

        def header(binding: Binding) -> transfer_pb2.PutHeader:
            # A repeated call must be identical to the byte.
            commit = part.commit(binding.info.options, cache_id=binding.cache_id, seq=seq)
            return transfer_pb2.PutHeader(
                commit=commit, group=cache.group, tier=tier_to_wire(tier), checksums=checksums, timeout_ns=wait_ns
            )

        async def attempt(link: Link) -> transfer_pb2.PutResponse:
            binding = await self._binder.bind(link)
            call = link.stubs.transfer.Put(metadata=link.metadata)
            try:
                return await _upload(call, header(binding), blocks)
            finally:
                call.cancel()

        reply = await self._binder.session.call(attempt, deadline)
        return [BlockResult(result) for result in reply.results]

    async def get(
        self, caches: Sequence[Owner], tier: Tier, keys: bytes, targets: GroupRows, timeout: float | None
    ) -> dict[int, PrefixRows]:
        wanted = [blocks_pb2.Chain(keys=keys, min_blocks=1, counted=True)]
        deadline = self._deadline(timeout)

        async def attempt(link: Link) -> dict[int, PrefixRows]:
            binding = await self._binder.bind(link)
            acquire = blocks_pb2.AcquireRequest(
                cache_id=binding.cache_id,
                groups=[cache.group for cache in caches],
                tier=tier_to_wire(tier),
                chains=wanted,
                timeout_ns=deadline.wait_ns(),
            )
            call = link.stubs.transfer.Get(transfer_pb2.GetRequest(acquire=acquire), metadata=link.metadata)
            try:
                return await _download(aiter(call), caches, targets)
            finally:
                call.cancel()

        return await self._binder.session.call(attempt, deadline)


async def _gathered(blocks: Rows) -> Sequence[Bytes]:
    if not isinstance(blocks, Pages):
        return of_cpu(blocks)
    return [*await buffers.run_copy(blocks.gathered, len(blocks) * blocks.planes.block_bytes)]


async def _upload(call: PutCall, header: transfer_pb2.PutHeader, blocks: Sequence[Bytes]) -> transfer_pb2.PutResponse:
    """Sends the bytes if the daemon wants them: not if it refuses, or has answered this call before."""
    progress = Progress(len(blocks), len(blocks[0]))
    try:
        await call.write(transfer_pb2.PutChunk(header=header))
        if any(key == GO_AHEAD_KEY for key, _ in await call.initial_metadata()):
            while not progress.finished:
                block, offset = progress.block, progress.offset
                data = b"".join(blocks[span.block][span.start : span.stop].data for span in progress.take())
                part = transfer_pb2.BlockBytes(block=block, offset=offset, data=data)
                await call.write(transfer_pb2.PutChunk(bytes=part))
        await call.done_writing()
    except (asyncio.InvalidStateError, InternalError):
        pass  # the call is over; its status says why
    return await call


async def _download(
    chunks: AsyncIterator[transfer_pb2.GetChunk], caches: Sequence[Owner], targets: GroupRows
) -> dict[int, PrefixRows]:
    """Fills the targets, or fresh arrays. Raises the errors of an acquire of the chain."""
    first = await anext(chunks, None)
    if first is None or not first.HasField("header"):
        raise DaemonError("a stream that does not begin with its header", reason="BAD_ANSWER")
    found = first.header.found
    if found.refusal:
        raise chain_error(found, 1)
    copied: dict[int, PrefixRows] = {}
    for cache, part in zip(caches, found.groups, strict=True):
        needed, into = granted(found, part), targets.get(cache.group)
        if into is None or isinstance(into, Pages):
            rows = [*np.empty((len(part.found_in), cache.block_bytes), np.uint8)]
        else:
            rows = [*needed.pick(of_cpu(into))]
        await _receive(chunks, rows, cache.block_bytes)
        copied[cache.group] = [*needed.spread(rows)]
    if await anext(chunks, None) is not None:
        raise DaemonError("a stream that goes on after its blocks", reason="BAD_ANSWER")
    return copied


async def _receive(chunks: AsyncIterator[transfer_pb2.GetChunk], rows: Sequence[Bytes], block_bytes: int) -> None:
    progress, checksums = Progress(len(rows), block_bytes), b""
    while not progress.finished:
        chunk = await anext(chunks, None)
        if chunk is None:
            raise DaemonError(f"a stream that ended in block {progress.block} of {len(rows)}", reason="BAD_ANSWER")
        part = chunk.bytes
        try:
            spans = progress.accept(part.block, part.offset, len(part.data))
        except StreamError as error:
            raise DaemonError(str(error), reason="BAD_ANSWER") from error
        source, start = np.frombuffer(part.data, np.uint8), 0
        for span in spans:
            end = start + span.stop - span.start
            np.copyto(rows[span.block][span.start : span.stop], source[start:end])
            start = end
        checksums += chunk.checksums
    _require_equal(b"".join(await digests_of(rows)), checksums)


def _require_equal(found: bytes, said: bytes) -> None:
    if found == said:
        return
    pairs = range(0, max(len(found), len(said)), CHECKSUM_BYTES)
    block = next(n for n, at in enumerate(pairs) if found[at : at + CHECKSUM_BYTES] != said[at : at + CHECKSUM_BYTES])
    message = f"block {block} did not arrive as it was sent: its bytes do not have its checksum"
    raise DamagedTransfer(message, reason="CHECKSUM_MISMATCH")
