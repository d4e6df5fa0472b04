"""Checksums of blocks that move, or whose cache goes, while they are taken or while another call's are."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import blocks_pb2, caches_pb2
from kvtierd.service import validation
from kvtierd.service.servicers import blocks
from kvtierd.tiers.base import Bytes
from tests.integration.waiting import eventually
from tests.unit.service.rig import Client, attached, chain, config, refusal, running

FIRST, SECOND = chain(1), chain(1, seed=1)


class Gate:
    """Checksums are taken only once it is open. ``begun``: how many wait for that, or have; ``asked``: calls so far."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = self.asked = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    digest, keys = blocks._digest, validation.keys

    def late(parts: Sequence[Bytes]) -> bytes:
        gate.begun += 1
        assert gate.open.wait(30)
        return digest(parts)

    def counted(*arguments: Any, **options: Any) -> Any:
        gate.asked += 1
        return keys(*arguments, **options)

    monkeypatch.setattr(blocks, "_digest", late)
    monkeypatch.setattr(validation, "keys", counted)
    yield gate
    gate.open.set()


@pytest.fixture
async def client(short_dir: Path) -> AsyncIterator[Client]:
    """Of a cache with one slot."""
    async with running(config(short_dir, device=1, host=0)) as daemon, attached(daemon) as client:
        yield client


def asking(client: Client, cache: int) -> asyncio.Task[blocks_pb2.ChecksumsResponse]:
    request = blocks_pb2.ChecksumsRequest(cache_id=cache, keys=FIRST[0])
    return asyncio.create_task(client.call(client.blocks.Checksums, request))


async def test_a_block_that_leaves_while_another_call_is_at_it_has_no_checksum(client: Client, gate: Gate) -> None:
    """Its slot is another block's by the time that its turn has come."""
    cache = await client.open()
    await client.put(cache, FIRST)
    gate.asked = 0
    first = asking(client, cache)
    await eventually(lambda: gate.begun == 1, bool)
    second = asking(client, cache)
    await eventually(lambda: gate.asked == 2, bool)
    await client.call(client.blocks.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=FIRST[0]))
    await client.put(cache, SECOND)
    gate.open.set()
    assert [(await call).known for call in (first, second)] == [b"\0", b"\0"]


async def test_a_cache_that_is_removed_meanwhile_is_said_to_be_gone(client: Client, gate: Gate) -> None:
    cache = await client.open()
    await client.put(cache, FIRST)
    call = asking(client, cache)
    await eventually(lambda: gate.begun == 1, bool)
    await client.call(client.caches.Remove, caches_pb2.RemoveCacheRequest(name="cache", force=True))
    gate.open.set()
    code, _ = await refusal(call)
    assert code is grpc.StatusCode.NOT_FOUND
