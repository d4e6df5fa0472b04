"""What a write lease holds after a commit: blocks, blank slots, and slots that went back."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kvtier
from kvtier import BlockResult
from kvtier.v1 import blocks_pb2
from tests.unit.client.fake_daemon import SPEC, Context, FakeDaemon

KEYS = [bytes([n + 1]) * 32 for n in range(4)]
RESULTS = [BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING, BlockResult.PARENT_CONFLICT]


async def reserve(request: blocks_pb2.ReserveRequest, context: Context) -> blocks_pb2.ReserveResponse:
    return blocks_pb2.ReserveResponse(lease_id=5, slots=range(request.count))


async def commit(request: blocks_pb2.CommitRequest, context: Context) -> blocks_pb2.CommitResponse:
    return blocks_pb2.CommitResponse(results=bytes(RESULTS[: len(request.slots)]))


@pytest.fixture
async def committed(short_dir: Path) -> AsyncIterator[kvtier.WriteLease]:
    """Four slots after a commit with one of each result."""
    async with FakeDaemon(short_dir) as daemon:
        daemon.answers |= {"Reserve": reserve, "Commit": commit}
        async with await kvtier.connect(daemon.address) as client:
            cache = await client.open_cache("c", SPEC)
            async with cache.reserve(4) as lease:
                assert await lease.commit(KEYS) == RESULTS
                yield lease


async def test_slots_that_were_not_committed_stay_blank(committed: kvtier.WriteLease) -> None:
    assert committed.blank == [2, 3]
    for index in committed.blank:
        committed.view(index)[0][:] = 7


@pytest.mark.parametrize("index", [-1, 4])
async def test_a_slot_that_the_lease_does_not_have_is_refused_by_position(
    committed: kvtier.WriteLease, index: int
) -> None:
    with pytest.raises(kvtier.InvalidArgument) as refusal:
        await committed.commit(KEYS[2:], at=[2, index])
    assert (refusal.value.field, refusal.value.limit) == ("at[1]", "0 to 3")
    assert committed.blank == [2, 3]


async def test_a_slot_whose_key_was_stored_already_has_gone_back_and_is_not_shown(committed: kvtier.WriteLease) -> None:
    with pytest.raises(kvtier.LeaseError, match="stored already"):
        committed.view(1)
