"""``Blocks.Commits``: commits over one stream, each as good as a call of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvtier import AsyncClient, BlockResult, Tier, connect
from kvtier.abi import attach
from kvtier.v1 import blocks_pb2
from kvtier.wire import tier_to_wire
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.committing import GARBAGE, OK, in_parts, requests, reserved
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.raw import RawClient, attached, channel_to, commit_request, refusal
from tests.integration.waiting import PATIENCE_S, eventually

METHOD = "/kvtier.v1.Blocks/Commits"
Code = grpc.StatusCode


async def opened(raw: RawClient) -> Any:
    """A stream on which one commit was refused."""
    stream: Any = raw.stubs.blocks.Commits(metadata=raw.metadata)
    await stream.write(blocks_pb2.CommitRequest(cache_id=1 << 40))
    assert (await stream.read()).refused
    return stream


def refusable(request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitRequest:
    """The same under a lease that nobody has."""
    wrong = blocks_pb2.CommitRequest()
    wrong.CopyFrom(request)
    wrong.lease_id, wrong.seq = 1 << 40, request.seq + 1
    return wrong


async def test_commits_are_done_and_answered_in_order(raw: RawClient, name: str) -> None:
    """The second is of a block under the first's, and repeated by a call it is answered so again."""
    cache = (await raw.open(name, budgets=sizes(host=4))).cache_id
    parts = in_parts(await reserved(raw, cache, chain(name, 2), 1), 1)
    stream: Any = raw.stubs.blocks.Commits(metadata=raw.metadata)
    for part in (parts[0], refusable(parts[1]), parts[1]):
        await stream.write(part)
    first, refused, second = [await stream.read() for _ in range(3)]
    assert (first.done.results, second.done.results) == (OK, OK)
    assert b"UNKNOWN_LEASE" in refused.refused
    assert await raw.call(raw.stubs.blocks.Commit, parts[1]) == second.done
    stream.cancel()


async def test_garbage_is_refused_and_the_stream_goes_on(raw: RawClient, name: str) -> None:
    async with channel_to(raw.address) as channel:
        stream: Any = channel.stream_stream(METHOD)(metadata=raw.metadata)
        await stream.write(GARBAGE)
        answer = blocks_pb2.CommitAnswer.FromString(await stream.read())
        assert b"BAD_ARGUMENT" in answer.refused
        (request,) = await requests(raw, name, 1)
        await stream.write(request.SerializeToString())
        assert blocks_pb2.CommitAnswer.FromString(await stream.read()).done.results == OK
        stream.cancel()


async def test_who_does_not_read_is_not_read_either(client: AsyncClient, raw: RawClient, name: str) -> None:
    """That its sending comes to a halt, and that the others go on meanwhile. By what it is halted does not show: with a
    daemon that did not wait for its answers to be taken it halted after about as many messages."""
    written = 0

    async def flood(stream: Any) -> None:
        nonlocal written
        while True:
            await stream.write(GARBAGE)
            written += 1

    async def now() -> int:
        return written

    async with channel_to(raw.address) as channel:
        stream: Any = channel.stream_stream(METHOD)(metadata=raw.metadata)
        flooding = asyncio.create_task(flood(stream))
        await eventually(now, lambda count: count > 100)
        cache = await client.open_cache(name, SPEC, budgets=sizes(host=8))
        before = -1
        while written != before:  # it comes to a halt; the others go on meanwhile
            before = written
            for turn in range(8):
                keys = chain(f"{name} {before} {turn}", 2)
                assert set(await cache.put(keys, blocks(keys), tier=Tier.HOST)) == {BlockResult.OK}
        assert not flooding.done()
        flooding.cancel()
        await asyncio.wait([flooding])


async def test_a_newer_stream_ends_the_one_before(raw: RawClient) -> None:
    older, newer = await opened(raw), await opened(raw)
    fault = await refusal(asyncio.wait_for(older.read(), PATIENCE_S))
    assert (fault.code, fault.reason) == (Code.ABORTED, "DISPLACED")
    newer.cancel()


async def test_it_ends_with_its_session(daemon: DaemonProcess) -> None:
    async with attached(daemon.address) as raw:
        stream = await opened(raw)
        raw.socket.send(attach.encode(attach.Bye()))
        assert (await refusal(asyncio.wait_for(stream.read(), PATIENCE_S))).code is Code.UNAUTHENTICATED
        raw.detach()


async def test_a_stop_ends_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host=4)
    async with attached(daemon.address) as raw:
        stream = await opened(raw)
        os.kill(daemon.pid, signal.SIGTERM)
        fault = await refusal(asyncio.wait_for(stream.read(), PATIENCE_S))
        assert (fault.code, fault.reason) == (Code.UNAVAILABLE, "SHUTTING_DOWN")
        raw.detach()
    assert await asyncio.to_thread(daemon.ended) == 0


async def test_a_right_that_is_taken_away_counts_from_the_next_commit_on(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    rule = '[[allow]]\nanonymous = true\ncaches = ["{}"]\nverbs = ["read", "write"]\n'
    file = tmp_path / "kvtierd.toml"
    file.write_text(rule.format("*"))
    daemon = start_daemon("--config", str(file), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=16)
    async with await connect(daemon.address) as owner, await connect(daemon.tcp_address, insecure=True) as client:
        await owner.open_cache("other", SPEC, budgets=sizes(host=4))
        cache = (await client.open_cache("other", SPEC, mapped=False)).info.cache_id
        link = await client._session.link(None)

        commits: dict[str, blocks_pb2.CommitRequest] = {}
        for name in ("before", "after"):
            reserve = blocks_pb2.ReserveRequest(cache_id=cache, tier=tier_to_wire(Tier.HOST), count=1)
            grant = await link.stubs.blocks.Reserve(reserve, metadata=link.metadata)
            commits[name] = commit_request(cache, grant, chain(name, 1))
        stream: Any = link.stubs.blocks.Commits(metadata=link.metadata)
        await stream.write(commits["before"])
        assert (await stream.read()).done.results == OK
        await asyncio.to_thread(file.write_text, rule.format("open"))
        os.kill(daemon.pid, signal.SIGHUP)

        async def log() -> str:
            return daemon.log

        await eventually(log, lambda text: "changed=allow" in text)
        await stream.write(commits["after"])
        assert b"NO_RIGHT" in (await stream.read()).refused
        stream.cancel()
