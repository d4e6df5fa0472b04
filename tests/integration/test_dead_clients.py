"""What is left of a client that dies, or whose connection breaks: nothing of the first, everything of the second.

A slot that goes to another while its first writer may still be copying is the wrong KV that this project exists to
end. So only the end of the process frees slots, and at once.
"""

import asyncio
import os
import signal

import grpc
import numpy as np
import pytest

from kvtier import BlockResult, Tier, TierFull
from kvtier.arena import MappedArena
from kvtier.v1 import admin_pb2, session_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import SPEC, assert_bytes, block, blocks, chain, put_chain, sizes
from tests.integration.raw import close_all
from tests.integration.seeing import session_of, tier_stats
from tests.integration.touching import bytes_in, write_into
from tests.integration.waiting import PATIENCE_S, eventually

OK = BlockResult.OK
KEYS = chain("read by the doomed", 3)


@pytest.fixture
async def cache(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=6, disk=16))
    await cache.put(KEYS, blocks(KEYS))
    return cache


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "broken-off"])
async def test_a_killed_clients_slots_come_back(client, daemon, cache, attached):
    with Actor(
        "hold",
        address=daemon.address,
        cache=cache.name,
        reserve={"HOST": 2},
        acquire={"DEVICE": ["read by the doomed", 3]},
        detach=not attached,
    ) as doomed:
        said = doomed.says()
        shown = await eventually(
            lambda: session_of(client, doomed.pid), lambda one: one is not None and one.attached is attached
        )
        assert shown is not None
        assert (shown.session_id, shown.leases, shown.held_slots, shown.uid) == (said["session"], 2, 5, os.getuid())
        assert "tests.integration.actors" in shown.command
        host = await tier_stats(client, cache.name, Tier.HOST)
        assert (host.blank, host.orphaned, host.held) == ((2, 0, 2) if attached else (0, 2, 2))
        assert (await tier_stats(client, cache.name, Tier.DEVICE)).held == 3
        assert (await cache.drop(KEYS[:1])).results == [BlockResult.HELD]
        doomed.kill()
        await eventually(lambda: session_of(client, doomed.pid), lambda session: session is None)
    for tier in (Tier.HOST, Tier.DEVICE):
        stats = await tier_stats(client, cache.name, tier)
        assert (stats.blank, stats.held, stats.orphaned) == (0, 0, 0)
    # Blocks that it only read are there as before, and its blank slots are somebody else's now.
    assert_bytes(KEYS, await cache.get(KEYS))
    await (await cache.reserve(6, Tier.HOST)).release()


async def test_a_kicked_writer_that_goes_on_writes_into_nobodys_blocks(client, daemon, cache):
    with Actor("keep_filling", address=daemon.address, cache=cache.name, count=3) as writer:
        session = writer.says()["session"]
        writer.signal(signal.SIGSTOP)
        report = await client.kick(session)
        assert (report.leases, report.slots) == (1, 3)
        stats = await tier_stats(client, cache.name, Tier.HOST)
        assert (stats.orphaned, stats.blank, stats.free) == (3, 0, 3)
        keys = await put_chain(cache, "stored after the kick", 6, tier=Tier.HOST)
        with pytest.raises(TierFull) as full:
            await cache.reserve(4, Tier.HOST)
        assert (session, writer.pid) in [(holder.session_id, holder.pid) for holder in full.value.holders]

        writer.signal(signal.SIGCONT)
        writer.go_on()
        assert writer.says() == {"written": 3}
        assert_bytes(keys, await cache.get(keys, verify=True))
        writer.kill()
        await eventually(lambda: session_of(client, writer.pid), lambda session: session is None)
    await (await cache.reserve(6, Tier.HOST)).release()


# -- broken connections ------------------------------------------------------------------------------------------------


async def test_a_broken_connection_orphans_slots_until_its_process_comes_back(client, raw, cache):
    keys = chain("written across a break", 3)
    cache_id = (await raw.open(cache.name)).cache_id
    fds = raw.socket.map(cache_id, write=True)
    arena = MappedArena(fds, write=True, spec=SPEC)
    close_all(fds)
    reserved = await raw.reserve(cache_id, Tier.HOST, 3)
    read = (await raw.acquire(cache_id, Tier.DEVICE, KEYS)).chains[0].groups[0]
    write_into(arena.view(Tier.HOST, 0, reserved.slots[0], write=True), block(keys[0]))

    raw.detach()
    stats = await eventually(lambda: tier_stats(client, cache.name, Tier.HOST), lambda stats: stats.orphaned == 3)
    assert (stats.blank, stats.held, stats.free) == (0, 3, 3)
    session = next(one for one in (await client.stats()).sessions if one.session_id == raw.welcome.session_id)
    assert (session.attached, session.leases, session.held_slots) == (False, 2, 6)
    fault = await raw.refusal(raw.stubs.admin.Stats, admin_pb2.StatsRequest())
    assert (fault.code, fault.reason) == (grpc.StatusCode.UNAUTHENTICATED, "ORPHANED_SESSION")

    # Nobody else gets the slots, however hard they are wanted, and what was acquired stays where it is.
    with pytest.raises(TierFull) as full:
        await cache.reserve(4, Tier.HOST)
    assert [(one.session_id, one.pid, one.slots) for one in full.value.holders] == [
        (raw.welcome.session_id, os.getpid(), 3)
    ]
    await put_chain(cache, "crowd", 12, tier=Tier.HOST)
    assert (await tier_stats(client, cache.name, Tier.HOST)).orphaned == 3
    assert_bytes(keys[:1], [bytes_in(arena.view(Tier.HOST, 0, reserved.slots[0], write=False))])
    assert list(arena.generations(Tier.DEVICE, 0, np.array(read.slots))) == list(read.generations)

    welcome = raw.attach_again()
    assert isinstance(welcome, session_pb2.Welcome)
    assert (welcome.resumed, welcome.session_id) == (True, raw.welcome.session_id)
    back = await eventually(lambda: tier_stats(client, cache.name, Tier.HOST), lambda stats: stats.orphaned == 0)
    assert back.blank == 3
    for slot, key in zip(reserved.slots[1:], keys[1:], strict=True):
        write_into(arena.view(Tier.HOST, 0, slot, write=True), block(key))
    assert set((await raw.commit(cache_id, reserved, keys)).results) == {OK}
    assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))


async def test_a_token_is_of_no_use_to_another_process(client, daemon, raw, cache):
    """On the attach socket the process must be the same. gRPC cannot tell who calls: there the token is the proof, so
    who steals it can speak for the session while that is attached, and only so long."""
    cache_id = (await raw.open(cache.name)).cache_id
    await raw.reserve(cache_id, Tier.HOST, 1)
    with Actor("steal", address=daemon.address, token=raw.welcome.token) as thief:
        assert thief.says() == {"attach": "PERMISSION_DENIED", "rpc": "answered"}
    raw.detach()
    await eventually(lambda: tier_stats(client, cache.name, Tier.HOST), lambda stats: stats.orphaned == 1)
    with Actor("steal", address=daemon.address, token=raw.welcome.token) as thief:
        assert thief.says() == {"attach": "PERMISSION_DENIED", "rpc": "UNAUTHENTICATED"}
    assert (await tier_stats(client, cache.name, Tier.HOST)).orphaned == 1
    assert isinstance(raw.attach_again(), session_pb2.Welcome)


async def test_the_client_heals_a_broken_connection_by_itself(client, cache):
    keys = chain("healed", 2)
    session = client.session_id
    async with cache.reserve(2, Tier.HOST) as lease, cache.acquire(KEYS) as held:
        await break_connection(client)
        for index, key in enumerate(keys):
            write_into(lease.view(index), block(key))
        assert await lease.commit(keys) == [OK, OK]
        assert held.unchanged()
        await break_connection(client)
    assert client.session_id == session
    assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))
    stats = await tier_stats(client, cache.name, Tier.HOST)
    assert (stats.held, stats.orphaned) == (0, 0)


async def break_connection(client):
    """As a network would: neither the client nor the daemon has asked for it. Ends when the client knows."""
    link = await client._session.link()
    link.attach._sock.shutdown(2)
    await asyncio.wait_for(link.attach.closed.wait(), PATIENCE_S)
