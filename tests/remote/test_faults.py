"""Stores that refuse, fail, hang, lie or die: one of three errors in time, and never a wrong byte."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from kvtierd.tiers.remote.base import ABSENT, RemoteError, RemoteFull, RemoteRefused, RemoteStore, RemoteUnavailable
from kvtierd.tiers.remote.breaker import Guarded
from kvtierd.tiers.remote.opening import open_store
from kvtierd.tiers.remote.process import ProcessStore
from tests.integration.waiting import eventually, halt
from tests.remote.servers import KEYS, Server, free_ports, mooncake, mooncake_programs, seaweed

MIB: Final = 1 << 20
SECRET: Final = "another-secret"


def into_environment(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def calls_of(store: RemoteStore) -> dict[str, Callable[[], Awaitable[object]]]:
    async def listed() -> None:
        async for _ in store.listing("a/"):
            pass

    return {
        "exists": lambda: store.exists(["a/b"]),
        "get": lambda: store.get(["a/b"], [memoryview(bytearray(10))]),
        "put": lambda: store.put(["a/b"], [b"1234"]),
        "delete": lambda: store.delete(["a/b"]),
        "list": listed,
    }


async def each_call(store: RemoteStore) -> dict[str, RemoteError | None]:
    """How each call ends."""
    ends: dict[str, RemoteError | None] = {}
    for name, call in calls_of(store).items():
        ends[name] = None
        try:
            await call()
        except RemoteError as failed:
            ends[name] = failed
    return ends


@pytest.mark.parametrize(
    "wrong", [{"AWS_SECRET_ACCESS_KEY": SECRET}, {"AWS_ACCESS_KEY_ID": SECRET}], ids=["secret", "key"]
)
async def test_wrong_credentials_are_refused_and_not_told(
    seaweed_server: Server, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    into_environment(monkeypatch, {**seaweed_server.env, **wrong})
    for name, failed in (await each_call(open_store(seaweed_server.url))).items():
        assert isinstance(failed, RemoteRefused), name
        assert str(failed).startswith(f"{seaweed_server.url}: ")
        assert not [text for text in (SECRET, *KEYS.values()) if text in repr(failed) or failed.__cause__]


async def test_an_endpoint_without_tls_must_be_allowed(seaweed_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    into_environment(monkeypatch, {**seaweed_server.env, "AWS_ALLOW_HTTP": "false"})
    for failed in (await each_call(open_store(seaweed_server.url))).values():
        assert isinstance(failed, RemoteRefused)
        assert "AWS_ALLOW_HTTP=true" in str(failed)


@pytest.mark.parametrize("engine", ["s3", "mooncake"])
async def test_a_store_that_is_not_there_is_unavailable_at_once(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    if engine == "mooncake":
        mooncake_programs()
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    into_environment(monkeypatch, {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"})
    store = open_store({"s3": "s3://blocks", "mooncake": f"mooncake://127.0.0.1:{port}"}[engine])
    started = time.monotonic()
    ends = await each_call(store)
    for failed in ends.values():
        assert isinstance(failed, RemoteUnavailable)
        assert "cannot be reached" in str(failed)
    assert time.monotonic() - started < 30
    await store.close()


@pytest.mark.parametrize("engine", [seaweed, mooncake])
async def test_a_store_killed_in_mid_traffic_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, engine: Callable[[], AbstractContextManager[Server]]
) -> None:
    with engine() as server:
        into_environment(monkeypatch, server.env)
        bare = open_store(server.url)
        blocks = {f"blocks/{i}": random.randbytes(MIB) for i in range(8)}
        names = list(blocks)
        await bare.put(names, list(blocks.values()))  # a server that has just started takes its time
        store = Guarded(bare, timeout_s=3.0)
        rounds, ends = asyncio.Event(), list[RemoteUnavailable]()

        async def read() -> None:
            into = [memoryview(bytearray(MIB)) for _ in names]
            while True:
                try:
                    found = await store.get(names, into)
                except RemoteUnavailable as failed:
                    ends.append(failed)
                    return
                for name, nbytes, view in zip(names, found, into, strict=True):
                    assert nbytes == ABSENT or view == blocks[name]
                rounds.set()

        async def write() -> None:
            for i in range(10_000):
                try:
                    await store.put([f"more/{i}"], [blocks[names[0]]])
                except RemoteUnavailable as failed:
                    ends.append(failed)
                    return

        traffic = [asyncio.create_task(work()) for work in (read, read, write)]
        await rounds.wait()
        server.kill()
        await asyncio.wait_for(asyncio.gather(*traffic), 20)
        assert len(ends) == 3
        while not store.counts["exists"].refused:  # until its circuit is open
            with pytest.raises(RemoteUnavailable):
                await store.exists(names)
        assert store.problem
        await store.close()


async def test_a_silent_mooncake_stops_its_callers_alone() -> None:
    with mooncake() as server:
        master = server.processes[0]
        stores = [open_store(server.url) for _ in range(2)]
        await stores[0].put(["a"], [b"12345"])  # its process starts, which may take longer than a guarded call
        connected, late = (Guarded(store, timeout_s=2.0) for store in stores)
        halt(master.pid)
        for store in (connected, late):
            waiting = asyncio.create_task(store.exists(["a"]))
            turns = 0
            while not waiting.done():
                await asyncio.sleep(0.01)
                turns += 1
            assert isinstance(waiting.exception(), RemoteUnavailable)
            assert turns > 10, "the loop stood still"
        master.send_signal(signal.SIGCONT)
        for store in (connected, late):
            while True:
                try:
                    assert await store.exists(["a"]) == [True]
                    break
                except RemoteUnavailable:
                    await asyncio.sleep(0.05)
            await store.close()


def hosts(parent: int) -> list[int]:
    """The processes that have the stores of a process."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"remote.hosted" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_process_that_dies_is_replaced(shared_url: str) -> None:
    before = hosts(os.getpid())
    store = open_store(shared_url)
    (name,) = (random.randbytes(8).hex(),)
    await store.put([name], [b"12345"])
    reading = asyncio.create_task(store.get([name] * 1, [memoryview(bytearray(5))]))
    (pid,) = set(hosts(os.getpid())) - set(before)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RemoteUnavailable, match="process for the store has ended: SIGKILL"):
        await reading
    assert await store.exists([name]) == [True]
    await store.close()
    assert hosts(os.getpid()) == before


class Liar:
    """An HTTP server that answers every request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
            for piece in (self._answer[:-1], self._answer[-1:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)  # so that they arrive as two
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()


def lying(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> AbstractAsyncContextManager[ProcessStore]:
    return serving(Liar(answer), monkeypatch)


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessStore]:
    """A store whose endpoint is this server."""
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    into_environment(monkeypatch, {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"})
    store = open_store("s3://blocks/kvtier")
    try:
        yield store
    finally:
        await store.close()
        server.close()


def answer(status: str, body: bytes = b"", length: int | None = None) -> bytes:
    fields = {
        "Content-Length": len(body) if length is None else length,
        "ETag": '"1"',
        "Last-Modified": "Wed, 25 Nov 2026 19:00:00 GMT",
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def s3_error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEYS['AWS_ACCESS_KEY_ID']}</AWSAccessKeyId></Error>".encode()


@pytest.mark.parametrize(
    ("sent", "error", "reason"),
    [
        (answer("500 Internal Server Error", b"oops"), RemoteUnavailable, "it answered 500"),
        (answer("503 Slow Down", s3_error("SlowDown")), RemoteUnavailable, "it answered 503 SlowDown"),
        (answer("429 Too Many Requests"), RemoteUnavailable, "it answered 429"),
        (answer("403 Forbidden", s3_error("AccessDenied")), RemoteRefused, "it answered 403 AccessDenied"),
        (answer("400 Bad Request", s3_error("ExpiredToken")), RemoteRefused, "it answered 400 ExpiredToken"),
        (answer("301 Moved Permanently"), RemoteRefused, "another region"),
        (answer("507 Insufficient Storage"), RemoteFull, "it answered 507"),
        (answer("403 Forbidden", s3_error("XMinioStorageFull")), RemoteFull, "it answered 403 XMinioStorageFull"),
        (answer("200 OK", b"half", length=10), RemoteUnavailable, ": get: "),
        (b"\0\1\2 what is this\r\n\r\n", RemoteUnavailable, ": get: "),
        (b"", RemoteUnavailable, ": get: "),
    ],
)
async def test_an_answer_that_is_no_object_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, error: type[RemoteError], reason: str
) -> None:
    async with lying(sent, monkeypatch) as store:
        (into,) = (memoryview(bytearray(10)),)
        with pytest.raises(error, match=reason) as caught:
            await store.get(["a/b"], [into])
        assert into == bytes(10)
        assert not [secret for secret in KEYS.values() if secret in str(caught.value)]


async def test_a_bucket_that_is_not_there_refuses_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lying(answer("404 Not Found", s3_error("NoSuchBucket")), monkeypatch) as store:
        ends = await each_call(store)
        assert isinstance(ends["put"], RemoteRefused)
        assert "it answered 404 NoSuchBucket" in str(ends["put"])
        assert ends["exists"] is ends["get"] is ends["delete"] is None


HUGE: Final = 1 << 50
LIST: Final = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


@pytest.mark.parametrize(
    ("verb", "sent"),
    [
        ("put", answer("403 Forbidden", b"no", length=HUGE)),
        ("get", answer("403 Forbidden", b"no", length=HUGE)),
        ("get", answer("500 Internal Server Error", b"no", length=HUGE)),
        ("exists", answer("403 Forbidden", b"no", length=HUGE)),
        ("delete", answer("403 Forbidden", b"no", length=HUGE)),
        ("list", answer("200 OK", LIST, length=HUGE)),
    ],
)
async def test_a_length_beyond_all_memory_is_a_failed_call(
    monkeypatch: pytest.MonkeyPatch, verb: str, sent: bytes
) -> None:
    async with lying(sent, monkeypatch) as store:
        (call,) = [call for name, call in calls_of(store).items() if name == verb]
        with pytest.raises(RemoteError, match="it answered" if verb == "exists" else "has ended: SIGABRT"):
            await call()


async def test_a_body_without_an_end_takes_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\n")
        with suppress(OSError):
            while True:
                writer.write(bytes(MIB))
                await writer.drain()

    async with serving(pour, monkeypatch) as store:
        await store.open()
        assert len(hosts(os.getpid())) == 1
        before = resident_bytes(os.getpid())
        guarded = Guarded(store, timeout_s=2.0)
        with pytest.raises(RemoteUnavailable):
            await asyncio.gather(*(guarded.get([str(i)], [memoryview(bytearray(10))]) for i in range(32)))
        assert resident_bytes(os.getpid()) - before < 64 * MIB
        assert max(map(resident_bytes, hosts(os.getpid())), default=0) < 1200 * MIB


@pytest.mark.parametrize("other", ["localhost", "127.0.0.2"])
async def test_a_redirect_to_another_host_is_not_followed(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(answer("200 OK"))
        writer.close()

    bystander = await asyncio.start_server(hear, "0.0.0.0", 0)
    port = bystander.sockets[0].getsockname()[1]
    sent = answer("307 Temporary Redirect").replace(b"ETag", f"Location: http://{other}:{port}/x\r\nETag".encode())
    async with lying(sent, monkeypatch) as store:
        for failed in (await each_call(store)).values():
            assert isinstance(failed, RemoteError)
    bystander.close()
    assert not heard


@pytest.fixture
def file_for_directory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "store" / "a").mkdir(parents=True)
    yield tmp_path / "store"


async def test_a_directory_that_cannot_be_used_is_refused(file_for_directory: Path) -> None:
    store = open_store(f"file://{file_for_directory}")
    (file_for_directory / "a").rmdir()
    (file_for_directory / "a").write_bytes(b"a file where a directory must be")
    ends = await each_call(store)
    assert isinstance(ends["put"], RemoteRefused)
    assert "Not a directory" in str(ends["put"])
    with pytest.raises(RemoteRefused, match="File name too long"):
        await store.put(["x" * 300], [b"1"])


async def test_a_closed_store_starts_no_process(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    opening = asyncio.create_task(store.open())
    await eventually(lambda: hosts(os.getpid()), bool)
    await store.close()
    for call in (opening, store.exists(["a"])):
        with pytest.raises(RemoteUnavailable, match="it is closed"):
            await call
    assert not hosts(os.getpid())


async def test_a_call_that_is_cancelled_at_once_costs_others_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    await store.open()
    before = hosts(os.getpid())
    for _ in range(200):
        call = asyncio.create_task(store.exists(["a"]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert await store.exists(["a"]) == [False]
    (worker,) = store._workers
    assert not worker.calls, "each call was answered"
    assert hosts(os.getpid()) == before
    await store.close()


async def test_an_endpoint_may_have_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(Liar(answer("404 Not Found")), "::1", 0)
    endpoint = f"http://[::1]:{server.sockets[0].getsockname()[1]}"
    into_environment(monkeypatch, {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"})
    store = open_store("s3://blocks/kvtier")
    async with server:
        assert await store.exists(["a"]) == [False]
        await store.close()


async def test_a_directory_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    store = open_store((tmp_path / "link").as_uri())
    await store.put(["a/b"], [b"12"])
    assert [found.name async for found in store.listing("a/")] == ["a/b"]
    await store.close()
