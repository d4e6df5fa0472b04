"""Users of the host with some rights: what each may do, and what each is told of the rest.

Runs as root only, since only root can become somebody else.
"""

import asyncio
import os
import pickle
import signal
from contextlib import ExitStack, suppress

import grpc
import pytest

from kvtier import Client, DaemonUnavailable, Event, PermissionDenied, Tier, connect
from tests.integration.actors import NOBODY, Actor
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.raw import AttachSocket, attached, refusal
from tests.integration.seeing import tier_stats
from tests.integration.test_transfer import header, part
from tests.integration.waiting import PATIENCE_S, eventually, patient

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
READERS, ROUTERS = 4711, 4712
"""Groups that only rules know."""
RULES = f"""
[[allow]]
uids = [{NOBODY}]
caches = ["mine", "new-*"]
verbs = ["read", "write"]
[[allow]]
gids = [{READERS}]
caches = ["shared", "last"]
verbs = ["read", "watch"]
[[allow]]
gids = [{READERS}]
caches = ["shared"]
verbs = ["admin"]
[[allow]]
gids = [{ROUTERS}]
caches = ["shared"]
verbs = ["watch"]
"""


def open_up(daemon):
    """As a careless administrator would: whoever is kept out then is kept out by rules."""
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    for path in daemon.sockets:
        path.chmod(0o666)
    return daemon


@pytest.fixture
def daemon(start_daemon, tmp_path):
    (tmp_path / "kvtierd.toml").write_text(RULES)
    return open_up(start_daemon("--config", str(tmp_path / "kvtierd.toml"), host=32))


async def change_rules(daemon, file, rules):
    """Returns once the daemon goes by them."""
    before = daemon.log.count("changed=allow")
    await asyncio.to_thread(file.write_text, rules)
    os.kill(daemon.pid, signal.SIGHUP)
    await eventually(lambda: daemon.log.count("changed=allow"), lambda count: count > before)


async def fill(daemon):
    """Root's caches, each with two blocks."""
    async with await connect(daemon.address) as client:
        for name in ("secret", "mine", "shared", "last"):
            cache = await client.open_cache(name, SPEC, budgets=sizes(host=4))
            await cache.put(chain("stored", 2), blocks(chain("stored", 2)), tier=Tier.HOST)


def somebody(daemon, gids, *tries):
    with Actor("be_somebody", address=daemon.address, uid=NOBODY, gids=gids, tries=tries) as actor:
        return actor.says()


def ended(daemon, gids, *tries):
    told = somebody(daemon, gids, *tries)
    assert told["attached"] == "welcome", told
    answers: list[str] = told["ended"]
    return answers


async def test_whom_no_rule_names_may_not_even_attach(start_daemon, daemon):
    private = open_up(start_daemon(host=4))
    told = somebody(private, [NOBODY])
    assert told["attached"] == "PERMISSION_DENIED"
    assert f"uid {NOBODY}" in told["told"]
    assert somebody(daemon, [NOBODY])["attached"] == "welcome"


async def test_who_joins_a_lease_needs_the_right_that_it_takes(daemon):
    await fill(daemon)
    async with await connect(daemon.address) as client:
        tickets = []
        for name in ("shared", "mine"):
            cache = await client.open_cache(name, SPEC)
            leases = (await cache.reserve(1, Tier.HOST), await cache.acquire(chain("stored", 1), Tier.HOST))
            tickets.append([("join", pickle.dumps(lease.ticket()).hex()) for lease in leases])
        blank, read = ended(daemon, [READERS], *tickets[0])
        assert blank.startswith("NO_RIGHT: the right to write on cache shared is missing")
        assert read == "done"
        assert ended(daemon, [NOBODY], *tickets[1]) == ["done", "done"]
        (refused,) = ended(daemon, [NOBODY], tickets[0][1])
        assert refused.startswith("NO_RIGHT: the right to read on cache shared is missing")


async def test_a_block_is_explained_as_far_as_one_may_see(daemon):
    await fill(daemon)
    async with opened_cache(daemon.address, "shared") as (client, shared):
        async with shared.acquire(chain("stored", 1), Tier.HOST):
            writer = ended(daemon, [NOBODY], ("explain", ""), ("explain", "mine"), ("explain", "shared"))
            watcher = ended(daemon, [READERS], ("explain", ""), ("explain", "secret"))
        told = await client.explain(chain("stored", 1)[0])
    assert writer[:2] == ["mine leased by [] past None"] * 2
    assert writer[2].startswith("NO_RIGHT: the right to read on cache shared is missing")
    assert watcher[0] == "last,mine,shared leased by [0] past ['last', 'shared']"
    assert watcher[1].startswith("NO_RIGHT: ")
    assert {block.cache for block in told.blocks} == {"secret", "mine", "shared", "last"}


async def test_a_departure_is_the_past_of_a_block(daemon):
    await fill(daemon)
    async with opened_cache(daemon.address, "shared") as (client, shared), opened_cache(daemon.address, "mine") as mine:
        for cache in (shared, mine[1]):
            async with cache.reserve(cache.slots(Tier.HOST), Tier.HOST):
                pass
        told = await client.explain(chain("stored", 1)[0])
        writer = ended(daemon, [NOBODY], ("explain", "mine"))
        watcher = ended(daemon, [READERS], ("explain", "shared"))
    assert {(end.cache, end.pid) for end in told.endings()} == {("shared", os.getpid()), ("mine", os.getpid())}
    assert writer == [" leased by [] past None"]
    assert watcher == ["gone [('shared', True, 0)]"], "the session, and not its process"


async def test_a_user_has_the_caches_of_their_rules_and_no_others(daemon):
    await fill(daemon)
    answers = ended(
        daemon,
        [NOBODY],
        ("open writable", "mine"),
        ("read", "mine"),
        ("reserve", "mine"),
        ("open writable", "new-one"),
        ("list", ""),
        ("open", "secret"),
        ("open", "other"),
        ("stats", ""),
        ("watch", ""),
        ("watch", "mine"),
    )
    assert answers[:5] == ["done", "2 blocks", "done", "done", "mine,new-one"]
    assert all(answer.startswith("NO_RIGHT: ") for answer in answers[5:]), answers
    who = f"uid {NOBODY} (gids {NOBODY})"
    assert answers[5] == (
        f"NO_RIGHT: the right to read on cache secret is missing: {who} needs an [[allow]] rule that gives it"
    )
    assert "the right to admin on any cache" in answers[7]
    # What there is cannot be told from what there is not.
    assert answers[6] == answers[5].replace("secret", "other")


async def test_a_reader_is_told_of_caches_that_are_not_served(short_dir, ending, tmp_path):
    (tmp_path / "kvtierd.toml").write_text(RULES)
    daemon = DaemonProcess(short_dir, sizes(host=4, disk=8), ["--config", str(tmp_path / "kvtierd.toml")])
    ending.callback(daemon.stop)
    daemon.start()
    async with await patient(daemon.address) as client:
        for name in ("mine", "secret"):
            await client.open_cache(name, SPEC, budgets=sizes(host=2, disk=4))
    daemon.stop()
    daemon.sizes = sizes(host=4)
    daemon.start()
    assert ended(open_up(daemon), [NOBODY], ("list", "")) == ["mine"]


async def test_a_supplementary_group_counts_and_reading_is_not_writing(daemon):
    await fill(daemon)
    answers = ended(
        daemon,
        [1, READERS],
        ("read", "shared"),
        ("open writable", "shared"),
        ("reserve", "shared"),
        ("open", "mine"),
        ("list", ""),
    )
    assert answers[0] == "2 blocks"
    assert answers[1].startswith("PERMISSION_DENIED: the right to write on cache shared is missing")
    assert answers[2].startswith("NO_RIGHT: the right to write on cache shared is missing")
    assert answers[3] == "done", "a rule for the user holds in every group"
    assert answers[4] == "last,mine,shared"


async def test_who_has_mapped_a_cache_reads_on_without_the_right_but_not_by_calls(daemon, tmp_path):
    """Memory cannot be taken back from a process: what asks for the right is opening the cache, and every call."""
    await fill(daemon)
    with Actor("keep_reading", address=daemon.address, cache="mine") as reader:
        assert reader.says() == {"blocks": 2, "calls": 0, "held": "2 blocks"}
        await change_rules(daemon, tmp_path / "kvtierd.toml", RULES.replace('"mine", ', ""))
        reader.go_on()
        assert reader.says() == {"blocks": 2, "calls": 0, "held": "NO_RIGHT"}
        reader.go_on()


READING = f'{{"uids": [{NOBODY}], "caches": ["*"], "verbs": ["read"]}}'


async def test_connections_without_a_session_keep_no_other_user_out(start_daemon):
    daemon = open_up(start_daemon("--allow", READING, "--max-sessions", "4", host=8))
    with ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(AttachSocket(daemon.address))
        assert somebody(daemon, [NOBODY])["attached"] == "welcome"

    def again():
        with suppress(DaemonUnavailable), Client(daemon.address) as client:
            return client.connected

    await eventually(lambda: asyncio.to_thread(again), bool)  # for this user, when they have gone


async def test_a_cache_that_is_not_there_is_created_by_those_who_may_write_it(start_daemon):
    (answer,) = ended(open_up(start_daemon("--allow", READING, host=8)), [NOBODY], ("open", "new"))
    assert answer.startswith("NO_RIGHT: the right to write on cache new is missing")


async def test_a_watcher_sees_its_caches_and_all_ids_are_accounted_for(daemon):
    await fill(daemon)
    watched, named, stats = ended(daemon, [READERS], ("watch", ""), ("watch", "shared,mine"), ("stats", ""))
    # The client reports a gap as an item of its own, which the actor does not accept: nothing is missing between.
    assert watched == "last,shared"
    assert named.startswith("NO_RIGHT: the right to watch on cache mine is missing")
    assert stats == "shared"


async def test_whose_a_watcher_is_learns_who_sees_its_session(daemon):
    await fill(daemon)
    async with await connect(daemon.address) as client, client.watch(oldest=True) as watch:
        await anext(watch)
        stats = await client.stats()
        assert [one.session_id for one in stats.watcher_stats] == [client.session_id]
        assert ended(daemon, [READERS], ("watchers", "")) == ["0 of 1"]
        await client.open_cache("shared")
        assert ended(daemon, [READERS], ("watchers", "")) == ["1 of 1"]


async def test_who_may_watch_and_nothing_else_may_begin_now(daemon):
    """Where now is takes no other right than to watch."""
    await fill(daemon)
    answers = ended(daemon, [ROUTERS], ("watch from now", ""), ("watch from now", "shared"), ("watch from now", "last"))
    assert answers[:2] == ["Heartbeat", "Heartbeat"], answers
    assert answers[2].startswith("NO_RIGHT: the right to watch on cache last is missing")


ALL = """
[[allow]]
anonymous = true
caches = ["*"]
verbs = ["read", "write", "watch", "tokens"]
"""
ONE = """
[[allow]]
anonymous = true
caches = ["open"]
verbs = ["watch"]
"""


@pytest.fixture
def revoking(start_daemon, tmp_path):
    file = tmp_path / "kvtierd.toml"
    file.write_text(ALL)
    return start_daemon("--config", str(file), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=16)


async def stored(client, cache, name):
    return await put_chain(await client.open_cache(cache, SPEC, budgets=sizes(host=4)), name, 2, tier=Tier.HOST)


async def test_watches_see_what_they_still_may(revoking, tmp_path):
    """One that named a cache which it may not see any more ends: it would wait in vain, and take silence for peace."""
    async with (
        await connect(revoking.address) as owner,
        await connect(revoking.tcp_address, insecure=True) as client,
        client.watch(oldest=True) as everything,
        client.watch(caches=["other", "open"]) as named,
        client.watch(caches=["open"]) as allowed,
    ):
        before = await stored(owner, "other", "before")
        for watch in (everything, named):
            assert before[0] in await until_stored(watch, before[-1])
        await change_rules(revoking, tmp_path / "kvtierd.toml", ONE)
        after = await stored(owner, "other", "after")
        with pytest.raises(PermissionDenied, match="cache other"):
            await until_stored(named, bytes(32))
        shown = await stored(owner, "open", "shown")
        assert not set(after) & await until_stored(everything, shown[-1])
        assert set(shown) <= await until_stored(allowed, shown[-1])


async def test_who_may_not_read_any_more_can_still_give_back(revoking, tmp_path):
    async with await connect(revoking.address) as owner, await connect(revoking.tcp_address, insecure=True) as client:
        keys = await stored(owner, "other", "held")
        cache = await client.open_cache("other", SPEC, mapped=False)
        async with cache.acquire(keys, tier=Tier.HOST) as lease:
            assert lease.blocks == 2
            await change_rules(revoking, tmp_path / "kvtierd.toml", ONE)
            with pytest.raises(PermissionDenied):
                await cache.match(keys)
            assert (await tier_stats(owner, "other", Tier.HOST)).held == 2
        await eventually(lambda: tier_stats(owner, "other", Tier.HOST), lambda stats: not stats.held)
        await cache.close()


async def test_a_put_under_way_stores_nothing_once_its_right_is_gone(revoking, tmp_path):
    keys = chain("under-way", 2)
    gates = {"begun": asyncio.Event(), "revoked": asyncio.Event()}

    async def messages(cache_id):
        yield header(cache_id, keys)
        for index, row in enumerate(blocks(keys)):
            yield part(index, 0, row.tobytes())
        gates["begun"].set()
        await gates["revoked"].wait()  # all its bytes are there, its end is not

    async with await connect(revoking.address) as owner, await connect(revoking.tcp_address, insecure=True) as client:
        await stored(owner, "other", "before")
        cache = await client.open_cache("other", SPEC, mapped=False)
        link = await client._session.link()
        call = link.stubs.transfer.Put(messages(cache.info.cache_id), metadata=link.metadata, timeout=60)
        await gates["begun"].wait()
        await eventually(lambda: tier_stats(owner, "other", Tier.HOST), lambda stats: stats.held == 2)
        await change_rules(revoking, tmp_path / "kvtierd.toml", ONE)
        gates["revoked"].set()
        fault = await refusal(call)
        assert (fault.code, fault.reason, fault.detail.field) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "NO_RIGHT",
            "write",
        )
        own = await owner.open_cache("other", SPEC)
        assert (await own.match(keys)).blocks == 0
        assert not (await tier_stats(owner, "other", Tier.HOST)).held


async def until_stored(watch, key):
    """Keys of all events up to that of ``key``."""
    seen: set[bytes] = set()
    async with asyncio.timeout(PATIENCE_S):
        async for item in watch:
            if isinstance(item, Event):
                seen.update(item.keys)
            if key in seen:
                return seen
    raise AssertionError("the watch has ended")


ALLOWED = f'{{"uids": [{NOBODY}], "caches": ["*"], "verbs": ["read", "write", "watch"]}}'
REFUSED = "PermissionError"


async def foreigner(daemon):
    """What nobody is told, with a live session's token and descriptors in hand."""
    async with attached(daemon.address) as victim:
        cache_id = (await victim.open("mine", SPEC)).cache_id
        with (
            victim.socket.descriptors(cache_id, write=True) as fds,
            Actor(
                "be_foreign", pass_fds=list(fds.values()), address=daemon.address, token=victim.welcome.token, fds=fds
            ) as stranger,
        ):
            return stranger.says()


async def test_directory_and_sockets_keep_others_out(start_daemon):
    daemon = start_daemon(device=2, host=2)
    assert os.stat(daemon.address).st_mode & 0o777 == 0o750
    assert [path.stat().st_mode & 0o777 for path in daemon.sockets] == [0o660, 0o660]
    daemon.home.chmod(0o755)
    told = await foreigner(daemon)
    assert told["connects"] == {"attach.sock": REFUSED, "kvtierd.sock": REFUSED}
    assert set(told["rpc"].values()) == {"UNAVAILABLE"}
    os.chmod(daemon.address, 0o755)  # the sockets' own modes are left
    assert (await foreigner(daemon))["connects"] == told["connects"]


async def test_credentials_and_tokens_keep_others_out_of_open_sockets(start_daemon):
    """A token is as good as its session on gRPC, which cannot tell who calls: it is the directory's mode that keeps
    others from trying one. On the attach socket, and with descriptors, a user's identity is what counts."""
    daemon = open_up(start_daemon(device=2, host=2))
    told = await foreigner(daemon)
    assert told["connects"] == {"attach.sock": "connected", "kvtierd.sock": "connected"}
    assert told["hello"] == "PERMISSION_DENIED"
    assert told["rpc"] == {"no token": "UNAUTHENTICATED", "stolen token": "answered"}
    # Even with a read-only descriptor in hand another user cannot make a writable one of it.
    assert told["reopened"] == {"control": REFUSED, "host": REFUSED, "device": REFUSED}
    async with await connect(daemon.address) as client:
        await works(client)


async def test_a_user_who_may_write_a_cache_spoils_its_bytes_and_nothing_more(start_daemon):
    """Least of all what says where they are: others read by that, without asking anybody."""
    daemon = open_up(start_daemon("--allow", ALLOWED, device=2, host=8))
    async with opened_cache(daemon.address, "theirs", budgets=sizes(host=4)) as (client, theirs):
        ours = await client.open_cache("ours", SPEC, budgets=sizes(host=4))
        keys = chain("theirs", 3)
        for cache in (theirs, ours):
            await cache.put(keys, blocks(keys))
        before = theirs.arena._control.tobytes()
        with Actor("be_hostile", address=daemon.address, cache="theirs", daemon=daemon.pid) as actor:
            ended = actor.says()["ended"]
            assert ended == {
                "shrink data": REFUSED,
                "grow data": REFUSED,
                "seal data": REFUSED,
                "open data again": REFUSED,
                "shrink control": "EINVAL",
                "write control": "EBADF",
                "punch control": "EBADF",
                "map control writable": REFUSED,
                "protect control no more": REFUSED,
                "change control's mode": REFUSED,
                "open control again": REFUSED,
                "open it in the daemon": REFUSED,
            }
            spoilt = await theirs.get(keys)
            assert [block.any() for block in spoilt] == [False] * 3, "holes read as zeros, and fault nobody"
            assert_bytes(keys, await ours.get(keys))
            assert theirs.reads.calls == ours.reads.calls == 0
            assert theirs.arena._control.tobytes() == before
        assert (await client.stats()).problems == ()


async def works(client):
    cache = await client.open_cache("mine", SPEC)
    keys = await put_chain(cache, "mine", 2)
    assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))
