"""Blocks through streams, against a real daemon: honest clients, hostile ones, and those that vanish midway."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import xxhash

from kvtier import errors
from kvtier.abi.stream import MAX_CHUNK_BYTES
from kvtier.errors import FAILED_WRITE
from kvtier.types import ROOT_PARENT, BlockResult, Tier
from kvtier.v1 import blocks_pb2, common_pb2, transfer_pb2
from kvtier.wire import tier_to_wire
from tests.integration.blocks import (
    BLOCK_BYTES,
    SPEC,
    assert_bytes,
    block,
    blocks,
    chain,
    opened_cache,
    put_chain,
    sizes,
)
from tests.integration.models import MLA, assert_content, content
from tests.integration.raw import attached, refusal
from tests.integration.seeing import cache_stats, tier_stats
from tests.integration.waiting import eventually

Code = grpc.StatusCode
OK = BlockResult.OK
BUDGET = sizes(device=8, host=8)


@pytest.fixture
async def streamed(client, name):
    return await client.open_cache(name, SPEC, budgets=BUDGET, mapped=False)


async def nothing_held(client, cache):
    """Nobody holds a slot of any tier, sooner or later."""
    await eventually(lambda: cache_stats(client, cache), lambda seen: not any(each.held for each in seen.tiers))


# -- honest clients --------------------------------------------------------------------------------------------------


async def test_streams_and_mappings_are_of_the_same_blocks(client, streamed, name):
    cache = await client.open_cache(name)
    keys = chain("both", 6)
    assert await streamed.put(keys[:3], blocks(keys[:3]), tier=Tier.HOST) == [OK] * 3
    assert await cache.put(keys[3:], blocks(keys[3:]), parent=keys[2], tier=Tier.HOST) == [OK] * 3
    assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))
    assert_bytes(keys, await streamed.get([*keys, *chain("else", 1)], tier=Tier.HOST))
    assert await streamed.put(keys, blocks(keys)) == [BlockResult.EXISTS] * 6
    assert await streamed.get(chain("else", 2)) == []
    assert [found.parent for found in [each async for each in cache.blocks()]] == [None, *keys[:-1]]


@pytest.mark.parametrize("mapped", [True, False])
async def test_a_chain_longer_than_the_tier_goes_in_pieces(client, name, mapped):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=8, host=8, disk=64), mapped=mapped)
    keys = chain("long", 14)
    assert await cache.put(keys, blocks(keys)) == [OK] * 14
    out = np.zeros((14, BLOCK_BYTES), dtype=np.uint8)
    found = await cache.get(keys, out)
    assert_bytes(keys, list(found))
    assert_bytes(keys, list(out))


async def test_blocks_larger_than_a_chunk(start_for):
    assert MLA.block_bytes(0) > MAX_CHUNK_BYTES
    daemon = start_for(MLA, host=2)
    async with opened_cache(daemon.address, "c", spec=MLA, mapped=False) as (_, cache):
        keys = chain("large", 2)
        assert await cache.put(keys, content(MLA, 0, keys)) == [OK] * 2
        assert_content(MLA, 0, keys, await cache.get(keys))


async def test_an_unmapped_cache_has_no_slots_to_fill_or_to_look_at(streamed):
    keys = await put_chain(streamed, "views", 1)
    with pytest.raises(errors.CallerError, match="not mapped") as refused:
        await streamed.reserve(1)
    assert refused.value.reason == "CANNOT_MAP"
    async with streamed.acquire(keys) as lease:
        assert lease.blocks == 1
        with pytest.raises(errors.CallerError, match="not mapped"):
            lease.view(0)


async def test_a_cache_opened_to_read_is_not_written_by_streams(client, streamed):
    reader = await client.open_cache(streamed.name, SPEC, write=False, mapped=False)
    with pytest.raises(errors.InvalidArgument, match="write"):
        await reader.put(chain("no", 1), blocks(chain("no", 1)))


async def test_many_put_and_get_while_blocks_are_evicted(client, name):
    streamed = await client.open_cache(name, SPEC, budgets=sizes(device=24, host=24), mapped=False)

    async def one(number):
        for turn in range(6):
            keys = await put_chain(streamed, f"evict-{number}-{turn}", 3)
            found = await streamed.get(keys)
            assert_bytes(keys[: len(found)], found)

    await asyncio.gather(*(one(number) for number in range(4)))
    await nothing_held(client, streamed.name)


# -- hostile ones ----------------------------------------------------------------------------------------------------


def header(cache_id, keys, **more):
    """Of a chain with its right bytes; ``more`` replaces fields, of ``commit`` with a prefix."""
    commit: dict[str, Any] = {
        "cache_id": cache_id,
        "keys": b"".join(keys),
        "parents": b"".join([ROOT_PARENT, *keys[:-1]]),
    }
    commit |= {field.removeprefix("commit_"): more.pop(field) for field in list(more) if field.startswith("commit_")}
    sums = b"".join(xxhash.xxh3_128_digest(block(key).data) for key in keys)
    fields: dict[str, Any] = {
        "tier": tier_to_wire(Tier.HOST),
        "checksums": sums,
        "commit": blocks_pb2.CommitRequest(**commit),
    } | more
    return transfer_pb2.PutChunk(header=transfer_pb2.PutHeader(**fields))


def part(index, offset, data):
    return transfer_pb2.PutChunk(bytes=transfer_pb2.BlockBytes(block=index, offset=offset, data=data))


async def put_refused(raw, messages):
    """Of a refusal that comes while a message is sent, gRPC may tell that alone: see ``FAILED_WRITE``."""
    put = lambda: refusal(raw.stubs.transfer.Put(iter(messages), metadata=raw.metadata, timeout=10))  # noqa: E731
    return await eventually(put, lambda fault: fault.message != FAILED_WRITE)


KEYS = chain("hostile", 2)
ALL = b"".join(block(key).tobytes() for key in KEYS)
HALF = BLOCK_BYTES // 2
FLIPPED = bytes([ALL[0] ^ 1]) + ALL[1:]

HOSTILE: dict[str, tuple[list[transfer_pb2.PutChunk], Code, str]] = {
    "a flipped bit": ([part(0, 0, FLIPPED)], Code.DATA_LOSS, "header.checksums[0]"),
    "a flipped bit in the second": ([part(0, 0, ALL[:-1] + b"\xff")], Code.DATA_LOSS, "header.checksums[1]"),
    "short": ([part(0, 0, ALL[:-1])], Code.INVALID_ARGUMENT, "bytes"),
    "nothing at all": ([], Code.INVALID_ARGUMENT, "bytes"),
    "too long": ([part(0, 0, ALL + b"!")], Code.INVALID_ARGUMENT, "bytes.data"),
    "a chunk after the end": ([part(0, 0, ALL), part(2, 0, b"!")], Code.INVALID_ARGUMENT, "bytes.block"),
    "a huge chunk": ([part(0, 0, bytes(MAX_CHUNK_BYTES + 1))], Code.INVALID_ARGUMENT, "bytes.data"),
    "another header": ([header(1, KEYS)], Code.INVALID_ARGUMENT, "part"),
    "an empty message": ([transfer_pb2.PutChunk()], Code.INVALID_ARGUMENT, "part"),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_a_sender_that_lies_is_refused_by_name_and_nothing_is_stored(raw, client, name, case):
    opened = await raw.open(name, budgets=sizes(host=4))
    messages, code, field = HOSTILE[case]
    fault = await put_refused(raw, [header(opened.cache_id, KEYS), *messages])
    assert (fault.code, fault.detail.field) == (code, field), fault
    cache = await client.open_cache(name, SPEC, mapped=False)
    assert (await cache.match(KEYS)).blocks == 0
    await nothing_held(client, name)
    # And the same slots take the honest bytes afterwards.
    assert await cache.put(KEYS, blocks(KEYS)) == [OK] * 2


BAD_HEADERS: dict[str, tuple[dict[str, Any], Code, str]] = {
    "checksums of other length": ({"checksums": b"x" * 31}, Code.INVALID_ARGUMENT, "header.checksums"),
    "a key twice": ({"commit_keys": KEYS[0] * 2}, Code.INVALID_ARGUMENT, "header.commit.keys[1]"),
    "more than the tier": ({"commit_keys": b"".join(chain("many", 5))}, Code.INVALID_ARGUMENT, "header.commit.keys"),
    "the disk": ({"tier": tier_to_wire(Tier.DISK)}, Code.INVALID_ARGUMENT, "header.tier"),
    "no such group": ({"group": 1}, Code.INVALID_ARGUMENT, "header.group"),
    "slots of its own": ({"commit_slots": [0, 1]}, Code.INVALID_ARGUMENT, "header.commit.lease_id"),
    "an unknown cache": ({"commit_cache_id": 999}, Code.NOT_FOUND, "cache_id"),
    "a bad priority": ({"commit_priorities": b"\xff\xff"}, Code.INVALID_ARGUMENT, "priorities[0]"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
async def test_a_bad_header_is_refused_and_holds_nothing(raw, client, name, case):
    opened = await raw.open(name, budgets=sizes(host=4))
    fields, code, field = BAD_HEADERS[case]
    fault = await put_refused(raw, [header(opened.cache_id, KEYS, **fields), part(0, 0, ALL)])
    assert (fault.code, fault.detail.field) == (code, field), fault
    await nothing_held(client, name)


async def test_bytes_before_a_header_and_no_message_at_all_are_refused(raw):
    for messages in ([part(0, 0, ALL)], []):
        fault = await put_refused(raw, messages)
        assert (fault.code, fault.detail.field) == (Code.INVALID_ARGUMENT, "part")


async def test_a_cache_of_others_is_refused(daemon, raw, name):
    opened = await raw.open(name, budgets=sizes(host=4))
    async with attached(daemon.address) as stranger:
        fault = await put_refused(stranger, [header(opened.cache_id, KEYS), part(0, 0, ALL)])
        assert fault.reason == "CACHE_NOT_OPENED"
        request = transfer_pb2.GetRequest(acquire=acquire(opened.cache_id, KEYS))
        assert (await refusal(anext(aiter(get(stranger, request))))).reason == "CACHE_NOT_OPENED"
        assert (await refusal(stranger.stubs.transfer.Put(timeout=10))).code is Code.UNAUTHENTICATED


def acquire(cache_id, keys, **more):
    wanted = blocks_pb2.Chain(keys=b"".join(keys), min_blocks=1)
    fields: dict[str, Any] = {"groups": [0], "tier": tier_to_wire(Tier.HOST), "chains": [wanted]} | more
    return blocks_pb2.AcquireRequest(cache_id=cache_id, **fields)


async def get(raw, request):
    async for chunk in raw.stubs.transfer.Get(request, metadata=raw.metadata, timeout=10):
        yield chunk


async def test_a_get_says_what_it_found_and_sums_up_its_bytes(raw, client, name):
    opened = await raw.open(name, budgets=sizes(host=4))
    await (await client.open_cache(name, SPEC)).put(KEYS, blocks(KEYS))
    first, *rest = [chunk async for chunk in get(raw, transfer_pb2.GetRequest(acquire=acquire(opened.cache_id, KEYS)))]
    found = first.header.found
    (part,) = found.groups
    assert (found.blocks, found.matched, part.found_in, found.refusal) == (2, 2, bytes([Tier.HOST.bit] * 2), "")
    assert (part.lease_id, list(part.slots), list(part.generations)) == (0, [], [])
    assert b"".join(chunk.bytes.data for chunk in rest) == ALL
    assert b"".join(chunk.checksums for chunk in rest) == header(0, KEYS).header.checksums
    request = transfer_pb2.GetRequest(acquire=acquire(opened.cache_id, chain("nowhere", 1)))
    (missing,) = [chunk async for chunk in get(raw, request)]
    assert missing.header.found.refusal == "TOO_SHORT"
    await nothing_held(client, name)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"chains": []}, "acquire.chains"),
        ({"groups": [0, 0]}, "acquire.groups"),
        ({"groups": [3]}, "acquire.groups[0]"),
        ({"tier": common_pb2.TIER_DISK}, "acquire.tier"),
    ],
)
async def test_a_bad_get_is_refused(raw, name, more, field):
    opened = await raw.open(name, budgets=sizes(host=4))
    request = transfer_pb2.GetRequest(acquire=acquire(opened.cache_id, KEYS, **more))
    fault = await refusal(anext(aiter(get(raw, request))))
    assert (fault.code, fault.detail.field) == (Code.INVALID_ARGUMENT, field)


# -- those that vanish -----------------------------------------------------------------------------------------------


async def begun(raw, client, cache_id, name):
    """A put that has sent half of its bytes and holds its slots."""
    call = raw.stubs.transfer.Put(metadata=raw.metadata, timeout=60)
    await call.write(header(cache_id, KEYS, commit_seq=77))
    await call.write(part(0, 0, ALL[:HALF]))
    await eventually(lambda: tier_stats(client, name, Tier.HOST), lambda seen: seen.held == 2)
    return call


async def test_a_cancelled_put_leaves_nothing_held_and_nothing_stored(raw, client, name):
    opened = await raw.open(name, budgets=sizes(host=4))
    call = await begun(raw, client, opened.cache_id, name)
    call.cancel()
    await nothing_held(client, name)
    cache = await client.open_cache(name, SPEC)
    assert (await cache.match(KEYS)).blocks == 0


async def test_a_put_ends_with_its_session_and_writes_no_slot_of_anybody_elses(daemon, client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=2))
    async with attached(daemon.address) as raw:
        opened = await raw.open(name)
        call = await begun(raw, client, opened.cache_id, name)
        await client.kick(raw.welcome.session_id)
        # Its slots are given to somebody else, who writes them, while its stream goes on.
        other = await put_chain(cache, "other", 2)
        await call.write(part(0, HALF, ALL[HALF:]))
        await call.done_writing()
        assert (await refusal(call)).code is Code.UNAUTHENTICATED
        raw.detach()
    assert_bytes(other, await cache.get(other))
    assert (await cache.match(KEYS)).blocks == 0


async def test_a_put_ends_when_its_session_breaks_off_and_can_be_repeated(raw, client, name):
    opened = await raw.open(name, budgets=sizes(host=4))
    call = await begun(raw, client, opened.cache_id, name)
    raw.detach()
    await eventually(client.stats, lambda seen: any(not each.attached for each in seen.sessions))
    await call.write(part(0, HALF, ALL[HALF:]))
    assert (await refusal(call)).code is Code.UNAUTHENTICATED
    await nothing_held(client, name)
    raw.attach_again()
    honest = [header(opened.cache_id, KEYS, commit_seq=77), part(0, 0, ALL)]
    for _ in range(2):
        # The second time without its bytes: it is answered, not executed again.
        reply = await raw.stubs.transfer.Put(iter(honest), metadata=raw.metadata, timeout=10)
        assert list(reply.results) == [OK, OK]
        honest = honest[:1]
    other = header(opened.cache_id, KEYS, commit_seq=77, timeout_ns=1)
    assert (await put_refused(raw, [other])).detail.field == "seq"


async def test_a_reader_that_leaves_midway_holds_nothing(raw, client, name):
    opened = await raw.open(name, budgets=sizes(host=4))
    await (await client.open_cache(name, SPEC)).put(KEYS, blocks(KEYS))
    call = raw.stubs.transfer.Get(
        transfer_pb2.GetRequest(acquire=acquire(opened.cache_id, KEYS)), metadata=raw.metadata, timeout=10
    )
    first = await call.read()
    assert isinstance(first, transfer_pb2.GetChunk)
    assert first.HasField("header")
    call.cancel()
    await nothing_held(client, name)


async def test_a_session_that_ends_in_the_middle_of_a_message_is_no_trouble_to_the_daemon(start_daemon):
    """A refused get is left after its first message, and its client hangs up at once. The log is read at the end."""
    daemon = start_daemon(host=8)
    for number in range(40):
        async with opened_cache(daemon.address, "c", mapped=False) as (_, cache):
            assert await cache.get(chain(f"nowhere {number}", 1)) == []
