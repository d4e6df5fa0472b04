"""A session heals: what is repeated, what is given back, what is lost, and what a caller is told."""

import asyncio
import errno
import inspect
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

import kvtier
from kvtier import Cache, arena
from kvtier.arena import MappedArena
from kvtier.transport.attached import attach_socket
from kvtier.v1 import blocks_pb2, session_pb2
from tests import packets
from tests.integration.waiting import eventually, heard
from tests.unit.client.fake_daemon import SPEC, Context, FakeDaemon, failing

KEYS = [bytes([n]) * 32 for n in range(4)]


@pytest.fixture
async def cache(client: kvtier.AsyncClient) -> Cache:
    return await client.open_cache("c", SPEC)


async def match(request: blocks_pb2.MatchRequest, context: Context) -> blocks_pb2.MatchResponse:
    span = blocks_pb2.GroupMatch(residency=bytes([1, 3]))
    return blocks_pb2.MatchResponse(blocks=2, groups=[span], as_of_event=blocks_pb2.Cursor(epoch=1, id=9))


async def reserve(request: blocks_pb2.ReserveRequest, context: Context) -> blocks_pb2.ReserveResponse:
    return blocks_pb2.ReserveResponse(lease_id=5, slots=range(request.count))


async def test_a_call_that_failed_on_the_way_is_repeated_under_its_number(daemon: FakeDaemon, cache: Cache) -> None:
    daemon.answers["Reserve"] = failing(2, grpc.StatusCode.UNAVAILABLE, reserve)
    async with cache.reserve(3) as lease:
        assert len(lease) == 3
    first, *others = daemon.calls["Reserve"]
    assert len(others) == 2
    assert all(other == first for other in others)
    assert first.seq > 0


async def test_calls_never_share_a_number(daemon: FakeDaemon, cache: Cache) -> None:
    daemon.answers["Reserve"] = reserve
    for _ in range(3):
        async with cache.reserve(1):
            pass
    numbers = [call.seq for verb in ("Open", "Reserve", "Release") for call in daemon.calls[verb]]
    assert len(numbers) == len(set(numbers)) == 7


async def test_a_refusal_is_not_repeated(daemon: FakeDaemon, cache: Cache) -> None:
    daemon.answers["Match"] = failing(1, grpc.StatusCode.INTERNAL, match)
    with pytest.raises(kvtier.DaemonError):
        await cache.match(KEYS)
    assert len(daemon.calls["Match"]) == 1


async def test_a_mapped_cache_is_opened_in_the_next_session_unasked_but_never_made(
    daemon: FakeDaemon, cache: Cache
) -> None:
    before = cache.arena
    daemon.known.clear()
    daemon.hang_up()
    await eventually(lambda: cache.arena is not before, bool)
    assert before.stale
    first, *others = [call.HasField("spec") for call in daemon.calls["Open"]]
    assert first and others and not any(others)


async def test_what_was_mapped_is_read_until_its_cache_is_open_or_cannot_be_opened(
    daemon: FakeDaemon, cache: Cache
) -> None:
    may_open, before, opened = asyncio.Event(), cache.arena, daemon.answers["Open"]

    async def slow(request: Message, context: Context) -> Any:
        await may_open.wait()
        return await opened(request, context)

    daemon.answers["Open"] = slow
    daemon.known.clear()
    daemon.hang_up()
    await daemon.until(lambda: len(daemon.calls["Open"]) == 2)
    assert not before.stale, "a daemon that still reads the cache keeps nobody from reading"
    daemon.answers["Open"] = failing(100, grpc.StatusCode.NOT_FOUND, opened)
    daemon.known.clear()
    daemon.hang_up()
    await eventually(lambda: before.stale, bool)
    assert cache.arena is before
    may_open.set()


async def test_what_was_mapped_is_not_read_once_the_next_cannot_be_mapped(
    daemon: FakeDaemon, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes there any more: it would say the same for ever."""
    before = cache.arena

    def out_of_memory(*args: object, **kwargs: object) -> MappedArena:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(arena, "MappedArena", out_of_memory)
    daemon.known.clear()
    daemon.hang_up()
    await eventually(lambda: before.stale, bool)
    monkeypatch.undo()
    daemon.answers["Match"] = match
    assert (await cache.match(KEYS)).blocks == 2
    assert cache.arena is not before


async def test_a_client_without_a_descriptor_left_attaches_again_when_it_has_one(
    daemon: FakeDaemon, client: kvtier.AsyncClient, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def scarce() -> socket.socket:
        nonlocal made
        made += 1
        if made <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return attach_socket()

    monkeypatch.setattr("kvtier.transport.attached.attach_socket", scarce)
    daemon.answers["Match"] = match
    daemon.hang_up()
    await daemon.until(lambda: len(daemon.hellos) == 2)
    await heard(client)
    assert (await cache.match(KEYS)).blocks == 2
    assert made > 3


@pytest.mark.parametrize("known", [True, False])
async def test_a_client_that_fails_inside_when_it_attaches_again_says_so_and_holds_nothing(
    known: bool,
    daemon: FakeDaemon,
    client: kvtier.AsyncClient,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug of ours, before it has said hello again or after: nobody else would attach, and calls waited in vain."""

    def broken(*args: object) -> Any:
        raise RuntimeError("a bug")

    if known:
        monkeypatch.setattr("kvtier.transport.Stubs.over", broken)
    else:
        monkeypatch.setattr("kvtier.arena.Binder.session_changed", broken)
        daemon.known.clear()
    daemon.hang_up()
    await eventually(lambda: client._session.live_link is None, bool)
    for call in (client.stats(timeout=3600), cache.drop(KEYS, timeout=3600)):
        with pytest.raises(kvtier.DaemonError, match=r"cannot attach again: RuntimeError\('a bug'\)") as caught:
            async with asyncio.timeout(10):
                await call
        assert caught.value.reason == "CLIENT_BROKEN"
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert [record.exc_info is not None for record in caplog.records if record.name == "kvtier.session"] == [True]
    await eventually(lambda: not daemon.is_attached, bool)


async def test_a_channel_that_closes_while_reads_are_told_costs_these_alone(
    daemon: FakeDaemon, client: kvtier.AsyncClient, cache: Cache
) -> None:
    """As where the connection has broken, and the old channel's time is up."""
    may_answer = asyncio.Event()

    async def slow(request: Message, context: Context) -> Any:
        await may_answer.wait()
        return blocks_pb2.TouchResponse()

    daemon.answers["Touch"] = slow
    cache.reader.recency.note(0, KEYS[:1], 0)
    telling = asyncio.create_task(cache.reader.recency.tell())
    await daemon.until(lambda: daemon.calls["Touch"])
    assert client._session.live_link is not None
    await client._session.live_link.channel.close()
    await telling
    may_answer.set()


async def test_a_commit_is_never_repeated_in_another_session(daemon: FakeDaemon, cache: Cache) -> None:
    daemon.answers |= {"Reserve": reserve, "Commit": failing(1, grpc.StatusCode.UNAUTHENTICATED, match)}
    lease = await cache.reserve(1)
    daemon.known.clear()
    with pytest.raises(kvtier.LeaseLost):
        await lease.commit(KEYS[:1])
    assert len(daemon.calls["Commit"]) == 1


async def test_leaving_the_block_by_an_exception_releases(daemon: FakeDaemon, cache: Cache) -> None:
    daemon.answers["Reserve"] = reserve
    with pytest.raises(ZeroDivisionError):
        async with cache.reserve(1):
            raise ZeroDivisionError
    assert len(daemon.calls["Release"]) == 1


async def test_closing_the_client_says_goodbye_and_breaking_off_does_not(daemon: FakeDaemon) -> None:
    async with await kvtier.connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        daemon.hang_up()
        await daemon.until(lambda: len(daemon.hellos) == 2)
        assert daemon.byes == 0
    await daemon.until(lambda: daemon.byes == 1)
    with pytest.raises(kvtier.ClientClosed):
        await cache.match(KEYS)


async def test_work_that_comes_after_the_end_is_not_begun(daemon: FakeDaemon) -> None:
    """A timer that was set before, of what was read last perhaps."""
    client = await kvtier.connect(daemon.address, timeout=5.0)
    await client.close()
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    late = work()
    client._session.spawn(late)
    await asyncio.sleep(0)
    assert (begun, inspect.getcoroutinestate(late)) == ([], inspect.CORO_CLOSED)


async def never(request: Any, context: Context) -> Any:
    await asyncio.Event().wait()


async def test_a_call_under_way_when_the_client_closes_is_told_so(daemon: FakeDaemon) -> None:
    daemon.answers["Match"] = never
    async with await kvtier.connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        call = asyncio.create_task(cache.match(KEYS))
        await daemon.until(lambda: daemon.calls["Match"])
    with pytest.raises(kvtier.ClientClosed):
        await call


@pytest.mark.parametrize("address", ["", "/tmp/" + "x" * 107, "http://127.0.0.1:7400"])
async def test_what_is_no_address_is_refused(address: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is not the working directory, though a daemon serves there."""
    monkeypatch.chdir(short_dir)
    async with FakeDaemon(short_dir):
        with pytest.raises(kvtier.InvalidArgument, match="address"):
            await kvtier.connect(address)


def failure(reason: str) -> bytes:
    return packets.of_daemon(failure=session_pb2.AttachFailure(reason=reason, message="as scripted"))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"not protobuf", kvtier.DaemonError),
        (packets.of_daemon(mapped=session_pb2.MappedCache()), kvtier.DaemonError),
        (failure("PERMISSION_DENIED"), kvtier.PermissionDenied),
        (failure("TOO_MANY_SESSIONS"), kvtier.RetryableError),
        (failure("BAD_VERSION"), kvtier.CallerError),
        (b"x" * (64 * 1024 + 1), kvtier.DaemonError),
        (b"x" * (80 * 1024), kvtier.DaemonUnavailable),
    ],
)
async def test_what_an_attach_can_be_told(daemon: FakeDaemon, reply: bytes, kind: type[Exception]) -> None:
    daemon.attach_replies = [reply]
    with pytest.raises(kind):
        await kvtier.connect(daemon.address)


CUDA = session_pb2.CudaMemory(uuid="0" * 32, nbytes=4096)


@pytest.mark.parametrize(
    "mapped",
    [
        session_pb2.MappedCache(),
        session_pb2.MappedCache(fds=["control"]),
        session_pb2.MappedCache(fds=["host", "device"]),
        session_pb2.MappedCache(fds=["device", "control"]),
        session_pb2.MappedCache(fds=["control", "disk"]),
        session_pb2.MappedCache(fds=["control", "host", "device"]),
        session_pb2.MappedCache(fds=["control", "cuda"]),
        session_pb2.MappedCache(fds=["control", "device"], cuda=CUDA),
        session_pb2.MappedCache(fds=["control", "cuda"], cuda=CUDA, unmapped={"device": "w"}),
        session_pb2.MappedCache(fds=["control", "device"], unmapped={"device": "w"}),
        session_pb2.MappedCache(fds=["control", "device"], unmapped={"disk": "w"}),
    ],
    ids=str,
)
async def test_descriptors_that_do_not_fit_the_message_are_closed(
    daemon: FakeDaemon, client: Any, mapped: session_pb2.MappedCache
) -> None:
    await client.open_cache("first", SPEC)
    daemon.mapped = mapped
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(kvtier.DaemonError):
        await client.open_cache("second", SPEC)
    left = set(os.listdir("/proc/self/fd")) - before  # what others left to the collector may go meanwhile
    assert left == set()


async def test_a_bad_specification_is_the_caller_s_argument(client: kvtier.AsyncClient) -> None:
    with pytest.raises(kvtier.InvalidArgument) as refusal:
        await client.open_cache("c", kvtier.CacheSpec("m", "float12", 16))
    assert refusal.value.field == "spec.dtype"


async def test_a_daemon_that_falls_silent_while_memory_is_asked_for_costs_the_timeout_and_no_more(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    daemon.silent = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(10):
        with pytest.raises(kvtier.DeadlineExceeded):
            await client.open_cache("c", SPEC, timeout=0.05)
    assert loop.time() - began < 3
