"""Calls over the attach socket: what a client of the host does without gRPC, and the worst that one can do."""

import os

import pytest
from google.rpc import status_pb2

from kvtier import BlockResult, Tier
from kvtier.abi import attach
from kvtier.v1 import admin_pb2, blocks_pb2, session_pb2
from kvtier.wire import tier_to_wire
from tests import packets
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.raw import attached
from tests.integration.stuck import stuck_disk
from tests.integration.waiting import PATIENCE_S, patient

MOVE = "/kvtier.v1.Blocks/Move"
STATS = "/kvtier.v1.Admin/Stats"


async def test_a_client_needs_grpc_only_for_streams(start_fresh):
    daemon = start_fresh(host=64)
    os.unlink(attach.socket_path(daemon.address, attach.RPC_SOCKET))
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
        keys = await put_chain(cache, "c", 8)
        async with cache.acquire(keys, min_blocks=8) as lease:
            assert lease.blocks == 8
        assert_bytes(keys, await cache.get(keys))
        assert (await cache.drop(keys[:1])).dropped == 8


async def test_what_is_too_long_for_a_packet_goes_over_grpc(start_fresh):
    daemon = start_fresh(host=4096)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
        keys = chain("c", 3000)  # 96 kB in a request, and more in a listing
        await cache.put(keys, blocks(keys))
        assert [block.key async for block in cache.blocks()] == keys
        assert (await cache.drop(keys[2:])).dropped == 2998
        assert (await cache.match(keys)).blocks == 2


def answer(raw):
    return packets.reply(raw.socket.receive()[0])


async def test_refusals_say_what_those_of_grpc_say(raw):
    raw.socket.send(packets.call(7, "/kvtier.v1.Blocks/None", b""))
    raw.socket.send(packets.call(8, "/kvtier.v1.Blocks/Match", b"\xff\xff\xff"))
    said = [answer(raw), answer(raw)]
    statuses = {each.number: status_pb2.Status.FromString(each.body) for each in said}
    assert [(each.number, each.status) for each in sorted(said, key=lambda each: each.number)] == [(7, 12), (8, 3)]
    assert "Blocks/None" in statuses[7].message
    assert "request" in statuses[8].message


@pytest.mark.parametrize("trace", ["\xff" * 55, "00-" + "0" * 52, "00-" + "f" * 52], ids=["no ASCII", "zeros", "ones"])
@pytest.mark.parametrize("flags", [(), ("--traces", "http://127.0.0.1:1")])
async def test_a_trace_that_is_none_does_not_matter(start_daemon, flags, trace):
    async with attached(start_daemon(*flags, host=4).address) as raw:
        raw.socket.send(packets.call(1, STATS, b"", trace))
        assert answer(raw).status == 0
        raw.socket.send(packets.call(2, STATS, b"", trace[:20]))  # and no request
        assert answer(raw).status == 0


@pytest.mark.parametrize("packet", [b"\x32", b"\x32\x09\x08", b"\x3a\x04" + bytes(4)])
async def test_half_a_call_ends_the_connection(daemon, raw, client, packet):
    raw.socket.send(packet)
    data, _ = raw.socket.receive()
    assert b"BAD_MESSAGE" in data
    assert raw.socket.receive() == (b"", [])
    come_back(raw)
    assert (await client.stats()).problems == ()
    daemon.assert_healthy_log()


async def movable(client, raw):
    """Stores four blocks. The request that moves them to disk."""
    cache = await client.open_cache("c", SPEC)
    keys = await put_chain(cache, "c", 4)
    opened = await raw.open("c")
    request = blocks_pb2.MoveRequest(
        cache_id=opened.cache_id, to=tier_to_wire(Tier.DISK), keys=b"".join(keys), timeout_ns=60 * 10**9
    )
    return request.SerializeToString()


async def test_a_call_is_given_up_and_made_again(start_fresh):
    daemon = start_fresh(host=8, disk=8)
    async with await patient(daemon.address) as client, attached(daemon.address) as raw:
        asked = await movable(client, raw)
        with stuck_disk(daemon, "c"):
            raw.socket.send(packets.call(1, MOVE, asked))
            raw.socket.send(packets.call(2, STATS, b""))
            assert answer(raw).number == 2
            raw.socket.send(packets.of_client(give_up=session_pb2.GiveUp(number=1)))
            raw.socket.send(packets.call(3, MOVE, asked))
        again = answer(raw)
        assert (again.number, again.status) == (3, 0)
        assert blocks_pb2.MoveResponse.FromString(again.body).results == bytes([BlockResult.OK]) * 4


async def test_two_open_calls_of_one_number_end_the_connection(start_fresh):
    daemon = start_fresh(host=8, disk=8)
    async with await patient(daemon.address) as client, attached(daemon.address) as raw:
        asked = await movable(client, raw)
        with stuck_disk(daemon, "c"):
            for _ in range(2):
                raw.socket.send(packets.call(1, MOVE, asked))
            assert b"BAD_MESSAGE" in raw.socket.receive()[0]
        come_back(raw)


def come_back(raw):
    """The connection is over, and not the session."""
    raw.detach()
    assert isinstance(raw.attach_again(), session_pb2.Welcome)


async def test_who_reads_no_answers_keeps_nobody_waiting(raw, client, name):
    raw.socket.sock.setblocking(False)
    asked = admin_pb2.StatsRequest().SerializeToString()
    sent = 0
    while sent < 100_000:
        try:
            raw.socket.send(packets.call(sent, STATS, asked))
        except BlockingIOError:
            if sent > 100 and not (await client.stats()).problems:
                break
        else:
            sent += 1
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4, disk=4))
    keys = await put_chain(cache, name, 2)
    assert_bytes(keys, await cache.get(keys))
    raw.socket.sock.settimeout(30)
    assert {answer(raw).number for _ in range(sent)} == set(range(sent))
