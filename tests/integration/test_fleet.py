"""Daemons that follow each other over mutual TLS: who has what, and what becomes of that when a peer goes."""

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kvtier import DeadlineExceeded, InvalidArgument, Mirrors, MirrorState, Tier, chain_keys, connect
from kvtier.wire import split_keys
from tests.integration.blocks import SPEC, assert_bytes, blocks, opened_cache, sizes
from tests.integration.test_cli import kvtier
from tests.integration.waiting import PATIENCE_S, eventually
from tests.remote.servers import free_ports

TOKENS = list(range(64))
PROMPT = ",".join(map(str, TOKENS))
CHAIN = split_keys(chain_keys(TOKENS, SPEC.tokens_per_block))
RULES = """
[[allow]]
subjects = ["{subject}"]
caches = ["{caches}"]
verbs = ["read", "watch"]
"""


@pytest.fixture
def served(start_daemon, authority, tmp_path):
    """Starts a daemon of a name that listens with TLS, and lets peers in by ``subject``."""

    def start(name, *peers, subject="here", caches="*", port=0, **slots):
        files = authority.issue("127.0.0.1", common_name=name)
        rules = tmp_path / f"{name}.toml"
        rules.write_text(RULES.format(subject=subject, caches=caches))
        return start_daemon(
            *("--config", str(rules), "--listen-tcp", f"127.0.0.1:{port}"),
            *("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(files.ca)),
            *(part for peer in peers for part in ("--peers", getattr(peer, "tcp_address", peer))),
            **(slots or {"host": 16}),
        )

    return start


async def peers(client):
    return {peer.address: peer for peer in (await client.stats()).peers}


async def until_state(client, peer, state):
    return await eventually(lambda: peers(client), lambda found: found[peer].state == state)


async def until_told(daemon, *states):
    """Until the log has said that its peer was in these, and in no others, but idle before a cache was opened."""

    def told():
        states = [line.split("state=")[1].split()[0] for line in daemon.log.splitlines() if "state=" in line]
        return [state for state in states if state != "idle"]

    await eventually(told, lambda found: found == list(states))


def located(daemon, *arguments, status=0):
    return json.loads(kvtier("locate", *arguments, "-o", "json", "--address", daemon.address, status=status).stdout)


async def test_what_is_stored_on_one_is_located_from_another(served):
    first, second = served("first"), served("second", host=16, disk=16)
    here = served("here", first, second)
    async with AsyncExitStack() as stack:
        caches = {}
        for name, daemon in {"here": here, "first": first, "second": second}.items():
            client = await stack.enter_async_context(await connect(daemon.address))
            caches[name] = await client.open_cache("c", SPEC)
        await caches["here"].put(CHAIN[:1], blocks(CHAIN[:1]))
        await caches["first"].put(CHAIN[:3], blocks(CHAIN[:3]))
        await caches["second"].put(CHAIN, blocks(CHAIN))
        await caches["second"].move(CHAIN[2:], Tier.DISK)
        client = await stack.enter_async_context(await connect(here.address))

        async def held():
            return {each.peer: (each.blocks, dict(each.tiers)) for each in (await client.holdings(CHAIN)).found}

        wanted = {
            "": (1, {Tier.HOST: 1}),
            first.tcp_address: (3, {Tier.HOST: 3}),
            second.tcp_address: (4, {Tier.HOST: 2, Tier.DISK: 2}),
        }
        await eventually(held, lambda found: found == wanted)

        found = located(here, PROMPT, "--cache", "c")["found"]
        assert {each["peer"]: each["blocks"] for each in found} == {p: n for p, (n, _) in wanted.items()}
        assert found[-1]["tiers"] in ({"host": 2, "disk": 2}, {"host": 3})
        (last,) = located(here, CHAIN[3].hex()[:12])["found"]
        assert (last["peer"], last["cache"], last["blocks"], last["tiers"]) == (second.tcp_address, "c", 1, {"disk": 1})
        said = kvtier("locate", CHAIN[1].hex(), "--address", here.address).stdout
        assert first.tcp_address in said and second.tcp_address in said and "this one" not in said
        assert "nobody" not in said
        assert "nobody has" in kvtier("locate", "00" * 32, "--address", here.address, status=1).stdout
        status = kvtier("status", "--address", here.address).stdout
        assert f"peer {first.tcp_address}: exact, 3 blocks" in status and "healthy" in status


async def test_what_a_peer_has_is_fetched_from_there(served):
    far = served("far", host=16, disk=16)
    here = served("here", far)
    async with opened_cache(here.address, "c") as (client, cache), await connect(far.address) as there:
        theirs = await there.open_cache("c", SPEC)
        await theirs.put(CHAIN, blocks(CHAIN))
        await theirs.move(CHAIN[2:], Tier.DISK)
        await until_told(here, "exact")
        await eventually(lambda: client.holdings(CHAIN), lambda told: told.found and told.found[0].blocks == 4)
        assert (await cache.match(CHAIN)).blocks == 0
        assert (await cache.match(CHAIN, remote=True)).remote_blocks == 4
        assert_bytes(CHAIN, await cache.get(CHAIN))
        assert (await cache.match(CHAIN)).blocks == 4
        assert await cache.get([bytes(32)]) == []


async def test_what_is_forgotten_does_not_come_back_from_a_peer(served):
    ports = free_ports(2)
    here = served("here", f"127.0.0.1:{ports[1]}", subject="there", port=ports[0])
    there = served("there", f"127.0.0.1:{ports[0]}", port=ports[1])
    other = [hashlib.sha256(key).digest() for key in CHAIN]
    async with await connect(here.address) as first, await connect(there.address) as second:
        near, far = await first.open_cache("c", SPEC), await second.open_cache("c", SPEC)
        await near.put(CHAIN, blocks(CHAIN))
        await eventually(lambda: far.get(CHAIN), lambda found: len(found) == 4)
        assert not (await near.reset()).kept_in_store
        assert await near.get(CHAIN) == []
        # The peer forgets as well, and from then on each gives what it has.
        await eventually(lambda: far.get(CHAIN), lambda found: not found)
        await near.put(CHAIN, blocks(CHAIN))
        await far.put(other, blocks(other))
        await eventually(lambda: far.get(CHAIN), lambda found: len(found) == 4)
        assert_bytes(other, await eventually(lambda: near.get(other), lambda found: len(found) == 4))
        await near.drop(other[1:2])
        await near.drop(CHAIN[2:])
        assert (len(await near.get(other)), len(await near.get(CHAIN))) == (1, 2)
        assert (len(await far.get(other)), len(await far.get(CHAIN))) == (4, 4), "a drop is the daemon's own"
        await first.remove_cache("c", force=True)
        near = await first.open_cache("c", SPEC)
        assert await near.get(CHAIN) == []
        await eventually(lambda: far.get(CHAIN), lambda found: not found)


async def test_a_peer_that_dies_hangs_or_comes_back(served):
    (port,) = free_ports(1)
    far = served("far", port=port, host=16, disk=16)
    here = served("here", far)
    async with await connect(here.address) as client, await connect(far.address) as there:
        await client.open_cache("c", SPEC)
        cache = await there.open_cache("c", SPEC)
        await cache.put(CHAIN[:2], blocks(CHAIN[:2]))
        await until_told(here, "exact")
        await cache.move(CHAIN[:2], Tier.DISK)

        await asyncio.to_thread(far.kill)
        await until_told(here, "exact", "stale")
        assert (await client.holdings(CHAIN)).found, "its last state stands"
        assert not (await client.stats()).problems
        await asyncio.to_thread(far.start)
        await until_told(here, "exact", "stale", "exact")

        far.pause()
        await until_told(here, "exact", "stale", "exact", "stale")
        far.resume()
        await until_told(here, "exact", "stale", "exact", "stale", "exact")
        assert [each.blocks for each in (await client.holdings(CHAIN)).found] == [2]
    far.pause()
    try:
        await asyncio.to_thread(here.stop)
    finally:
        far.resume()


async def test_a_daemon_starts_and_stops_beside_peers_that_are_not_there_or_hang(served):
    (port,) = free_ports(1)
    hanging = served("hanging")
    hanging.pause()
    here = served("here", f"127.0.0.1:{port}", hanging)
    try:
        async with await connect(here.address) as client:
            both = await eventually(lambda: peers(client), lambda found: all(peer.problem for peer in found.values()))
            assert {peer.state for peer in both.values()} == {"away"}
            assert not (await client.stats()).problems
        await asyncio.to_thread(here.stop)
    finally:
        hanging.resume()
    late = served("late", port=port)
    await asyncio.to_thread(here.start)
    async with await connect(here.address) as client:
        await until_state(client, late.tcp_address, "idle")


async def test_what_a_peer_refuses_or_means_otherwise_is_told_and_not_counted(served):
    denied, other = served("denied", caches="somebody-elses"), served("other")
    stranger = served("stranger", subject="nobody")
    here = served("here", denied, other, stranger)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await connect(here.address))
        await client.open_cache("c", SPEC)
        for daemon, spec in ((denied, SPEC), (other, replace(SPEC, model="another")), (stranger, SPEC)):
            cache = await (await stack.enter_async_context(await connect(daemon.address))).open_cache("c", spec)
            await cache.put(CHAIN, blocks(CHAIN))
        for daemon in (denied, stranger):
            refused = (await until_state(client, daemon.tcp_address, "refused"))[daemon.tcp_address]
            assert "certificate" in refused.problem
        said = await eventually(lambda: peers(client), lambda found: found[other.tcp_address].problem)
        assert said[other.tcp_address].problem == "another specification there of cache c"
        assert not (await client.holdings(CHAIN)).found


async def test_a_daemon_passes_itself_over(served):
    (port,) = free_ports(1)
    here = served("here", f"127.0.0.1:{port}", port=port)
    async with opened_cache(here.address, "c") as (client, cache):
        await cache.put(CHAIN, blocks(CHAIN))
        await until_state(client, here.tcp_address, "itself")
        assert [each.peer for each in (await client.holdings(CHAIN)).found] == [""]


async def test_a_reader_of_one_cache_locates_in_that_one(start_daemon, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text("[[allow]]\nanonymous = true\ncaches = ['mine']\nverbs = ['read']\n")
    daemon = start_daemon("--config", str(rules), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=16)
    async with await connect(daemon.address) as owner, await connect(daemon.tcp_address, insecure=True) as reader:
        for name in ("mine", "yours"):
            cache = await owner.open_cache(name, SPEC, budgets=sizes(host=8))
            await cache.put(CHAIN, blocks(CHAIN))
        assert {each.cache for each in (await owner.holdings(CHAIN)).found} == {"mine", "yours"}
        assert {each.cache for each in (await reader.holdings(CHAIN)).found} == {"mine"}


def test_what_cannot_be_located_is_named(start_daemon):
    daemon = start_daemon(host=16)
    at = ("--address", daemon.address)
    assert "say which by --cache" in kvtier("locate", PROMPT, *at, status=2).stderr
    assert "'x' is no token id" in kvtier("locate", "1,x", "--cache", "c", *at, status=2).stderr
    assert "8 to 64 hexadecimal digits" in kvtier("locate", "abc", *at, status=2).stderr
    assert "/nowhere" in kvtier("locate", "@/nowhere", "--cache", "c", *at, status=2).stderr
    assert "no such cache that you may read: c" in kvtier("locate", PROMPT, "--cache", "c", *at, status=1).stderr


async def test_mirrors_rank_daemons_that_come_later_or_go(served, authority):
    (port,) = free_ports(1)
    near = served("near", subject="router")
    router = authority.issue("router.example", common_name="router")
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(await connect(near.address))
        cache = await owner.open_cache("c", SPEC)
        await cache.put(CHAIN[:2], blocks(CHAIN[:2]))
        addresses = [near.tcp_address, f"127.0.0.1:{port}"]
        mirrors = await stack.enter_async_context(Mirrors(addresses, ["c"], tls=router, heartbeat_s=0.1))
        await eventually(lambda: mirrors.rank(CHAIN)[0], lambda best: (best.name, best.blocks) == (addresses[0], 2))
        with pytest.raises(DeadlineExceeded, match=addresses[1]):
            await mirrors.synced(timeout=0.1)
        assert list(mirrors.problems) == addresses[1:]

        late = served("late", subject="router", port=port)
        other = await (await stack.enter_async_context(await connect(late.address))).open_cache("c", SPEC)
        await mirrors.synced(timeout=PATIENCE_S)
        await other.put(CHAIN, blocks(CHAIN))
        await eventually(lambda: mirrors.rank(CHAIN)[0], lambda best: (best.name, best.blocks) == (addresses[1], 4))
        assert not mirrors.problems
        await asyncio.to_thread(late.kill)
        await eventually(lambda: mirrors.rank(CHAIN)[0].state, lambda state: state is MirrorState.STALE)
        assert [each.blocks for each in mirrors.rank(CHAIN)] == [4, 2]


async def test_mirrors_of_clients_and_what_they_refuse(start_daemon):
    daemon = start_daemon(host=16)
    async with await connect(daemon.address) as client, Mirrors([client], ["c"]) as mirrors:
        cache = await client.open_cache("c", SPEC)
        await cache.put(CHAIN, blocks(CHAIN))
        await eventually(lambda: mirrors.rank(CHAIN)[0].blocks, lambda count: count == len(CHAIN))
        with pytest.raises(InvalidArgument, match="cache = x"):
            mirrors.rank(CHAIN, "x")
        with pytest.raises(InvalidArgument, match="named before"):
            Mirrors([client, daemon.address], ["c"])
        with pytest.raises(InvalidArgument, match="tls"):
            Mirrors(["tcp://127.0.0.1:1"], ["c"])
