"""``Blocks.Commits``: commits over one stream, each as good as a call of its own; and the client's way with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from kvtier import AsyncClient, BlockResult, Tier, connect
from kvtier.abi import attach
from kvtier.commits import CommitStream
from kvtier.rpc_errors import fault_of
from kvtier.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2
from kvtier.wire import tier_to_wire
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.raw import RawClient, attached, channel_to, commit_request, refusal
from tests.integration.waiting import PATIENCE_S, eventually

METHOD = "/kvtier.v1.Blocks/Commits"
OK = bytes([common_pb2.BLOCK_RESULT_OK])
GARBAGE = b"\xff" * 4096
Code = grpc.StatusCode


class Blocks:
    """The stubs of a session. Counts streams and unary commits; ``bend`` makes another stream of the one opened."""

    def __init__(self, raw: RawClient, bend: Callable[[Any], Any] = lambda stream: stream) -> None:
        self._stubs = raw.stubs.blocks
        self._bend = bend
        self.streams = 0
        self.unary = 0

    def Commits(self, **named: Any) -> Any:
        self.streams += 1
        return self._bend(self._stubs.Commits(**named))

    def Commit(self, request: blocks_pb2.CommitRequest, **named: Any) -> Any:
        self.unary += 1
        return self._stubs.Commit(request, **named)


def over(stubs: Blocks, raw: RawClient) -> CommitStream:
    return CommitStream(cast("blocks_pb2_grpc.BlocksAsyncStub", stubs), raw.metadata)


class Deaf:
    """A stream that breaks when the first answer comes, which nobody hears."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.write = stream.write
        self.cancel = stream.cancel

    async def read(self) -> None:
        await self._stream.read()
        raise asyncio.InvalidStateError("broken")


async def reserved(raw: RawClient, cache: int, keys: list[bytes], seq: int) -> blocks_pb2.CommitRequest:
    """A commit of all keys that ends its lease."""
    request = commit_request(cache, await raw.reserve(cache, Tier.HOST, len(keys)), keys)
    request.release, request.seq = True, seq
    return request


async def requests(raw: RawClient, name: str, count: int) -> list[blocks_pb2.CommitRequest]:
    cache = (await raw.open(name, budgets=sizes(host=64))).cache_id
    return [await reserved(raw, cache, chain(f"{name} {index}", 1), index + 1) for index in range(count)]


async def opened(raw: RawClient) -> Any:
    """A stream on which one commit was refused."""
    stream: Any = raw.stubs.blocks.Commits(metadata=raw.metadata)
    await stream.write(blocks_pb2.CommitRequest(cache_id=1 << 40))
    assert (await stream.read()).refused
    return stream


async def test_commits_at_a_time_are_answered_each_over_one_stream(raw: RawClient, name: str) -> None:
    stubs = Blocks(raw)
    commits = over(stubs, raw)
    made = await requests(raw, name, 8)
    stored = chain(f"{name} 3", 1)
    made[5].keys = b"".join(stored)
    replies = await asyncio.gather(*(commits.commit(request, PATIENCE_S) for request in made))
    exists = bytes([common_pb2.BLOCK_RESULT_EXISTS])
    assert [reply.results for reply in replies] == [OK] * 5 + [exists] + [OK] * 2
    assert (stubs.streams, stubs.unary) == (1, 0)
    commits.close()


async def test_what_broke_off_is_repeated_by_a_call_and_not_doubled(raw: RawClient, name: str) -> None:
    stubs = Blocks(raw, Deaf)
    commits = over(stubs, raw)
    made = await requests(raw, name, 4)
    # Done again, the lease would be unknown.
    replies = await asyncio.gather(*(commits.commit(request, PATIENCE_S) for request in made[:3]))
    assert [reply.results for reply in replies] == [OK] * 3
    assert (await commits.commit(made[3], PATIENCE_S)).results == OK
    assert (stubs.streams, stubs.unary) == (1, 4)


async def test_a_daemon_without_the_stream_is_asked_for_it_once(
    raw: RawClient, daemon: DaemonProcess, name: str
) -> None:
    async with channel_to(daemon.address) as channel:
        absent = channel.stream_stream(
            "/kvtier.v1.Blocks/CommitsOfALaterDaemon",
            request_serializer=blocks_pb2.CommitRequest.SerializeToString,
            response_deserializer=blocks_pb2.CommitAnswer.FromString,
        )
        stubs = Blocks(raw, lambda _: absent(metadata=raw.metadata))
        commits = over(stubs, raw)
        for request in await requests(raw, name, 3):
            assert (await commits.commit(request, PATIENCE_S)).results == OK
        assert (stubs.streams, stubs.unary) == (1, 3)


@pytest.mark.parametrize("bend", [lambda stream: stream, Deaf])
async def test_commits_in_turn_are_done_in_turn_over_whatever_way(
    raw: RawClient, name: str, bend: Callable[[Any], Any]
) -> None:
    """The second is of a block under the first's."""
    commits = over(Blocks(raw, bend), raw)
    whole = await reserved(raw, (await raw.open(name, budgets=sizes(host=4))).cache_id, chain(name, 2), 1)
    parts = [blocks_pb2.CommitRequest(), blocks_pb2.CommitRequest()]
    for index, part in enumerate(parts):
        part.CopyFrom(whole)
        own = slice(index * 32, index * 32 + 32)
        part.slots[:], part.keys, part.parents = whole.slots[index : index + 1], whole.keys[own], whole.parents[own]
        part.release, part.seq = index == 1, index + 1
    waited: list[int] = []

    async def may_go(number: int) -> None:
        waited.append(number)
        await asyncio.sleep(0)

    replies = await commits.commit_in_turn(parts, PATIENCE_S, may_go)
    assert [reply.results for reply in replies] == [OK, OK]
    assert waited == [1]
    commits.close()


async def test_who_goes_away_leaves_the_stream_to_the_others(raw: RawClient, name: str) -> None:
    stubs = Blocks(raw)
    commits = over(stubs, raw)
    made = await requests(raw, name, 3)
    first, gone, last = (asyncio.create_task(commits.commit(request, PATIENCE_S)) for request in made)
    await first
    gone.cancel()
    assert (await last).results == OK
    with pytest.raises(asyncio.CancelledError):
        await gone
    # Whether it was done or not, its repeat is answered so.
    assert (await raw.call(raw.stubs.blocks.Commit, made[1])).results == OK
    assert (stubs.streams, stubs.unary) == (1, 0)
    commits.close()


async def test_a_commit_is_refused_as_by_a_call_and_the_stream_goes_on(raw: RawClient, name: str) -> None:
    stubs = Blocks(raw)
    commits = over(stubs, raw)
    wrong, right = await requests(raw, name, 2)
    lease, wrong.lease_id = wrong.lease_id, 1 << 40
    by_call = await raw.refusal(raw.stubs.blocks.Commit, wrong)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await commits.commit(wrong, PATIENCE_S)
    assert fault_of(caught.value) == by_call
    assert (by_call.code, by_call.reason) == (Code.NOT_FOUND, "UNKNOWN_LEASE")
    wrong.lease_id = lease
    for request in (wrong, right):
        assert (await commits.commit(request, PATIENCE_S)).results == OK
    assert (stubs.streams, stubs.unary) == (1, 0)
    commits.close()


async def test_a_client_puts_over_its_stream(client: AsyncClient, name: str) -> None:
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=8))
    keys = chain(name, 4)
    assert set(await cache.put(keys, blocks(keys), tier=Tier.HOST)) == {BlockResult.OK}
    link = client._session.live_link
    assert link is not None
    assert link.commits.open
    assert_bytes(keys, await cache.get(keys))


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
        assert (await link.commits.commit(commits["before"], PATIENCE_S)).results == OK
        await asyncio.to_thread(file.write_text, rule.format("open"))
        os.kill(daemon.pid, signal.SIGHUP)

        async def log() -> str:
            return daemon.log

        await eventually(log, lambda text: "changed=allow" in text)
        fault = await refusal(link.commits.commit(commits["after"], PATIENCE_S))
        assert (fault.code, fault.reason, fault.detail.field) == (Code.PERMISSION_DENIED, "NO_RIGHT", "write")
        assert link.commits.open
