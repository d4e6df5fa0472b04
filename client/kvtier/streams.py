"""Blocks over gRPC, for caches that are not mapped: each piece of a chain in one stream, with checksums.

The rules stand in ``proto/kvtier/v1/transfer.proto``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash
from grpc.aio import InternalError, StreamUnaryCall

from kvtier import transfer
from kvtier.abi.stream import CHECKSUM_BYTES, GO_AHEAD_KEY, Progress, Span, StreamError
from kvtier.binding import Binder, Binding
from kvtier.buffers import Bytes, Row, Rows, of_cpu
from kvtier.errors import DaemonError, DamagedTransfer
from kvtier.rpc_errors import chain_error
from kvtier.session import ANSWER_GRACE_S, Deadline, Link
from kvtier.types import ROOT_PARENT, BlockResult, Tier
from kvtier.v1 import blocks_pb2, transfer_pb2
from kvtier.wire import packed_keys, tier_to_wire

if TYPE_CHECKING:
    from kvtier.arrays import Piece
    from kvtier.cache import Cache

PutCall = StreamUnaryCall[transfer_pb2.PutChunk, transfer_pb2.PutResponse]

MAX_PIECE_BYTES: Final = 64 << 20
"""In one stream: what is sent again where a connection breaks."""


class Streamed:
    """Puts and gets pieces of chains through streams. Implements :class:`kvtier.arrays.Way`."""

    def __init__(self, cache: Cache, binder: Binder, deadline: Callable[[float | None], Deadline]) -> None:
        self._cache: Final = cache
        self._binder: Final = binder
        self._deadline: Final = deadline

    @property
    def max_blocks(self) -> int:
        return max(1, MAX_PIECE_BYTES // self._cache.block_bytes)

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        """Sends a piece and has it stored."""
        keys = b"".join(piece.chain)
        parents = packed_keys([ROOT_PARENT if piece.parent is None else piece.parent, *piece.chain[:-1]], "parent")
        blocks = of_cpu(piece.blocks)
        checksums = await _checksums(blocks)
        deadline, seq = self._deadline(timeout), self._binder.session.next_seq()
        wait_ns = deadline.wait_ns()

        def header(binding: Binding) -> transfer_pb2.PutHeader:
            # The same to the byte when the call is repeated.
            commit = blocks_pb2.CommitRequest(
                cache_id=binding.cache_id,
                keys=keys,
                parents=parents,
                priorities=piece.kept.priorities,
                durations_ms=piece.kept.durations_ms,
                seq=seq,
                **(piece.prompt.told(keys, binding.info.options) if piece.prompt is not None else {}),
            )
            return transfer_pb2.PutHeader(
                commit=commit,
                group=self._cache.group,
                tier=tier_to_wire(tier),
                checksums=checksums,
                timeout_ns=wait_ns,
            )

        async def attempt(link: Link, seconds: float) -> transfer_pb2.PutResponse:
            binding = await self._binder.bind(link, seconds)
            call = link.stubs.transfer.Put(timeout=deadline.left() + ANSWER_GRACE_S, metadata=link.metadata)
            try:
                return await _upload(call, header(binding), blocks)
            finally:
                call.cancel()

        reply = await self._binder.session.call(attempt, deadline)
        return [BlockResult(result) for result in reply.results]

    async def get(self, tier: Tier, chain: Sequence[bytes], targets: Rows | None, timeout: float | None) -> list[Row]:
        wanted = [blocks_pb2.Chain(keys=b"".join(chain), min_blocks=1)]
        deadline = self._deadline(timeout)

        async def attempt(link: Link, seconds: float) -> list[Row]:
            binding = await self._binder.bind(link, seconds)
            acquire = blocks_pb2.AcquireRequest(
                cache_id=binding.cache_id,
                group=self._cache.group,
                tier=tier_to_wire(tier),
                chains=wanted,
                timeout_ns=deadline.wait_ns(),
            )
            call = link.stubs.transfer.Get(
                transfer_pb2.GetRequest(acquire=acquire),
                timeout=deadline.left() + ANSWER_GRACE_S,
                metadata=link.metadata,
            )
            try:
                into = None if targets is None else of_cpu(targets)
                return [*await _download(aiter(call), into, self._cache.block_bytes)]
            finally:
                call.cancel()

        return await self._binder.session.call(attempt, deadline)


async def _upload(call: PutCall, header: transfer_pb2.PutHeader, blocks: Sequence[Bytes]) -> transfer_pb2.PutResponse:
    """Sends the bytes if the daemon wants them: it does not where it refuses, or has answered the call before."""
    progress = Progress(len(blocks), len(blocks[0]))
    try:
        await call.write(transfer_pb2.PutChunk(header=header))
        if any(key == GO_AHEAD_KEY for key, _ in await call.initial_metadata()):
            while not progress.finished:
                block, offset = progress.block, progress.offset
                data = await _cut(blocks, progress.take())
                part = transfer_pb2.BlockBytes(block=block, offset=offset, data=data)
                await call.write(transfer_pb2.PutChunk(bytes=part))
        await call.done_writing()
    except (asyncio.InvalidStateError, InternalError):
        pass  # the call is over, or ended just then: it says why
    return await call


async def _download(
    chunks: AsyncIterator[transfer_pb2.GetChunk], targets: Sequence[Bytes] | None, block_bytes: int
) -> list[Bytes]:
    """Fills the targets, or fresh arrays. Raises what an acquire of the chain would."""
    first = await anext(chunks, None)
    if first is None or not first.HasField("header"):
        raise DaemonError("a stream that does not begin with its header", reason="BAD_ANSWER")
    found = first.header.found
    if found.refusal:
        raise chain_error(found, 1)
    rows = list(np.empty((found.blocks, block_bytes), dtype=np.uint8) if targets is None else targets[: found.blocks])
    progress = Progress(len(rows), block_bytes)
    checksums = b""
    async for chunk in chunks:
        part = chunk.bytes
        try:
            spans = progress.accept(part.block, part.offset, len(part.data))
        except StreamError as error:
            raise DaemonError(str(error), reason="BAD_ANSWER") from error
        await _paste(rows, spans, part.data)
        checksums += chunk.checksums
    if not progress.finished:
        raise DaemonError(f"a stream that ended in block {progress.block} of {len(rows)}", reason="BAD_ANSWER")
    _require_equal(await _checksums(rows), checksums)
    return rows


async def _cut(blocks: Sequence[Bytes], spans: Sequence[Span]) -> bytes:
    pieces: list[bytes] = []

    def copy() -> None:
        pieces.append(b"".join(blocks[span.block][span.start : span.stop].data for span in spans))

    await transfer.run(copy, sum(span.stop - span.start for span in spans))
    return pieces[0]


async def _paste(rows: Sequence[Bytes], spans: Sequence[Span], data: bytes) -> None:
    source = np.frombuffer(data, dtype=np.uint8)

    def copy() -> None:
        start = 0
        for span in spans:
            end = start + span.stop - span.start
            np.copyto(rows[span.block][span.start : span.stop], source[start:end])
            start = end

    await transfer.run(copy, len(data))


async def _checksums(blocks: Sequence[Bytes]) -> bytes:
    """One a block, of the caller's memory: what is lost anywhere on the way is seen."""
    digests: list[bytes] = []
    work = lambda: digests.extend(xxhash.xxh3_128_digest(block.data) for block in blocks)  # noqa: E731
    await transfer.run(work, sum(map(len, blocks)))
    return b"".join(digests)


def _require_equal(found: bytes, said: bytes) -> None:
    if found == said:
        return
    pairs = range(0, max(len(found), len(said)), CHECKSUM_BYTES)
    block = next(n for n, at in enumerate(pairs) if found[at : at + CHECKSUM_BYTES] != said[at : at + CHECKSUM_BYTES])
    message = f"block {block} did not arrive as it was sent: its bytes do not have its checksum"
    raise DamagedTransfer(message, reason="CHECKSUM_MISMATCH")
