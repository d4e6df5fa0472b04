"""Rules that a reload takes away, from sessions and watches that live."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
import xxhash

from kvtier import Event, PermissionDenied, Tier, connect
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2, transfer_pb2
from kvtier.wire import tier_to_wire
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.raw import refusal
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually

ALL = """
[[allow]]
anonymous = true
caches = ["*"]
verbs = ["read", "write", "watch", "tokens"]
"""
ONE = """
[[allow]]
anonymous = true
caches = ["open"]
verbs = ["watch"]
"""


@pytest.fixture
def daemon(start_daemon, tmp_path):
    file = tmp_path / "kvtierd.toml"
    file.write_text(ALL)
    return start_daemon("--config", str(file), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=16)


async def revoke(daemon, file):
    await asyncio.to_thread(file.write_text, ONE)
    os.kill(daemon.pid, signal.SIGHUP)

    async def log():
        return daemon.log

    await eventually(log, lambda text: "changed=allow" in text)


async def stored(client, cache, name):
    keys = chain(name, 2)
    await (await client.open_cache(cache, SPEC, budgets=sizes(host=4))).put(keys, blocks(keys), tier=Tier.HOST)
    return keys


async def test_a_watch_that_saw_everything_sees_what_it_still_may(daemon, tmp_path):
    async with (
        await connect(daemon.address) as owner,
        await connect(daemon.tcp_address, insecure=True) as client,
        client.watch(oldest=True) as watch,
    ):
        before = await stored(owner, "other", "before")
        assert before[0] in await until_stored(watch, before[-1])
        await revoke(daemon, tmp_path / "kvtierd.toml")
        after = await stored(owner, "other", "after")
        shown = await stored(owner, "open", "shown")
        assert not set(after) & await until_stored(watch, shown[-1])


async def test_a_watch_that_named_a_cache_it_may_not_see_any_more_ends(daemon, tmp_path):
    """It would wait in vain, and take silence for peace."""
    async with (
        await connect(daemon.address) as owner,
        await connect(daemon.tcp_address, insecure=True) as client,
        client.watch(caches=["other", "open"]) as named,
        client.watch(caches=["open"]) as allowed,
    ):
        before = await stored(owner, "other", "before")
        assert before[0] in await until_stored(named, before[-1])
        await revoke(daemon, tmp_path / "kvtierd.toml")
        await stored(owner, "other", "after")
        with pytest.raises(PermissionDenied, match="cache other"):
            await until_stored(named, bytes(32))
        shown = await stored(owner, "open", "shown")
        assert set(shown) <= await until_stored(allowed, shown[-1])


async def test_who_may_not_read_any_more_can_still_give_back(daemon, tmp_path):
    async with await connect(daemon.address) as owner, await connect(daemon.tcp_address, insecure=True) as client:
        keys = await stored(owner, "other", "held")
        cache = await client.open_cache("other", SPEC, mapped=False)
        async with cache.acquire(keys, tier=Tier.HOST) as lease:
            assert lease.blocks == 2
            await revoke(daemon, tmp_path / "kvtierd.toml")
            with pytest.raises(PermissionDenied):
                await cache.match(keys)
            assert (await tier_stats(owner, "other", Tier.HOST)).held == 2
        await eventually(lambda: tier_stats(owner, "other", Tier.HOST), lambda stats: not stats.held)
        await cache.close()


async def test_a_put_under_way_stores_nothing_once_its_right_is_gone(daemon, tmp_path):
    keys = chain("under-way", 2)
    data = [row.tobytes() for row in blocks(keys)]
    gates = {"begun": asyncio.Event(), "revoked": asyncio.Event()}

    async def messages(cache_id):
        commit = blocks_pb2.CommitRequest(
            cache_id=cache_id, keys=b"".join(keys), parents=b"".join([ROOT_PARENT, keys[0]])
        )
        sums = b"".join(map(xxhash.xxh3_128_digest, data))
        yield transfer_pb2.PutChunk(
            header=transfer_pb2.PutHeader(commit=commit, tier=tier_to_wire(Tier.HOST), checksums=sums)
        )
        for index, row in enumerate(data):
            yield transfer_pb2.PutChunk(bytes=transfer_pb2.BlockBytes(block=index, data=row))
        gates["begun"].set()
        await gates["revoked"].wait()  # all its bytes are there, its end is not

    async with await connect(daemon.address) as owner, await connect(daemon.tcp_address, insecure=True) as client:
        await stored(owner, "other", "before")
        cache = await client.open_cache("other", SPEC, mapped=False)
        link = await client._session.link(None)
        call = link.stubs.transfer.Put(messages(cache.info.cache_id), metadata=link.metadata, timeout=60)
        await gates["begun"].wait()
        await eventually(lambda: tier_stats(owner, "other", Tier.HOST), lambda stats: stats.held == 2)
        await revoke(daemon, tmp_path / "kvtierd.toml")
        gates["revoked"].set()
        fault = await refusal(call)
        assert (fault.code, fault.reason, fault.detail.field) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "NO_RIGHT",
            "write",
        )
        own = await owner.open_cache("other", SPEC)
        assert (await own.match(keys)).blocks == 0
        assert not (await tier_stats(owner, "other", Tier.HOST)).held


async def until_stored(watch, key):
    """Keys of all events up to that of ``key``."""
    seen: set[bytes] = set()
    async with asyncio.timeout(PATIENCE_S):
        async for item in watch:
            if isinstance(item, Event):
                seen.update(item.keys)
            if key in seen:
                return seen
    raise AssertionError("the watch has ended")
