"""Draining a cache's events like TensorRT-LLM's ``get_kv_cache_events``: created first, none twice, none lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier import (
    AsyncClient,
    Cache,
    CacheOptions,
    Client,
    InvalidArgument,
    PermissionDenied,
    RetryableError,
    Tier,
    connect,
    event_hashes,
)
from kvtier.types import fastest
from kvtier.v1 import events_pb2
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.raw import RawClient, attached
from tests.integration.waiting import eventually

STEP = SPEC.tokens_per_block
Json = dict[str, Any]


class Router:
    """What somebody who follows TensorRT-LLM makes of its events: level and priority of each block, by group."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str | int, tuple[int, int]]] = defaultdict(dict)
        self.created: dict[int, list[int]] = {}
        self.next_id = 0
        self.holes = 0

    def apply(self, events: list[Json]) -> None:
        for event in events:
            if event["event_id"] == 0:
                self.__init__()  # type: ignore[misc]
            self.holes += event["event_id"] - self.next_id
            self.next_id = event["event_id"] + 1
            self._apply(event["layer_group_id"], event["data"])

    def _apply(self, group: int, data: Json) -> None:
        known = self.blocks[group]
        match data["type"]:
            case "created":
                assert not known
                self.created[group] = data["num_blocks_per_cache_level"]
            case "stored":
                assert group in self.created, "stored before created"
                assert data["parent_hash"] is None or data["parent_hash"] in known
                for block in data["blocks"]:
                    assert block["block_hash"] not in known
                    known[block["block_hash"]] = block["cache_level"], block["priority"]
            case "updated":
                level, priority = known[data["block_hash"]]
                if data["cache_level"] is not None:
                    assert data["cache_level"]["old_value"] == level
                    level = data["cache_level"]["new_value"]
                if data["priority"] is not None:
                    assert data["priority"]["old_value"] == priority
                    priority = data["priority"]["new_value"]
                known[data["block_hash"]] = level, priority
            case "removed":
                for each in data["block_hashes"]:
                    del known[each]


async def assert_knows(router: Router, client: AsyncClient, cache: Cache) -> None:
    async def differences() -> list[object]:
        router.apply((await client.drain_trtllm(cache.name, wait=0.05)).events)
        there = {row.key.hex(): (fastest(row.residency), row.priority) async for row in cache.blocks()}
        known: dict[Any, Any] = router.blocks[0]
        return [key for key in there.keys() | known.keys() if there.get(key) != known.get(key)]

    await eventually(differences, lambda found: not found)


async def some_life(cache: Cache, name: str, chains: int = 6) -> None:
    for number in range(chains):
        keys = chain(f"{name}/{number}", 6)
        await cache.put(keys, blocks(keys))
    await cache.move(chain(f"{name}/0", 6), Tier.DISK)
    await cache.get(chain(f"{name}/0", 6))
    await cache.drop(chain(f"{name}/1", 1))


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon(device=16, host=32, disk=64)


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with await connect(daemon.address) as client:
        yield client


async def opened(client: AsyncClient, name: str = "llama") -> Cache:
    return await client.open_cache(name, SPEC, budgets=sizes(device=16, host=32, disk=64))


async def test_the_first_call_tells_of_what_is_there(client: AsyncClient) -> None:
    options = CacheOptions(event_hash="v1_block_key", keep_tokens=True)
    cache = await client.open_cache("llama", SPEC, budgets=sizes(device=8, host=8, disk=8), options=options)
    ids = list(range(1000, 1000 + 3 * STEP))
    prompt = cache.prompt(ids)
    await cache.put(prompt.keys, blocks([prompt.keys[:32]] * 3), prompt=prompt)
    packed = event_hashes("v1_block_key", ids, STEP)
    drained = await client.drain_trtllm("llama")
    assert drained.lost == 0
    created, stored = drained.events
    envelope = {"window_size": 2**31 - 1, "hash_algo": "v1_block_key", "layer_group_id": 0}
    assert created == envelope | {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [8, 8, 8]}}
    assert stored["event_id"] == 1 and stored["data"]["parent_hash"] is None
    assert [block["block_hash"] for block in stored["data"]["blocks"]] == [
        int.from_bytes(packed[start : start + 8], "big") for start in range(0, len(packed), 8)
    ]
    assert [token["token_id"] for block in stored["data"]["blocks"] for token in block["tokens"]] == ids
    assert (await client.drain_trtllm("llama", wait=0)).events == []


async def test_a_call_waits_until_something_happens(client: AsyncClient) -> None:
    cache = await opened(client)
    assert [each["data"]["type"] for each in (await client.drain_trtllm("llama")).events] == ["created"]
    waiting = asyncio.create_task(client.drain_trtllm("llama", wait=30))
    await asyncio.sleep(0.05)
    keys = chain("waited for", 2)
    await cache.put(keys, blocks(keys))
    async with asyncio.timeout(20):
        (stored, *_) = (await waiting).events
    assert [block["block_hash"] for block in stored["data"]["blocks"]] == [key.hex() for key in keys]


async def test_a_router_follows_life_and_a_killed_daemon(daemon: DaemonProcess, client: AsyncClient) -> None:
    cache, router = await opened(client), Router()
    await some_life(cache, "before")
    await assert_knows(router, client, cache)
    await some_life(cache, "after")
    await assert_knows(router, client, cache)
    daemon.kill()
    await asyncio.to_thread(daemon.start)
    cache = await opened(client)
    await some_life(cache, "another life")
    await assert_knows(router, client, cache)
    assert router.holes == 0


async def test_one_that_falls_behind_is_told_and_ends_up_right(start_daemon: StartDaemon) -> None:
    flags = ("--event-ring-bytes", "16KiB", "--event-log-bytes", "0", "--no-debug-checks")
    daemon = start_daemon(*flags, device=16, host=32, disk=64)
    async with await connect(daemon.address) as client:
        cache, router = await opened(client), Router()
        await assert_knows(router, client, cache)
        for number in range(40):
            await some_life(cache, f"{number}", chains=3)
        first = await client.drain_trtllm("llama")
        router.apply(first.events)
        lost = first.lost
        while (more := await client.drain_trtllm("llama", wait=0.1)).events:
            router.apply(more.events)
            lost += more.lost
        await assert_knows(router, client, cache)
        assert router.holes == lost > 0


async def test_each_session_and_each_cache_has_a_drain_of_its_own(daemon: DaemonProcess, client: AsyncClient) -> None:
    for name in ("a", "b"):
        cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4, disk=4))
        await cache.put(chain(name, 2), blocks(chain(name, 2)))
    async with await connect(daemon.address) as other:
        for each in (client, other):
            for name in ("a", "b"):
                _, stored = (await each.drain_trtllm(name)).events
                assert stored["data"]["blocks"][0]["block_hash"] == chain(name, 1)[0].hex()


async def test_calls_at_a_time_share_the_events(client: AsyncClient) -> None:
    cache = await opened(client)
    await client.drain_trtllm("llama")
    calls = [asyncio.create_task(client.drain_trtllm("llama", wait=0.5)) for _ in range(4)]
    await some_life(cache, "shared")
    ids = [event["event_id"] for drained in await asyncio.gather(*calls) for event in drained.events]
    assert ids == list(range(1, len(ids) + 1))


async def test_a_cache_that_is_not_there_yet(client: AsyncClient) -> None:
    assert (await client.drain_trtllm("llama", wait=0)).events == []
    await opened(client)
    assert [each["data"]["type"] for each in (await client.drain_trtllm("llama")).events] == ["created"]


async def test_what_makes_no_sense_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgument, match="wait"):
        await client.drain_trtllm("llama", wait=-1)
    with pytest.raises(InvalidArgument, match="name"):
        await client.drain_trtllm("no/name")


def test_without_an_event_loop(daemon: DaemonProcess) -> None:
    with Client(daemon.address) as client:
        cache = client.open_cache("llama", SPEC, budgets=sizes(device=4, host=4, disk=4))
        cache.put(chain("sync", 2), blocks(chain("sync", 2)))
        assert [each["data"]["type"] for each in client.drain_trtllm("llama").events] == ["created", "stored"]


async def test_an_answer_that_did_not_come_is_had_again(daemon: DaemonProcess, client: AsyncClient) -> None:
    cache = await opened(client)
    async with attached(daemon.address) as raw:
        first = await drained(raw)
        await some_life(cache, "told twice")
        some = await drained(raw, next_event_id=first.next_event_id, timeout_ns=10**9, max_events=3)
        assert some.next_event_id == first.next_event_id + 3
        assert await drained(raw, next_event_id=first.next_event_id) == some
        rest = await drained(raw, next_event_id=some.next_event_id)
        assert rest.next_event_id > some.next_event_id
        fault = await raw.refusal(raw.stubs.events.Drain, request(next_event_id=some.next_event_id - 1))
        assert (fault.code, fault.detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "next_event_id")
        again = await drained(raw)
        assert again.events.startswith('[{"event_id":0,"data":{"type":"created"')


async def test_what_nobody_drained_cannot_go_on(daemon: DaemonProcess) -> None:
    async with attached(daemon.address) as raw:
        fault = await raw.refusal(raw.stubs.events.Drain, request(next_event_id=7))
        assert (fault.code, fault.reason) == (grpc.StatusCode.NOT_FOUND, "NO_DRAIN")
        for field, value in (("max_events", 4097), ("timeout_ns", 3601 * 10**9)):
            fault = await raw.refusal(raw.stubs.events.Drain, request(**{field: value}))
            assert (fault.code, fault.detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_drains_are_few_and_end_with_their_session(daemon: DaemonProcess, client: AsyncClient) -> None:
    async with await connect(daemon.address) as other:
        for number in range(16):
            await other.drain_trtllm(f"cache-{number}", wait=0)
        with pytest.raises(RetryableError, match="at most 16"):
            await other.drain_trtllm("one-more", wait=0)
        assert (await client.stats()).watchers == 16
        waiting = asyncio.create_task(other.drain_trtllm("cache-0", wait=60))
        await asyncio.sleep(0.05)
    assert (await asyncio.gather(waiting, return_exceptions=True))[0] is not None
    await eventually(client.stats, lambda stats: stats.watchers == 0)


async def test_who_may_watch_may_drain_and_who_may_not_see_tokens_does_not(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    rules = '[[allow]]\nanonymous = true\ncaches = ["llama"]\nverbs = ["watch"]\n'
    (tmp_path / "kvtierd.toml").write_text(rules)
    flags = ("--config", str(tmp_path / "kvtierd.toml"), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure")
    daemon = start_daemon(*flags, device=8, host=8, disk=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("llama", SPEC, options=CacheOptions(keep_tokens=True))
        prompt = cache.prompt(list(range(STEP)))
        await cache.put(prompt.keys, blocks([prompt.keys[:32]]), prompt=prompt)
        async with await connect(f"tcp://{daemon.tcp_address}", insecure=True) as stranger:
            for who, tokens in ((client, STEP), (stranger, 0)):
                _, stored = (await who.drain_trtllm("llama")).events
                assert len(stored["data"]["blocks"][0]["tokens"]) == tokens
            with pytest.raises(PermissionDenied, match="the right to watch"):
                await stranger.drain_trtllm("other")


def request(**fields: Any) -> events_pb2.DrainRequest:
    return events_pb2.DrainRequest(name="llama", **fields)


async def drained(raw: RawClient, **fields: Any) -> events_pb2.DrainResponse:
    answer = await raw.call(raw.stubs.events.Drain, request(**{"timeout_ns": 10**9} | fields))
    assert isinstance(answer, events_pb2.DrainResponse)
    return answer
