"""What a client makes of the streams it is sent, and what it sends when its calls are repeated."""

from collections.abc import AsyncIterator, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

import kvtier
from kvtier import BlockResult, copies, errors
from kvtier.v1 import blocks_pb2, transfer_pb2
from tests.unit.client.fake_daemon import SPEC, FakeDaemon, failing

BLOCK_BYTES = SPEC.block_bytes(0)
DATA = np.random.default_rng(0).integers(0, 256, (2, BLOCK_BYTES), dtype=np.uint8)
SUMS = b"".join(xxhash.xxh3_128_digest(row.data) for row in DATA)
KEYS = [bytes([n]) * 32 for n in (1, 2)]


def found(blocks: int = 2, refusal: str = "") -> transfer_pb2.GetChunk:
    groups = [] if refusal else [blocks_pb2.AcquiredGroup(found_in=bytes(blocks))]
    chain = blocks_pb2.AcquiredChain(blocks=blocks, groups=groups, matched=blocks, refusal=refusal)
    return transfer_pb2.GetChunk(header=transfer_pb2.GetHeader(found=chain))


def part(block: int, offset: int, data: bytes, checksums: bytes = b"") -> transfer_pb2.GetChunk:
    body = transfer_pb2.BlockBytes(block=block, offset=offset, data=data)
    return transfer_pb2.GetChunk(bytes=body, checksums=checksums)


async def received(*chunks: transfer_pb2.GetChunk) -> Any:
    async def stream() -> AsyncIterator[transfer_pb2.GetChunk]:
        for chunk in chunks:
            yield chunk

    cache: Any = SimpleNamespace(group=0, block_bytes=BLOCK_BYTES)
    return (await copies._download(stream(), [cache], {}))[0]


async def test_blocks_are_put_together_from_chunks_cut_anywhere() -> None:
    flat, cut = DATA.tobytes(), BLOCK_BYTES + 7
    rows = await received(found(), part(0, 0, flat[:cut], SUMS[:16]), part(1, 7, flat[cut:], SUMS[16:]))
    assert np.array_equal(rows, DATA)


@pytest.mark.parametrize("block", [0, 1])
async def test_bytes_damaged_on_the_way_are_not_returned(block: int) -> None:
    damaged = DATA.copy()
    damaged[block, 3] ^= 1
    with pytest.raises(errors.DamagedTransfer, match=f"block {block} did not arrive"):
        await received(found(), part(0, 0, damaged.tobytes(), SUMS))


async def test_checksums_that_are_missing_are_not_forgiven() -> None:
    with pytest.raises(errors.DamagedTransfer, match="block 1"):
        await received(found(), part(0, 0, DATA.tobytes(), SUMS[:16]))


@pytest.mark.parametrize(
    "chunks",
    [(), (part(0, 0, b"x"),), (found(),), (found(), part(1, 0, b"x")), (found(), part(0, 0, bytes(3 * BLOCK_BYTES)))],
    ids=["nothing", "no header", "no bytes", "another block", "too much"],
)
async def test_a_stream_that_breaks_the_rules_is_the_daemons_fault(chunks: tuple[transfer_pb2.GetChunk, ...]) -> None:
    with pytest.raises(errors.DaemonError):
        await received(*chunks)


async def test_a_refusal_in_the_header_is_raised() -> None:
    with pytest.raises(errors.TooShort):
        await received(found(0, "TOO_SHORT"))


async def test_a_put_whose_answer_was_lost_is_repeated_under_its_number_and_without_its_bytes(short_dir: Path) -> None:
    async def answer(request: transfer_pb2.PutChunk, context: Any) -> transfer_pb2.PutResponse:
        return transfer_pb2.PutResponse(results=bytes(2))

    async with FakeDaemon(short_dir) as daemon:
        daemon.answers["Put"] = failing(1, grpc.StatusCode.UNAVAILABLE, answer)
        async with await kvtier.connect(daemon.address) as client:
            cache = await client.open_cache("c", SPEC, mapped=False)
            assert await cache.put(KEYS, DATA) == [BlockResult.OK] * 2
    first, second = daemon.calls["Put"]
    assert first == second
    assert first.header.commit.seq > 0
    assert first.header.checksums == SUMS


async def test_a_put_whose_call_ends_as_its_stream_is_closed_ends_as_the_call_says() -> None:
    """gRPC fails with an error of its own then, which is no call's."""

    class Ended:
        async def write(self, message: transfer_pb2.PutChunk) -> None: ...

        async def initial_metadata(self) -> tuple[()]:
            return ()

        async def done_writing(self) -> None:
            raise grpc.aio.InternalError("the batch failed")

        def __await__(self) -> Generator[Any, None, transfer_pb2.PutResponse]:
            yield from ()
            return transfer_pb2.PutResponse(results=bytes(2))

    call: Any = Ended()
    assert (await copies._upload(call, transfer_pb2.PutHeader(), [*DATA])).results == bytes(2)
