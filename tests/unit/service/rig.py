"""A daemon inside the test's loop, and a client that speaks the raw protocols, so that it can be wrong on purpose."""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import pytest
from pydantic import ByteSize

from kvtier.abi import attach
from kvtier.abi.keys import ROOT_PARENT
from kvtier.abi.spec import CacheSpec
from kvtier.errors import fault_of
from kvtier.transport import Stubs
from kvtier.v1 import blocks_pb2, caches_pb2, common_pb2, session_pb2
from kvtier.wire import spec_to_wire
from kvtierd.config import Config
from kvtierd.service.daemon import Daemon
from tests import packets
from tests.integration import raw

SPEC = CacheSpec.single("model", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=128)
"""One page a block."""

SLOT_BYTES = SPEC.record_bytes(0)
DEVICE, HOST, DISK = common_pb2.TIER_DEVICE, common_pb2.TIER_HOST, common_pb2.TIER_DISK


def config(directory: Path, *, device: int | list[str] = 8, host: int = 16, disk: int = 0, **more: Any) -> Config:
    """Tier sizes in slots of ``SPEC``; of the device tier's, or the tables themselves as ``NAME=BYTES``."""
    sizes = {"host_bytes": host, "disk_bytes": disk}
    values: dict[str, Any] = {name: ByteSize(slots * SLOT_BYTES) for name, slots in sizes.items()}
    if isinstance(device, int):
        device = [f"stand-in={device * SLOT_BYTES}"] if device else []
    values["device"] = device
    values |= {"runtime_dir": directory / "run", "state_dir": directory / "state", "debug_checks": True}
    values["default_budget"] = "100%"  # so that a test says its sizes once
    values["max_reserved_fraction"] = 1.0
    return Config(**(values | more))


@asynccontextmanager
async def running(settings: Config) -> AsyncIterator[Daemon]:
    daemon = await Daemon.start(settings)
    try:
        yield daemon
    finally:
        assert await daemon.stop(), "the stop was not clean"


def chain(length: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{seed}:{index}".encode()).digest() for index in range(length)]


def parents_of(keys: Sequence[bytes]) -> bytes:
    return b"".join([ROOT_PARENT, *keys[:-1]])


class AttachSocket:
    """The client's end of an attach connection, without blocking the loop that the daemon runs on."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    async def connect(cls, address: str) -> Self:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, attach.socket_path(address, attach.ATTACH_SOCKET))
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self) -> bytes:
        """A message; empty at the end of the connection."""
        try:
            async with asyncio.timeout(10):
                return await asyncio.get_running_loop().sock_recv(self.sock, attach.MAX_MESSAGE + 1)
        except ConnectionResetError:
            return b""

    async def hello(self, token: str | None = None) -> Any:
        """The welcome or the failure."""
        await self.send(packets.hello(token))
        return packets.reply(await self.receive())

    def close(self) -> None:
        self.sock.close()


class Client:
    """One attached session and the stubs of its channel."""

    def __init__(
        self, sock: AttachSocket, welcome: session_pb2.Welcome, channel: grpc.aio.Channel, address: str = ""
    ) -> None:
        self.socket = sock
        self.address = address
        self.welcome = welcome
        self.channel = channel
        self.metadata = ((attach.SESSION_METADATA_KEY, welcome.token),)
        stubs: Any = Stubs.over(channel)
        self.caches, self.blocks, self.events = stubs.caches, stubs.blocks, stubs.events
        self.admin, self.transfer = stubs.admin, stubs.transfer

    async def open(
        self,
        name: str = "cache",
        budgets: Mapping[int, int] | None = None,
        options: caches_pb2.CacheOptions | None = None,
    ) -> int:
        budget_list = [caches_pb2.TierBudget(tier=tier, bytes=size) for tier, size in (budgets or {}).items()]  # type: ignore[arg-type]
        request = caches_pb2.OpenRequest(name=name, spec=spec_to_wire(SPEC), budgets=budget_list, options=options)
        response: caches_pb2.OpenResponse = await self.call(self.caches.Open, request)
        return response.cache_id

    async def call(self, method: Any, request: Any, timeout: float = 10) -> Any:
        return await method(request, metadata=self.metadata, timeout=timeout)

    async def refusal(self, method: Any, request: Any) -> tuple[grpc.StatusCode, common_pb2.ErrorDetail]:
        return await refusal(self.call(method, request))

    async def reserve(self, cache: int, count: int, tier: int = DEVICE, **more: Any) -> blocks_pb2.ReserveResponse:
        request = blocks_pb2.ReserveRequest(cache_id=cache, tier=tier, count=count, **more)  # type: ignore[arg-type]
        response: blocks_pb2.ReserveResponse = await self.call(self.blocks.Reserve, request)
        return response

    async def put(self, cache: int, keys: Sequence[bytes], tier: int = DEVICE, *, release: bool = True) -> int:
        """Stores a chain (its bytes are whatever the slots hold). Returns the lease."""
        reserved = await self.reserve(cache, len(keys), tier)
        done = await self.call(self.blocks.Commit, raw.commit_request(cache, reserved, keys))
        assert set(done.results) == {common_pb2.BLOCK_RESULT_OK}
        if release:
            await self.release(cache, reserved.lease_id)
        return reserved.lease_id

    async def release(self, cache: int, *leases: int) -> None:
        await self.call(self.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=leases))

    async def close(self) -> None:
        await self.channel.close()
        self.socket.close()


@asynccontextmanager
async def attached(daemon: Daemon) -> AsyncIterator[Client]:
    async with attached_to(daemon.address) as client:
        yield client


@asynccontextmanager
async def attached_to(address: str) -> AsyncIterator[Client]:
    """The same where a daemon is only starting."""
    sock = await AttachSocket.connect(address)
    welcome = await sock.hello()
    assert isinstance(welcome, session_pb2.Welcome)
    channel = raw.channel_to(address)
    client = Client(sock, welcome, channel, address)
    try:
        yield client
    finally:
        await client.close()


async def refusal(call: Any) -> tuple[grpc.StatusCode, common_pb2.ErrorDetail]:
    """The status and detail with which a call is refused; fails if it is not."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:  # a client may make another status of it
        await call
    return refused.value.code(), fault_of(refused.value).detail
