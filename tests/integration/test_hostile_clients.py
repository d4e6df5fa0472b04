"""A client that does its worst with what it was given: the daemon lives, and the others neither wait nor read lies.

It can spoil what is its own: who may map a cache writable may write all of it. That is the boundary of trust.
"""

import asyncio
import mmap
import os
import random
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from kvtier import BlockResult, Client, Tier, TierFull
from kvtier.abi import attach
from kvtier.abi.layout import BUCKET_BYTES, INDEXES_HERE, ArenaLayout
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, session_pb2
from kvtier.wire import tier_to_wire
from tests import packets
from tests.integration.actors import Actor
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.punching import protect, punch
from tests.integration.raw import AttachSocket, attached, channel_to, refusal
from tests.integration.seeing import cache_stats
from tests.integration.waiting import PATIENCE_S, eventually

Code = grpc.StatusCode


@pytest.fixture
async def bystander(client, name):
    """Another client with a cache of its own; whatever happened, its bytes are right in the end."""
    cache = await client.open_cache(f"{name[:100]}.bystander", SPEC, budgets=sizes(device=4, host=4, disk=16))
    keys = await put_chain(cache, "bystander", 8)
    yield cache
    assert_bytes(keys, await cache.get(keys))
    more = chain("afterwards", 8)
    assert set(await cache.put(more, blocks(more))) == {BlockResult.OK}
    assert_bytes(keys, await cache.get(keys))
    assert_bytes(more, await cache.get(more))


NASTY = "\x1b]0;owned\x07\x1b[2J\x1b[31m\r\n\u202eexe." + "x" * 10_000
SHORT = "import sys; exec(sys.argv[2])"  # so that what follows it is within what the daemon keeps of a command line
HOLDS = """import kvtier
client = kvtier.Client(address=sys.argv[3])
cache = client.open_cache(sys.argv[4])
lease = cache.reserve(4, kvtier.Tier.HOST)
print("holds", flush=True)
sys.stdin.read()"""


async def test_no_terminal_obeys_a_clients_command_line(daemon, client, name):
    """It is clean wherever the daemon tells it: in statistics, in leases, in the refusal of whoever wants its slots."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4, disk=16))
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SHORT, NASTY, HOLDS, daemon.address, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and await holder.stdout.readline() == b"holds\n"
        with pytest.raises(TierFull) as full:
            async with cache.reserve(1, Tier.HOST, timeout=PATIENCE_S):
                pass
        told = [*(await client.stats()).sessions, *(await client.leases()), *full.value.holders]
    finally:
        await holder.communicate(b"")
    commands = [one.command for one in told if one.pid == holder.pid]
    assert len(commands) == 3
    for text in commands:
        assert text.isprintable() and len(text) <= 256
    assert "?]0;owned??[2J?[31m???exe.xxx" in commands[0]


@pytest.fixture
async def mapped(raw, name):
    """A cache mapped writable by hand: its id and the descriptors."""
    cache_id = (await raw.open(name, budgets=sizes(device=4, host=4, disk=16))).cache_id
    with raw.socket.descriptors(cache_id, write=True) as fds:
        yield cache_id, fds


# -- with its memory ---------------------------------------------------------------------------------------------------
async def test_what_was_given_read_only_stays_so(bystander, mapped, raw):
    cache_id, fds = mapped
    with raw.socket.descriptors(cache_id, write=False) as read_only:
        for fd in (fds[attach.CONTROL], *read_only.values()):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as view:
                address = np.frombuffer(view, dtype=np.uint8).ctypes.data
                with pytest.raises(PermissionError):
                    protect(address, 4096)


def scribble(fd, rng):
    with mmap.mmap(fd, 0) as view:
        view[:] = rng.bytes(len(view))


def punch_out(fd, rng):
    punch(fd, 0, os.fstat(fd).st_size)


SPOILS = pytest.mark.parametrize("spoil", [scribble, punch_out])


@SPOILS
async def test_a_spoilt_cache_is_its_own_loss(client, bystander, mapped, raw, name, spoil):
    """Over slots READY, blank and free, while they are moved down to the disk and up again."""
    cache_id, fds = mapped
    own = await client.open_cache(name, SPEC)
    keys, rng = chain(name, 3), np.random.default_rng(1)
    await own.put(keys, blocks(keys), tier=Tier.HOST)
    await raw.reserve(cache_id, Tier.HOST, 1)
    # What it wrote is what is copied; a checksum is taken on the way to the disk and says nothing of before.
    for tier in (Tier.DISK, Tier.DEVICE, Tier.HOST, Tier.DISK):
        for segment in (attach.HOST, attach.DEVICE):
            spoil(fds[segment], rng)
        assert set(await own.move(keys, tier)) == {BlockResult.OK}
    spoilt = await own.get(keys)
    assert len(spoilt) == 3
    fresh = await put_chain(own, f"{name} fresh", 2)
    assert_bytes(fresh, await own.get(fresh))
    assert (await client.stats()).problems == ()


async def test_slots_scribbled_while_they_are_copied_hurt_nobody_else(client, bystander, mapped, name):
    """Also what the disk has just been read into: the checksum then fails, and the block is lost as if the disk had
    spoilt it. That is a miss of this cache and a quarantined slot of its own budget, and nothing of anybody else."""
    own = await client.open_cache(name, SPEC)
    stop, rng = threading.Event(), np.random.default_rng(1)

    def scribble_on():
        while not stop.is_set():
            for segment in (attach.HOST, attach.DEVICE):
                scribble(mapped[1][segment], rng)

    thread = asyncio.create_task(asyncio.to_thread(scribble_on))
    try:
        for index in range(8):
            keys = await put_chain(own, f"{name} {index}", 4)
            await own.move(keys, Tier.DISK)
            assert len(await own.get(keys)) <= 4
    finally:
        stop.set()
        await thread
    quarantined = {tier.tier: tier.quarantined for tier in (await cache_stats(client, name)).tiers}
    assert (quarantined[Tier.DEVICE], quarantined[Tier.HOST]) == (0, 0)


# -- on the attach socket ----------------------------------------------------------------------------------------------
HELLO = packets.hello()
GARBAGE = {
    "empty": b"",
    "zeros": bytes(100),
    "text": b'{"op": "hello", "version": 1}',
    "half a message": HELLO[: len(HELLO) // 2],
    "unknown message": b"\xa2\x06\x00",
    "deep": b"\x0b" * 30_000,
    "no version": packets.of_client(hello=session_pb2.Hello()),
    "future version": packets.of_client(hello=session_pb2.Hello(version=2)),
    "not UTF-8": HELLO + b"\x0a\x04\x12\x02\xff\xfe",
    "bad token": packets.hello("../../etc/passwd"),
    "unknown token": packets.hello("0" * 32),
    "heartbeat": packets.of_client(heartbeat=session_pb2.Heartbeat()),
    "map before hello": packets.map_cache(1, write=True),
    "call before hello": packets.call(1, "/kvtier.v1.Admin/Stats", b""),
    "largest": packets.hello("x" * (attach.MAX_MESSAGE - 16)),
    "too long": packets.hello("x" * attach.MAX_MESSAGE),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=list(GARBAGE))
async def test_garbage_on_the_attach_socket_ends_that_connection(daemon, bystander, data):
    with AttachSocket(daemon.address) as sock:
        sock.send(data)
        answer, _ = sock.receive()
        if answer:
            assert isinstance(packets.reply(answer), session_pb2.AttachFailure)
            assert sock.receive() == (b"", [])


@pytest.mark.parametrize("data", [b"{}", HELLO, GARBAGE["heartbeat"], GARBAGE["unknown message"], GARBAGE["too long"]])
async def test_garbage_after_the_hello_detaches_the_session(client, daemon, bystander, data):
    with AttachSocket(daemon.address) as sock:
        welcome = sock.hello()
        assert isinstance(welcome, session_pb2.Welcome)
        sock.send(data)
        assert isinstance(packets.reply(sock.receive()[0]), session_pb2.AttachFailure)
        assert sock.receive() == (b"", [])
    sessions = {session.session_id: session.attached for session in (await client.stats()).sessions}
    assert sessions[welcome.session_id] is False
    with AttachSocket(daemon.address) as sock:
        sock.hello(welcome.token)
        sock.bye()


async def test_who_does_not_read_its_answers_is_hung_up_on(daemon, bystander):
    with AttachSocket(daemon.address) as sock:
        welcome = sock.hello()
        assert isinstance(welcome, session_pb2.Welcome)
        sock.sock.setblocking(False)
        question = packets.map_cache(2**60, write=True)

        async def ask():
            try:
                for _ in range(1000):
                    sock.send(question)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        await eventually(ask, bool)
    with AttachSocket(daemon.address) as sock:
        sock.hello(welcome.token)
        sock.bye()


async def test_descriptors_sent_along_are_not_kept(client, daemon, bystander):
    def held():
        return len(os.listdir(f"/proc/{daemon.pid}/fd"))

    keys = chain("bystander", 8)
    streamed = await client.open_cache(bystander.name, mapped=False)
    assert_bytes(keys, await streamed.get(keys))  # so that its gRPC has its descriptors
    before = held()
    for _ in range(20):
        with AttachSocket(daemon.address) as sock:
            socket.send_fds(sock.sock, [HELLO], [sock.sock.fileno()] * 50)
            assert isinstance(packets.reply(sock.receive()[0]), session_pb2.Welcome)
            sock.bye()
    await eventually(held, lambda count: count <= before)


async def test_too_many_connections_are_turned_away(start_daemon):
    daemon = start_daemon("--max-sessions", "8", host=4)  # half of them for one user
    async with opened_cache(daemon.address, "mine") as (_, cache):
        with ExitStack() as stack:
            silent = [stack.enter_context(AttachSocket(daemon.address)) for _ in range(100)]
            keys = await put_chain(cache, "mine", 2)
            answers: list[str] = []
            for sock in silent:
                try:
                    sock.send(HELLO)
                    data, _ = sock.receive()
                except OSError:
                    data = b""
                answer = packets.reply(data) if data else None
                answers.append(
                    answer.reason if isinstance(answer, session_pb2.AttachFailure) else type(answer).__name__
                )
            assert answers.count("Welcome") == 3
            assert answers.count("TOO_MANY_OF_IDENTITY") > 0
            assert answers.count("NoneType") > 0
            assert set(answers) == {"Welcome", "TOO_MANY_OF_IDENTITY", "NoneType"}
            assert_bytes(keys, await cache.get(keys))

        async def come():
            with AttachSocket(daemon.address) as sock:
                return sock.hello()

        # Those who hold nothing and hung up give way.
        await eventually(come, lambda answer: isinstance(answer, session_pb2.Welcome))


# -- on the gRPC socket ------------------------------------------------------------------------------------------------
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 1000,
        b"GET /healthz HTTP/1.1\r\nHost: kvtier\r\n\r\n",
        PREFACE[:10],
        PREFACE + random.Random(1).randbytes(5000),
        PREFACE + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00",
        random.Random(2).randbytes(100_000),
    ],
    ids=["zeros", "http/1.1", "half a preface", "noise behind a preface", "huge frame", "noise"],
)
async def test_garbage_on_the_grpc_socket(daemon, bystander, data):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(attach.socket_path(daemon.address, attach.RPC_SOCKET))
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have seen enough before the end
            sock.sendall(data)


@pytest.fixture
async def untyped(daemon, raw):
    """Calls any method with any bytes, under a session."""
    async with channel_to(daemon.address) as channel:

        def call(method, data):
            send: Any = channel.unary_unary(method)
            return send(data, metadata=raw.metadata, timeout=PATIENCE_S)

        yield call


async def test_bytes_that_are_no_message(bystander, untyped):
    services = [module.DESCRIPTOR.services_by_name for module in (blocks_pb2, caches_pb2, admin_pb2)]
    for service in [service for named in services for service in named.values()]:
        for method in service.methods_by_name:
            fault = await refusal(untyped(f"/{service.full_name}/{method}", b"\xff\xff\xff"))
            assert (method, fault.code, fault.detail.field) == (method, Code.INVALID_ARGUMENT, "request")


async def test_methods_that_are_not_there(bystander, untyped):
    for method in ("/kvtier.v1.Blocks/Format", "/kvtier.v2.Blocks/Match", "/", "/x"):
        assert (await refusal(untyped(method, b""))).code is Code.UNIMPLEMENTED


async def test_many_keys_of_which_none_is_stored_hold_nobody_up(client, bystander, mapped, raw):
    cache_id, _ = mapped
    keys = b"".join(chain("none", 16_384))
    request = blocks_pb2.AcquireRequest(
        cache_id=cache_id, tier=tier_to_wire(Tier.HOST), chains=[blocks_pb2.Chain(keys=keys)]
    )
    flood = [asyncio.create_task(raw.call(raw.stubs.blocks.Acquire, request)) for _ in range(8)]
    assert (await client.stats()).problems == ()
    for reply in await asyncio.gather(*flood):
        assert (reply.chains[0].groups[0].lease_id, reply.chains[0].matched) == (0, 0)


READS_HERE = pytest.mark.skipif(not INDEXES_HERE, reason="no reads without calls on this processor")
READS = 1200


@SPOILS
@READS_HERE
async def test_readers_of_a_cache_that_is_spoilt_get_its_garbage_and_others_get_theirs(
    daemon, client, raw, name, spoil
):
    budgets = sizes(host=16, disk=16)
    keys = chain("both", 8)
    spoilt, healthy = [await client.open_cache(f"{name}{index}", SPEC, budgets=budgets) for index in range(2)]
    for cache in (spoilt, healthy):
        await cache.put(keys, blocks(keys))
    await raw.open(spoilt.name)
    over = threading.Event()

    def go_on(action):
        while not over.is_set():
            action()

    def read(cache, *, right):
        found = cache.get(keys)
        assert [len(block) for block in found] == [BLOCK_BYTES] * 8
        if right:
            assert_bytes(keys, found)

    rng = np.random.default_rng(1)
    with (
        raw.socket.descriptors(spoilt.info.cache_id, write=True) as fds,
        Client(daemon.address) as reading,
        ThreadPoolExecutor(3) as pool,
    ):
        bad, good = (reading.open_cache(cache.name, SPEC, write=False) for cache in (spoilt, healthy))
        running = [
            pool.submit(go_on, lambda: spoil(fds[attach.HOST], rng)),
            pool.submit(go_on, lambda: read(bad, right=False)),
            pool.submit(go_on, lambda: read(good, right=True)),
        ]

        def enough():
            return any(each.done() for each in running) or min(bad.reads.hits, good.reads.hits) >= READS

        try:
            await eventually(enough, bool)
        finally:
            over.set()
        for each in running:
            each.result(PATIENCE_S)
        assert (bad.reads.calls, good.reads.calls) == (0, 0)
    fresh = chain("afterwards", 4)
    assert set(await spoilt.put(fresh, blocks(fresh))) == {BlockResult.OK}
    assert_bytes(fresh, await spoilt.get(fresh))
    assert (await client.stats()).problems == ()


async def test_a_writer_stopped_in_the_middle_of_a_slot_holds_that_slot_and_nobody_up(daemon, client, name):
    slots = 8
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=slots, disk=32))
    keys = await put_chain(cache, "before", 4)
    with Actor("write_half", address=daemon.address, cache=name) as writer:
        slot = writer.says()["slot"]
        writer.signal(signal.SIGSTOP)
        # It is no slot of any block that anybody finds.
        assert cache.arena.generations(Tier.HOST, 0, np.array([slot]))[0] % 2 == 1
        for number in range(8):
            assert_bytes(keys, await cache.get(keys))
            others = chain(f"others {number}", 3)
            assert set(await cache.put(others, blocks(others))) == {BlockResult.OK}
            assert slot not in [place.host_slot for place in await cache.locate(others)]
            assert_bytes(others, await cache.get(others))
        async with cache.reserve(slots - 1, Tier.HOST) as rest:
            assert slot not in rest.slots
        writer.kill()
        await eventually(
            lambda: cache_stats(client, name), lambda stats: not any(each.held + each.orphaned for each in stats.tiers)
        )
        async with cache.reserve(slots, Tier.HOST) as everything:
            assert slot in everything.slots


def reopened(fd):
    """A read-only descriptor's segment, writable: what the daemon's own user can do."""
    os.fchmod(fd, 0o600)
    try:
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    finally:
        os.fchmod(fd, 0o400)
    try:
        return np.frombuffer(mmap.mmap(writable, 0), np.uint8)
    finally:
        os.close(writable)


@READS_HERE
async def test_the_daemons_own_user_could_and_then_readers_ask(start_daemon):
    """The same uid is the same trust: it can write ``control``, too. As a machine might that died in the middle of it,
    it leaves every bucket odd; nobody waits for them."""
    daemon = start_daemon(host=8)
    async with opened_cache(daemon.address, "c") as (_, cache), attached(daemon.address) as raw:
        keys = await put_chain(cache, "odd", 4)
        assert_bytes(keys, await cache.get(keys))
        assert cache.reads.calls == 0
        await raw.open("c")
        with raw.socket.descriptors(cache.info.cache_id, write=False) as fds:
            control = reopened(fds[attach.CONTROL])
        layout = ArenaLayout.read(control, SPEC)
        index = control[layout.index_offset : layout.index_offset + layout.index_bytes].view(np.uint64)
        sequences = index.reshape(-1, BUCKET_BYTES // 8)[:, 0]
        sequences |= np.uint64(1)
        assert (await cache.match([*keys, bytes(32)])).blocks == 4
        assert await cache.prefix_length(keys) == 4
        assert [place.residency for place in await cache.locate(keys)] == [Tier.HOST.bit] * 4
        assert await cache.get(chain("strangers", 2)) == []
        assert cache.reads.calls == 4
        # A bucket that the daemon writes next is right again.
        before = sequences.copy()
        await cache.drop(keys)
        await cache.put(keys, blocks(keys))
        mended = sequences != before
        assert mended.any()
        assert (sequences[mended] % 2 == 0).all()
