"""Clients in processes of their own, to be stopped, killed or run as somebody else.

A part takes one JSON object from standard input, prints one when it is where it was asked to be, and then stays until
its standard input ends.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401  while it can be imported: asyncio does when it first needs a thread
import errno
import fcntl
import json
import mmap
import os
import pickle
import select
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import grpc.aio
import numpy as np

from kvtier import AsyncClient, Event, KvtierError, Tier, connect
from kvtier.abi import attach
from kvtier.arena import MappedArena
from kvtier.errors import fault_of
from kvtier.transport import Stubs
from kvtier.v1 import admin_pb2, blocks_pb2, events_pb2, session_pb2, transfer_pb2
from kvtier.wire import tier_to_wire
from tests import packets
from tests.integration.blocks import SPEC, block, chain, opened_cache, sizes
from tests.integration.punching import protect, punch
from tests.integration.raw import AttachSocket, attached, channel_to
from tests.integration.waiting import PATIENCE_S

NOBODY = 65534


class Actor:
    """A part being played, from the moment it says so. SIGKILLed at the end, if not before."""

    def __init__(
        self, part: str, *, module: str = "tests.integration.actors", pass_fds: Sequence[int] = (), **script: Any
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, part],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            text=True,
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(script) + "\n")
        self._process.stdin.flush()

    def says(self, within: float = PATIENCE_S * 2) -> dict[str, Any]:
        """What it prints; waits for it."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], within)
        line = self._process.stdout.readline() if readable else ""
        assert line, f"the actor says nothing; exit status {self._process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go_on(self, **order: Any) -> None:
        """Lets a part go on that waits for that, or for an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns as soon as the kernel says that the process is gone."""
        self._process.kill()
        readable, _, _ = select.select([self.pidfd], [], [], PATIENCE_S)
        assert readable

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(PATIENCE_S)
        os.close(self.pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


# -- the parts ---------------------------------------------------------------------------------------------------------


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def _become(uid: int, gids: Sequence[int]) -> None:
    os.setgroups(list(gids))
    os.setgid(gids[0] if gids else uid)
    os.setuid(uid)


async def _stay() -> None:
    await asyncio.to_thread(sys.stdin.read)


async def hold(
    address: str, cache: str, reserve: Mapping[str, int], acquire: Mapping[str, list[Any]], detach: bool = False
) -> None:
    """Reserves so many slots by tier, acquires chains ([name, length] by tier); then perhaps loses its connection."""
    async with attached(address) as client:
        cache_id = (await client.open(cache)).cache_id
        client.socket.map(cache_id, write=True)  # it could touch what it leases
        slots = {tier: list((await client.reserve(cache_id, Tier[tier], n)).slots) for tier, n in reserve.items()}
        for tier, (name, length) in acquire.items():
            (got,) = (await client.acquire(cache_id, Tier[tier], chain(name, length))).chains
            assert len(got.groups[0].slots) == length
        if detach:
            client.detach()
        _say(session=client.welcome.session_id, token=client.welcome.token, slots=slots)
        await _stay()


async def send_half(address: str, cache: str, messages: Sequence[str]) -> None:
    """Begins a put through a stream, with messages as they are on the wire, in hex, and never ends it."""
    async with attached(address) as client:
        await client.open(cache)
        call = client.stubs.transfer.Put(metadata=client.metadata)
        for message in messages:
            await call.write(transfer_pb2.PutChunk.FromString(bytes.fromhex(message)))
        _say(session=client.welcome.session_id)
        await _stay()


async def steal(address: str, token: str) -> None:
    """Comes with a token that is not its own to the attach socket, then to gRPC."""
    with AttachSocket(address) as sock:
        sock.send(packets.hello(token))
        data, _ = sock.receive()
        answer = packets.reply(data)
    async with channel_to(address) as channel:
        rpc = await _stats(channel, token)
    _say(attach=answer.reason if isinstance(answer, session_pb2.AttachFailure) else "welcome", rpc=rpc)
    await _stay()


async def stare(address: str) -> None:
    """Opens a watch, reads one batch and nothing more."""
    async with attached(address) as client:
        stream = client.stubs.events.Watch(events_pb2.WatchRequest(heartbeat_ns=10_000_000), metadata=client.metadata)
        await stream.read()
        _say(session=client.welcome.session_id)
        await _stay()


async def be_foreign(address: str, token: str, fds: Mapping[str, int]) -> None:
    """As nobody: tries both sockets, and to open the inherited descriptors again for writing."""
    _become(NOBODY, [])
    connects = {name: _connect(address, name) for name in (attach.ATTACH_SOCKET, attach.RPC_SOCKET)}
    hello = None
    if connects[attach.ATTACH_SOCKET] == "connected":
        with AttachSocket(address) as sock:
            answer = sock.hello()
            hello = answer.reason if isinstance(answer, session_pb2.AttachFailure) else "welcome"
    async with channel_to(address) as channel:
        rpc = {"no token": await _stats(channel, None), "stolen token": await _stats(channel, token)}
    _say(connects=connects, hello=hello, rpc=rpc, reopened={name: _reopen(fd) for name, fd in fds.items()})
    await _stay()


async def be_hostile(address: str, cache: str, daemon: int) -> None:
    """As nobody, who may write this cache: tries all that could spoil more than its slots' bytes."""
    _become(NOBODY, [])
    async with attached(address) as client:
        fds = client.socket.map((await client.open(cache)).cache_id, write=True)
        control, data = fds[attach.CONTROL], fds[attach.HOST]
        size = os.fstat(data).st_size
        tries: Mapping[str, Callable[[], object]] = {
            "shrink data": lambda: os.ftruncate(data, size // 2),
            "grow data": lambda: os.ftruncate(data, size * 2),
            "seal data": lambda: fcntl.fcntl(data, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            "open data again": lambda: _open_again("self", data),
            "shrink control": lambda: os.ftruncate(control, 0),
            "write control": lambda: os.pwrite(control, b"x", 0),
            "punch control": lambda: punch(control, 0, 4096),
            "map control writable": lambda: mmap.mmap(control, 4096).close(),
            "protect control no more": lambda: _protect_no_more(control),
            "change control's mode": lambda: os.fchmod(control, 0o666),
            "open control again": lambda: _open_again("self", control),
            "open it in the daemon": lambda: os.listdir(f"/proc/{daemon}/fd"),
        }
        ended = {what: _ending(attempt) for what, attempt in tries.items()}
        punch(data, 0, size)  # that is its right: they are its cache's bytes
        _say(ended=ended)
        await _stay()


async def write_half(address: str, cache: str) -> None:
    """Reserves a slot, and writes half of it; then it is stopped."""
    async with attached(address) as client:
        cache_id = (await client.open(cache)).cache_id
        fds = client.socket.map(cache_id, write=True)
        reserved = await client.reserve(cache_id, Tier.HOST, 1)
        arena = MappedArena(fds, write=True, spec=SPEC)
        arena.view(Tier.HOST, 0, reserved.slots[0], write=True)[0][:] = 0xEE
        _say(slot=reserved.slots[0])
        await _stay()


async def keep_filling(address: str, cache: str, count: int) -> None:
    """Reserves slots, and writes all of them again and again; when it may go on, says so after one more whole round."""
    async with attached(address) as client:
        cache_id = (await client.open(cache)).cache_id
        fds = client.socket.map(cache_id, write=True)
        reserved = await client.reserve(cache_id, Tier.HOST, count)
        arena = MappedArena(fds, write=True, spec=SPEC)
        asked = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        _say(session=client.welcome.session_id)
        while True:
            whole = asked.done()
            for slot in reserved.slots:
                for part in arena.view(Tier.HOST, 0, slot, write=True):
                    part[:] = 0xEE
            if whole:
                break
            await asyncio.sleep(0)
        _say(written=count)
        await _stay()


async def plan(address: str, cache: str, leases: Sequence[int]) -> None:
    """A scheduler: reserves so many host slots a lease, and hands out a ticket of each."""
    async with opened_cache(address, cache) as (_, opened):
        reserved = [await opened.reserve(count, Tier.HOST) for count in leases]
        _say(tickets=[pickle.dumps(lease.ticket()).hex() for lease in reserved], slots=[one.slots for one in reserved])
        await _stay()


async def work(address: str, cache: str, tickets: Sequence[str]) -> None:
    """A worker: joins leases, and fills and commits their slots as it is told, a part of a slot at a time."""
    async with opened_cache(address, cache) as (_, opened):
        leases = [await opened.join(_ticket(text)) for text in tickets]
        _say(blank=[lease.blank for lease in leases], slots=[lease.slots for lease in leases])
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            lease, at, key = leases[order["lease"]], order["at"], bytes.fromhex(order["key"])
            for number, part in enumerate(lease.view(at)):
                if number in order["parts"]:
                    start = sum(before.nbytes for before in lease.view(at)[:number])
                    part[:] = block(key)[start : start + part.nbytes]
            results = await lease.commit([key], at=[at]) if order["commit"] else []
            _say(results=[result.name for result in results])


async def be_somebody(address: str, uid: int, gids: Sequence[int], tries: Sequence[tuple[str, str]]) -> None:
    """As another user: tries things, each with a cache, and tells how each ended."""
    _become(uid, gids)
    try:
        client = await connect(address)
    except KvtierError as error:
        _say(attached=error.reason, told=str(error))
    else:
        async with client:
            _say(attached="welcome", ended=[await _try(client, what, cache) for what, cache in tries])
    await _stay()


async def keep_reading(address: str, cache: str) -> None:
    """As nobody: reads two blocks, and when it may go on reads them again, by memory and by a call."""
    _become(NOBODY, [])
    async with opened_cache(address, cache, write=False) as (_, opened):
        keys = chain("stored", 2)
        for _ in range(2):
            found = await opened.get(keys)
            try:
                async with opened.acquire(keys) as lease:
                    held = f"{lease.blocks} blocks"
            except KvtierError as error:
                held = error.reason
            _say(blocks=len(found), calls=opened.reads.calls, held=held)
            await asyncio.to_thread(sys.stdin.readline)


async def _try(client: AsyncClient, what: str, cache: str) -> str:
    try:
        return await _TRIES[what](client, cache)
    except KvtierError as error:
        return f"{error.reason}: {error}"


async def _opens(client: AsyncClient, name: str, *, write: bool) -> str:
    await (await client.open_cache(name, SPEC, budgets=sizes(host=4), write=write)).close()
    return "done"


async def _reads(client: AsyncClient, name: str) -> str:
    cache = await client.open_cache(name, SPEC, write=False)
    return f"{len(await cache.get(chain('stored', 2), tier=Tier.HOST))} blocks"


async def _reserves(client: AsyncClient, name: str) -> str:
    cache = await client.open_cache(name, SPEC, write=False)
    link = await client._session.link()
    request = blocks_pb2.ReserveRequest(cache_id=cache.info.cache_id, tier=tier_to_wire(Tier.HOST), count=1)
    return await _answer(link.stubs.blocks.Reserve(request, metadata=link.metadata))


async def _answer(call: Awaitable[Any]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return f"{fault_of(error).reason}: {fault_of(error).message}"
    return "done"


async def _lists(client: AsyncClient, _: str) -> str:
    return ",".join(sorted(cache.name for cache in await client.caches()))


def _ticket(text: str) -> Any:
    return pickle.loads(bytes.fromhex(text))  # noqa: S301  of the test


async def _joins(client: AsyncClient, ticket: str) -> str:
    wanted = _ticket(ticket)
    cache = await client.open_cache(wanted.cache, SPEC, write=False)
    link = await client._session.link()
    request = blocks_pb2.JoinRequest(cache_id=cache.info.cache_id, lease_id=wanted.lease_id, secret=wanted.secret)
    return await _answer(link.stubs.blocks.Join(request, metadata=link.metadata))


async def _asks_for_stats(client: AsyncClient, _: str) -> str:
    return ",".join(sorted(cache.name for cache in (await client.stats()).caches))


async def _asks_for_watchers(client: AsyncClient, _: str) -> str:
    stats = await client.stats()
    return f"{len(stats.watcher_stats)} of {stats.watchers}"


async def _watches_from_now(client: AsyncClient, cache: str) -> str:
    async with client.watch(caches=[cache] if cache else [], heartbeats=True, heartbeat_s=0.05) as watch:
        begins = watch.cursor
        return type(await anext(watch)).__name__ if begins is not None else "nowhere"


async def _watches(client: AsyncClient, caches: str) -> str:
    """Everything there ever was, up to the first event of a cache called ``last``."""
    seen: set[str] = set()
    watch = client.watch(oldest=True, caches=[name for name in caches.split(",") if name])
    async for item in watch:
        assert isinstance(item, Event), item
        seen.add(item.cache)
        if item.cache == "last":
            break
    await watch.aclose()
    return ",".join(sorted(seen))


async def _explains(client: AsyncClient, cache: str) -> str:
    """The first block that everybody's cache has: where it is seen, whose lease is seen, and how much of its past."""
    told = await client.explain(chain("stored", 1)[0], cache=cache or None)
    seen = ",".join(sorted(block.cache for block in told.blocks))
    whose = sorted({lease.pid for block in told.blocks for lease in block.leases})
    gone = [(each.cache, each.session_id > 0, each.pid) for each in told.departures]
    if gone:
        return f"gone {gone}"
    return f"{seen} leased by {whose} past {None if told.past is None else sorted({each.cache for each in told.past})}"


_TRIES: Mapping[str, Callable[[AsyncClient, str], Awaitable[str]]] = {
    "open": partial(_opens, write=False),
    "open writable": partial(_opens, write=True),
    "read": _reads,
    "reserve": _reserves,
    "join": _joins,
    "list": _lists,
    "stats": _asks_for_stats,
    "watchers": _asks_for_watchers,
    "watch from now": _watches_from_now,
    "watch": _watches,
    "explain": _explains,
}


def _connect(address: str, name: str) -> str:
    kind = socket.SOCK_SEQPACKET if name == attach.ATTACH_SOCKET else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as sock:
        try:
            sock.connect(attach.socket_path(address, name))
        except OSError as error:
            return type(error).__name__
    return "connected"


def _reopen(fd: int) -> str:
    return _ending(lambda: _open_again("self", fd)) or "opened"


def _open_again(process: str, fd: int) -> None:
    os.close(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR))


def _ending(attempt: Callable[[], object]) -> str:
    """The name of what the kernel refuses it with; empty where it does not."""
    try:
        attempt()
    except OSError as error:
        return type(error).__name__ if isinstance(error, PermissionError) else errno.errorcode[error.errno or 0]
    return ""


def _protect_no_more(fd: int) -> None:
    with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as view:
        protect(np.frombuffer(view, np.uint8).ctypes.data, 4096)


async def _stats(channel: grpc.aio.Channel, token: str | None) -> str:
    metadata = ((attach.SESSION_METADATA_KEY, token),) if token else ()
    try:
        await Stubs.over(channel).admin.Stats(admin_pb2.StatsRequest(), metadata=metadata, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return fault_of(error).code.name
    return "answered"


_PARTS: Mapping[str, Callable[..., Awaitable[None]]] = {
    part.__name__: part
    for part in (
        *(hold, keep_filling, write_half, send_half, steal, stare, plan, work),
        *(keep_reading, be_foreign, be_hostile, be_somebody),
    )
}


async def _play() -> None:
    assert SPEC.groups  # a foreign user may not be able to import anything any more
    await _PARTS[sys.argv[1]](**json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    asyncio.run(_play())
