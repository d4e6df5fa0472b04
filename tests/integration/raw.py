"""The wire by hand: an attach socket and stubs, for a client that wants to be wrong, or half gone, on purpose."""

import array
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvtier import CacheSpec, Tier
from kvtier.abi import attach
from kvtier.errors import Fault, fault_of
from kvtier.transport import Stubs
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2, caches_pb2, session_pb2
from kvtier.wire import budgets_to_wire, spec_to_wire, tier_to_wire
from tests import packets
from tests.integration.blocks import SPEC
from tests.integration.waiting import PATIENCE_S


class AttachSocket:
    """The client's end of an attach connection; blocking."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        try:
            self.sock.connect(attach.socket_path(address, attach.ATTACH_SOCKET))
        except OSError:
            self.sock.close()
            raise

    def send(self, data: bytes) -> None:
        self.sock.send(data)

    def receive(self) -> tuple[bytes, list[int]]:
        """A message and its descriptors, the caller's; (b"", []) where the daemon hung up."""
        try:
            data, ancillary, _, _ = self.sock.recvmsg(attach.MAX_MESSAGE + 1, socket.CMSG_SPACE(64))
        except ConnectionResetError:
            return b"", []
        fds = array.array("i")
        for _, _, packed in ancillary:
            fds.frombytes(packed)
        return data, fds.tolist()

    def hello(self, token: str | None = None) -> Any:
        """The welcome or the failure."""
        self.send(packets.hello(token))
        return packets.reply(self.receive()[0])

    def map(self, cache_id: int, *, write: bool) -> dict[str, int]:
        """Descriptors by segment name, the caller's."""
        return self.mapped(cache_id, write=write)[1]

    def mapped(self, cache_id: int, *, write: bool) -> tuple[session_pb2.MappedCache, dict[str, int]]:
        """What is answered besides, too."""
        self.send(packets.map_cache(cache_id, write=write))
        data, fds = self.receive()
        said = packets.reply(data)
        assert isinstance(said, session_pb2.MappedCache), said
        return said, dict(zip(said.fds, fds, strict=True))

    @contextmanager
    def descriptors(self, cache_id: int, *, write: bool) -> Iterator[dict[str, int]]:
        """The same as :meth:`map`, closed in the end."""
        fds = self.map(cache_id, write=write)
        try:
            yield fds
        finally:
            close_all(fds)

    def bye(self) -> None:
        self.send(packets.bye())
        assert self.receive() == (b"", [])

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class RawClient:
    """One session and its stubs. :meth:`detach` breaks its attach connection, :meth:`attach_again` comes back."""

    address: str
    socket: AttachSocket
    welcome: session_pb2.Welcome
    stubs: Stubs

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((attach.SESSION_METADATA_KEY, self.welcome.token),)

    async def call(self, method: Any, request: Message, *, timeout: float = PATIENCE_S) -> Any:
        return await method(request, metadata=self.metadata, timeout=timeout)

    async def refusal(self, method: Any, request: Message) -> Fault:
        return await refusal(self.call(method, request))

    async def open(
        self, name: str, spec: CacheSpec = SPEC, budgets: Mapping[Tier, int] | None = None
    ) -> caches_pb2.OpenResponse:
        request = caches_pb2.OpenRequest(name=name, spec=spec_to_wire(spec), budgets=budgets_to_wire(budgets or {}))
        reply: caches_pb2.OpenResponse = await self.call(self.stubs.caches.Open, request)
        return reply

    async def reserve(self, cache_id: int, tier: Tier, count: int) -> blocks_pb2.ReserveResponse:
        request = blocks_pb2.ReserveRequest(cache_id=cache_id, tier=tier_to_wire(tier), count=count)
        reply: blocks_pb2.ReserveResponse = await self.call(self.stubs.blocks.Reserve, request)
        return reply

    async def acquire(self, cache_id: int, tier: Tier, *chains: Sequence[bytes]) -> blocks_pb2.AcquireResponse:
        request = blocks_pb2.AcquireRequest(
            cache_id=cache_id,
            tier=tier_to_wire(tier),
            chains=[blocks_pb2.Chain(keys=b"".join(keys)) for keys in chains],
        )
        reply: blocks_pb2.AcquireResponse = await self.call(self.stubs.blocks.Acquire, request)
        return reply

    async def commit(
        self, cache_id: int, reserved: blocks_pb2.ReserveResponse, keys: Sequence[bytes]
    ) -> blocks_pb2.CommitResponse:
        """As a chain, in as many of the slots as there are keys."""
        reply: blocks_pb2.CommitResponse = await self.call(
            self.stubs.blocks.Commit, commit_request(cache_id, reserved, keys)
        )
        return reply

    async def store(self, cache_id: int, tier: Tier, keys: Sequence[bytes]) -> None:
        """A chain whose slots hold whatever bytes they hold, and which nobody holds afterwards."""
        request = commit_request(cache_id, await self.reserve(cache_id, tier, len(keys)), keys)
        request.release = True
        await self.call(self.stubs.blocks.Commit, request)

    def detach(self) -> None:
        self.socket.close()

    def attach_again(self) -> Any:
        self.socket = AttachSocket(self.address)
        return self.socket.hello(self.welcome.token)


def commit_request(
    cache_id: int, reserved: blocks_pb2.ReserveResponse, keys: Sequence[bytes], **fields: Any
) -> blocks_pb2.CommitRequest:
    return blocks_pb2.CommitRequest(
        cache_id=cache_id,
        lease_id=reserved.lease_id,
        slots=reserved.slots[: len(keys)],
        keys=b"".join(keys),
        parents=b"".join([ROOT_PARENT, *keys[:-1]]),
        **fields,
    )


def channel_to(address: str) -> grpc.aio.Channel:
    path = attach.socket_path(address, attach.RPC_SOCKET)
    return grpc.aio.insecure_channel(f"unix:{path}", options=(("grpc.use_local_subchannel_pool", 1),))


@asynccontextmanager
async def attached(address: str) -> AsyncIterator[RawClient]:
    """A session of this process. It says goodbye at the end, if it is attached then."""
    sock = AttachSocket(address)
    welcome = sock.hello()
    assert isinstance(welcome, session_pb2.Welcome), welcome
    async with channel_to(address) as channel:
        client = RawClient(address, sock, welcome, Stubs.over(channel))
        try:
            yield client
        finally:
            if client.socket.sock.fileno() >= 0:
                client.socket.bye()
            client.socket.close()


async def refusal(call: Awaitable[object]) -> Fault:
    """With what a call is refused; fails where it is not."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return fault_of(error)
    raise AssertionError(f"not refused, but answered {answer!r}")


def close_all(fds: Mapping[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)
