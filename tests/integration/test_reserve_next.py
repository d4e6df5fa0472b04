"""A commit that asks for the slots of the next one, on the wire."""

from __future__ import annotations

import pytest

from kvtier import Tier
from kvtier.v1 import admin_pb2, blocks_pb2, transfer_pb2
from tests.integration.blocks import chain, sizes
from tests.integration.daemon import StartDaemon
from tests.integration.raw import RawClient, attached, commit_request, refusal
from tests.integration.waiting import eventually

KEYS = chain("first", 2)


async def opened(raw: RawClient, name: str, slots: int = 32) -> int:
    cache_id: int = (await raw.open(name, budgets=sizes(host=slots))).cache_id
    return cache_id


def committing(
    cache: int, reserved: blocks_pb2.ReserveResponse, reserve_next: int, seq: int = 0
) -> blocks_pb2.CommitRequest:
    request = commit_request(cache, reserved, KEYS)
    request.reserve_next, request.release, request.seq = reserve_next, True, seq
    return request


async def test_it_is_granted_with_the_commit_and_used_by_the_next(raw: RawClient, name: str) -> None:
    cache = await opened(raw, name)
    request = committing(cache, await raw.reserve(cache, Tier.HOST, 2), 2)
    first = await raw.call(raw.stubs.blocks.Commit, request)
    assert first.results == bytes(2)
    assert len(set(first.next_slots)) == 2
    following = commit_request(
        cache, blocks_pb2.ReserveResponse(lease_id=first.next_lease_id, slots=first.next_slots), chain("second", 2)
    )
    following.release = True
    second = await raw.call(raw.stubs.blocks.Commit, following)
    assert (second.results, second.next_lease_id, list(second.next_slots)) == (bytes(2), 0, [])
    assert not (await raw.call(raw.stubs.admin.Leases, admin_pb2.LeasesRequest(cache=name))).leases


async def test_a_repeated_commit_grants_nothing_more(raw: RawClient, name: str) -> None:
    cache = await opened(raw, name)
    request = committing(cache, await raw.reserve(cache, Tier.HOST, 2), 2, seq=7)
    first = await raw.call(raw.stubs.blocks.Commit, request)
    assert first.next_lease_id
    assert await raw.call(raw.stubs.blocks.Commit, request) == first
    leases = (await raw.call(raw.stubs.admin.Leases, admin_pb2.LeasesRequest(cache=name))).leases
    assert [lease.lease_id for lease in leases] == [first.next_lease_id]


@pytest.mark.parametrize(("slots", "reserve_next"), [(7, 1), (32, 5)], ids=["a small tier", "more than its share"])
async def test_it_is_not_granted_and_nothing_else_is_refused(
    raw: RawClient, name: str, slots: int, reserve_next: int
) -> None:
    cache = await opened(raw, name, slots)
    reply = await raw.call(
        raw.stubs.blocks.Commit, committing(cache, await raw.reserve(cache, Tier.HOST, 2), reserve_next)
    )
    assert (reply.results, reply.next_lease_id, list(reply.next_slots)) == (bytes(2), 0, [])


async def test_where_slots_have_to_be_made_free_first_they_are_once_the_commit_is_answered(
    raw: RawClient, name: str
) -> None:
    cache = await opened(raw, name)
    for number in range(15):
        filling = commit_request(cache, await raw.reserve(cache, Tier.HOST, 2), chain(f"{name} {number}", 2))
        filling.release = True
        await raw.call(raw.stubs.blocks.Commit, filling)
    reply = await raw.call(raw.stubs.blocks.Commit, committing(cache, await raw.reserve(cache, Tier.HOST, 2), 2))
    assert (reply.results, reply.next_lease_id) == (bytes(2), 0)

    async def free() -> int:
        stats: admin_pb2.StatsResponse = await raw.call(raw.stubs.admin.Stats, admin_pb2.StatsRequest())
        (of_cache,) = [each for each in stats.caches if each.name == name]
        (of_tier,) = of_cache.tiers
        tier_free: int = of_tier.free
        return tier_free

    await eventually(free, lambda slots: slots == 2)


async def test_more_than_the_tier_has_is_a_mistake(raw: RawClient, name: str) -> None:
    cache = await opened(raw, name)
    request = committing(cache, await raw.reserve(cache, Tier.HOST, 2), 33)
    fault = await raw.refusal(raw.stubs.blocks.Commit, request)
    assert (fault.detail.field, fault.detail.value, fault.detail.limit) == ("reserve_next", "33", "0 to 32")
    request.reserve_next = 0
    assert (await raw.call(raw.stubs.blocks.Commit, request)).results == bytes(2), "nothing had changed"


async def test_a_stream_has_no_use_for_it(raw: RawClient, name: str) -> None:
    cache = await opened(raw, name)
    commit = blocks_pb2.CommitRequest(cache_id=cache, keys=b"".join(KEYS), parents=bytes(64), reserve_next=1)
    call = raw.stubs.transfer.Put(metadata=raw.metadata)
    await call.write(transfer_pb2.PutChunk(header=transfer_pb2.PutHeader(commit=commit)))
    fault = await refusal(call)
    assert fault.detail.field == "header.commit.reserve_next"


async def test_what_a_session_may_not_reserve_is_not_granted(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--max-reserved-fraction", "0.125", host=32)
    async with attached(daemon.address) as raw:
        cache = (await raw.open("capped")).cache_id
        held = await raw.reserve(cache, Tier.HOST, 1)
        reply = await raw.call(raw.stubs.blocks.Commit, committing(cache, await raw.reserve(cache, Tier.HOST, 2), 4))
        assert (reply.results, reply.next_lease_id) == (bytes(2), 0)
        await raw.call(raw.stubs.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[held.lease_id]))
        assert len((await raw.reserve(cache, Tier.HOST, 4)).slots) == 4
