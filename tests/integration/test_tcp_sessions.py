"""Clients over TCP: who they are by their certificate, what their token is worth, and what becomes of them when the
network does."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvtier import (
    CallerError,
    DaemonUnavailable,
    Event,
    InvalidArgument,
    PermissionDenied,
    RetryableError,
    Tier,
    TlsFiles,
    connect,
)
from kvtier.abi.attach import SESSION_METADATA_KEY
from kvtier.errors import fault_of
from kvtier.transport import Link, LocalTransport, Stubs, TcpTransport
from kvtier.v1 import blocks_pb2, caches_pb2, session_pb2, session_pb2_grpc
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.raw import RawClient, refusal
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually, heard
from tests.tls import Authority

GRACE_S = 60.0
ATTENTIVE = ("--tcp-grace-seconds", "10")
"""For tests of silence: a tenth of it is the time between heartbeats."""
KEYS = chain("stored", 3)
RULES = """
[[allow]]
subjects = ["engine-1", "engine-2.example"]
caches = ["shared"]
verbs = ["read", "write", "watch"]
"""


@pytest.fixture
def engine(authority):
    return authority.issue("first.example", common_name="engine-1")


def start(start_daemon, authority, directory, *flags):
    served = authority.issue("127.0.0.1", common_name="daemon")
    (directory / "kvtierd.toml").write_text(RULES)
    return start_daemon(
        *("--config", str(directory / "kvtierd.toml"), "--listen-tcp", "127.0.0.1:0"),
        *("--tls-cert", str(served.cert), "--tls-key", str(served.key), "--tls-client-ca", str(served.ca)),
        *("--tcp-grace-seconds", str(GRACE_S)),
        *flags,
        host=8,
    )


@pytest.fixture
def daemon(start_daemon, authority, tmp_path):
    return start(start_daemon, authority, tmp_path)


async def fill(daemon):
    """Two caches of the daemon's own user, each with a chain."""
    async with await connect(daemon.address) as client:
        for name in ("shared", "private"):
            cache = await client.open_cache(name, SPEC, budgets=sizes(host=4))
            await cache.put(KEYS, blocks(KEYS), tier=Tier.HOST)


async def reserve(welcome, stubs):
    """A blank slot of the shared cache, by hand, since a client that maps nothing has no use for the verb: the cache's
    id and the lease's."""
    raw = RawClient("", None, welcome, stubs)  # type: ignore[arg-type]  # it has no attach socket
    cache_id = (await raw.open("shared")).cache_id
    return cache_id, (await raw.reserve(cache_id, Tier.HOST, 1)).lease_id


async def held(daemon):
    """Blank and orphaned host slots of the shared cache."""
    async with await connect(daemon.address) as client:
        stats = await tier_stats(client, "shared", Tier.HOST)
        return stats.blank, stats.orphaned


async def sessions(daemon):
    """How TCP sessions are shown."""
    async with await connect(daemon.address) as client:
        return [one.command for one in (await client.stats()).sessions if not one.pid]


async def test_files_that_do_not_fit_for_a_moment_do_not_end_a_client(daemon, engine, authority):
    """A certificate is replaced before its key, and the daemon starts anew between the two."""
    later = authority.issue("later.example", common_name="engine-2.example")
    async with await connect(f"tcp://{daemon.tcp_address}", tls=engine) as client:
        daemon.stop()
        engine.cert.write_bytes(later.cert.read_bytes())
        daemon.flags = [*daemon.flags, "--listen-tcp", daemon.tcp_address]
        await asyncio.to_thread(daemon.start)
        with pytest.raises(DaemonUnavailable):
            await client.caches(timeout=0.5)
        engine.key.write_bytes(later.key.read_bytes())
        await heard(client)
        assert await client.caches() == []


async def test_files_may_be_pipes(daemon, engine):
    """``--tls-key <(secret show key)``: they can be read once."""
    ends: list[int] = []

    def pipe(file):
        end, into = os.pipe()
        ends.append(end)
        os.write(into, file.read_bytes())
        os.close(into)
        return Path(f"/dev/fd/{end}")

    try:
        piped = TlsFiles(pipe(engine.cert), pipe(engine.key), pipe(engine.ca))
        async with await connect(f"tcp://{daemon.tcp_address}", tls=piped) as client:
            assert await client.caches() == []
    finally:
        for end in ends:
            os.close(end)


async def test_a_certificate_has_the_rights_of_its_rules(daemon, engine):
    await fill(daemon)
    async with await connect(f"tcp://{daemon.tcp_address}", tls=engine) as client:
        cache = await client.open_cache("shared", SPEC)
        assert (await cache.match(KEYS)).blocks == len(KEYS)
        new = chain("new", 1)
        await cache.put(new, blocks(new), tier=Tier.HOST)
        assert_bytes(new, await cache.get(new, tier=Tier.HOST))
        assert [one.name for one in await client.caches()] == ["shared"]
        async for item in client.watch(oldest=True):
            assert isinstance(item, Event)
            assert item.cache == "shared"
            if KEYS[-1] in item.keys:
                break
        for attempt in (client.open_cache("private", SPEC), client.stats()):
            with pytest.raises(PermissionDenied) as refused:
                await attempt
            assert refused.value.reason == "NO_RIGHT"
            assert "certificate engine-1, first.example" in str(refused.value)
        (shown,) = await sessions(daemon)
        assert shown.startswith("certificate engine-1, first.example at ipv4:127.0.0.1:")
        with pytest.raises(CallerError, match="not mapped"):
            _ = cache.arena


async def test_alternative_names_count_and_strangers_are_refused(daemon, authority):
    async with await connect(daemon.tcp_address, tls=authority.issue("engine-2.example")) as client:
        assert await client.caches() == []
    with pytest.raises(PermissionDenied, match=r"no \[\[allow\]\] rule of the daemon names certificate engine-3"):
        await connect(daemon.tcp_address, tls=authority.issue("engine-3"))


async def test_without_a_certificate_of_the_authority_nobody_gets_in(daemon, tmp_path):
    (tmp_path / "other").mkdir()
    foreign = Authority(tmp_path / "other").issue("first.example", common_name="engine-1")
    ours = tmp_path / "ca.pem"
    with pytest.raises(DaemonUnavailable):  # the daemon's certificate is not one that this client trusts
        await connect(daemon.tcp_address, tls=foreign)
    with pytest.raises(DaemonUnavailable):  # and the daemon does not trust this client
        await connect(daemon.tcp_address, tls=TlsFiles(foreign.cert, foreign.key, ours))
    with pytest.raises(DaemonUnavailable):
        await connect(daemon.tcp_address, insecure=True)


async def test_what_a_client_may_not_ask_for():
    files = TlsFiles(Path("c"), Path("k"), Path("a"))
    for address, options, field in (
        ("example.com:7000", {"insecure": True}, "address"),
        ("127.0.0.1:7000", {}, "tls"),
        ("127.0.0.1:7000", {"insecure": True, "tls": files}, "insecure"),
        ("tcp://somewhere", {"tls": files}, "address"),
        ("127.0.0.1:65536", {"insecure": True}, "address"),
        ("/run/kvtier", {"tls": files}, "address"),
        ("127.0.0.1:7000", {"tls": files}, "tls.ca"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await connect(address, **options)
        assert refused.value.field == field


def by_token(token):
    return ((SESSION_METADATA_KEY, token),)


async def answer(channel, token):
    try:
        await Stubs.over(channel).caches.List(caches_pb2.ListCachesRequest(), metadata=by_token(token), timeout=10)
    except grpc.aio.AioRpcError as error:
        return fault_of(error).reason
    return "answered"


async def test_a_token_is_worth_nothing_to_anybody_else(daemon, authority, engine):
    other = authority.issue("engine-2.example")
    async with (
        await connect(daemon.address) as local,
        await connect(daemon.tcp_address, tls=engine) as first,
        await connect(daemon.tcp_address, tls=other) as second,
    ):
        links: list[Link] = [await client._session.link() for client in (local, first, second)]
        answers = [[await answer(by.channel, of.welcome.token) for of in links] for by in links]
        assert answers == [["answered" if by is of else "FOREIGN_TOKEN" for of in links] for by in links]
        # Nor can the session be taken over with it, by either way in.
        with pytest.raises(PermissionDenied):
            await TcpTransport(daemon.tcp_address, other).attach(links[1].welcome.token, None)
        with pytest.raises(PermissionDenied):
            await LocalTransport(daemon.address).attach(links[1].welcome.token, None)
        with pytest.raises(PermissionDenied):
            await TcpTransport(daemon.tcp_address, engine).attach(links[0].welcome.token, None)


async def test_a_goodbye_gives_everything_back_at_once(daemon, engine):
    await fill(daemon)
    async with await connect(daemon.tcp_address, tls=engine) as client:
        link = await client._session.link()
        await reserve(link.welcome, link.stubs)
        assert await held(daemon) == (1, 0)
    assert await held(daemon) == (0, 0)
    assert await sessions(daemon) == []


async def test_a_broken_stream_is_resumed_and_keeps_its_leases(daemon, engine):
    await fill(daemon)
    async with await connect(daemon.tcp_address, tls=engine) as client:
        link = await client._session.link()
        cache_id, lease_id = await reserve(link.welcome, link.stubs)
        link.attach.close()
        await client.caches()
        again = await client._session.link()
        assert (again.session, again.welcome.token) == (link.session, link.welcome.token)
        assert again.welcome.resumed
        release = blocks_pb2.ReleaseRequest(cache_id=cache_id, lease_ids=[lease_id])
        await again.stubs.blocks.Release(release, metadata=again.metadata)


@asynccontextmanager
async def mute(daemon, tls):
    """A session whose client says hello and then nothing: a host that has vanished."""
    credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (tls.ca, tls.key, tls.cert)))
    async with grpc.aio.secure_channel(daemon.tcp_address, credentials) as channel:
        stub: Any = session_pb2_grpc.SessionsStub(channel)
        call = stub.Session()
        await call.write(session_pb2.SessionRequest(hello=session_pb2.Hello(version=1)))
        welcome = (await call.read()).welcome
        yield channel, call, welcome


async def the_end_of(call):
    while (await call.read()).HasField("heartbeat"):
        pass


async def test_a_silent_client_is_detached_and_what_it_held_stays_out_of_use(start_daemon, authority, engine, tmp_path):
    daemon = start(start_daemon, authority, tmp_path, *ATTENTIVE)
    await fill(daemon)
    async with mute(daemon, engine) as (channel, call, welcome):
        await reserve(welcome, Stubs.over(channel))
        await eventually(lambda: held(daemon), lambda now: now == (0, 1))
        # The channel still stands: it is the missing heartbeats that tell, in words of this transport.
        ended = await refusal(the_end_of(call))
        assert (ended.code, ended.reason) == (grpc.StatusCode.ABORTED, "NO_HEARTBEAT")
        assert "no heartbeat for 3 s; open Sessions.Session with this token" in ended.message
        listed = Stubs.over(channel).caches.List(caches_pb2.ListCachesRequest(), metadata=by_token(welcome.token))
        refused = await refusal(listed)
        assert refused.reason == "ORPHANED_SESSION"
        assert "open Sessions.Session with its token" in refused.message


async def test_after_the_grace_period_its_slots_are_others(start_daemon, authority, engine, tmp_path):
    daemon = start(start_daemon, authority, tmp_path, "--tcp-grace-seconds", "2")
    await fill(daemon)
    async with mute(daemon, engine) as (channel, _, welcome):
        await reserve(welcome, Stubs.over(channel))
        await eventually(lambda: held(daemon), lambda now: now == (0, 0))
        assert await answer(channel, welcome.token) == "UNKNOWN_SESSION"
        assert await sessions(daemon) == []


async def test_a_daemon_that_hangs_is_noticed_and_a_restarted_one_is_found(start_daemon, authority, engine, tmp_path):
    daemon = start(start_daemon, authority, tmp_path, *ATTENTIVE)
    await fill(daemon)
    daemon.flags[daemon.flags.index("127.0.0.1:0")] = daemon.tcp_address
    async with await connect(daemon.tcp_address, tls=engine) as client:
        cache = await client.open_cache("shared", SPEC)
        link = await client._session.link()
        daemon.pause()
        async with asyncio.timeout(PATIENCE_S):
            await link.attach.closed.wait()
        daemon.resume()
        await heard(client)
        assert (await cache.match(KEYS)).blocks == len(KEYS)
        await asyncio.to_thread(daemon.restart)
        await heard(client)
        assert (await cache.match(KEYS)).blocks == 0
        assert client.epoch == link.welcome.epoch


async def test_one_identity_has_so_many_sessions_and_others_are_unaffected(start_daemon, authority, engine, tmp_path):
    daemon = start(start_daemon, authority, tmp_path, "--max-sessions", "4")
    async with await connect(daemon.tcp_address, tls=engine):
        async with await connect(daemon.tcp_address, tls=engine):
            with pytest.raises(RetryableError) as refused:
                await connect(daemon.tcp_address, tls=engine)
            assert refused.value.reason == "TOO_MANY_OF_IDENTITY"
            assert "certificate engine-1, first.example has 2 sessions; one identity may have 2" in str(refused.value)
            async with await connect(daemon.tcp_address, tls=authority.issue("engine-2.example")):
                pass
            async with await connect(daemon.address), await connect(daemon.address):
                with pytest.raises(RetryableError, match=f"uid {os.getuid()} has 2 sessions"):
                    await connect(daemon.address)
        # One that has said goodbye makes room at once.
        async with await connect(daemon.tcp_address, tls=engine):
            pass


async def test_who_administers_one_cache_sees_the_sessions_there_and_no_others(start_daemon):
    rule = '{"anonymous": true, "caches": ["shared"], "verbs": ["admin"]}'
    daemon = start_daemon("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", rule, host=8)
    await fill(daemon)
    async with (
        await connect(daemon.address) as both,
        await connect(daemon.address) as other,
        await connect(daemon.tcp_address, insecure=True) as admin,
    ):
        for client in (both, other):
            private = await client.open_cache("private", SPEC)
            async with private.reserve(1, tier=Tier.HOST):
                shown = (await both.stats()).sessions
                assert {each.session_id for each in shown} == {each.session_id for each in (both, other, admin)}
                assert (await admin.stats()).sessions == ()
        shared, private = await both.open_cache("shared", SPEC), await both.open_cache("private", SPEC)
        async with shared.reserve(2, tier=Tier.HOST), private.reserve(1, tier=Tier.HOST):
            (seen,) = (await admin.stats()).sessions
            assert (seen.session_id, seen.leases, seen.held_slots) == (both.session_id, 1, 2)
            whole = next(each for each in (await other.stats()).sessions if each.session_id == both.session_id)
            assert (whole.leases, whole.held_slots) == (2, 3)


async def test_without_tls_and_without_a_rule_nobody_gets_in(start_daemon):
    daemon = start_daemon("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=8)
    with pytest.raises(PermissionDenied, match=r"no \[\[allow\]\] rule of the daemon names an anonymous client"):
        await connect(daemon.tcp_address, insecure=True)
