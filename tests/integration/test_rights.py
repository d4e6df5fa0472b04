"""Users of the host with some rights: what each may do, and what each is told of the rest.

Runs as root only, since only root can become somebody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack

import pytest

from kvtier import Tier, connect
from tests.integration.actors import NOBODY, Actor
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.raw import AttachSocket
from tests.integration.waiting import eventually

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


@pytest.fixture
def daemon(start_daemon, request):
    directory = request.getfixturevalue("tmp_path")
    (directory / "kvtierd.toml").write_text(RULES)
    daemon = start_daemon("--config", str(directory / "kvtierd.toml"), host=32)
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    for path in daemon.sockets:
        path.chmod(0o666)
    return daemon


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
    private = start_daemon(host=4)
    private.home.chmod(0o755)
    os.chmod(private.address, 0o755)
    for path in private.sockets:
        path.chmod(0o666)
    told = somebody(private, [NOBODY])
    assert told["attached"] == "PERMISSION_DENIED"
    assert f"uid {NOBODY}" in told["told"]
    assert somebody(daemon, [NOBODY])["attached"] == "welcome"


async def test_a_block_is_explained_as_far_as_one_may_see(daemon):
    await fill(daemon)
    async with await connect(daemon.address) as client:
        shared = await client.open_cache("shared", SPEC)
        async with shared.acquire(chain("stored", 1), Tier.HOST):
            writer = ended(daemon, [NOBODY], ("explain", ""), ("explain", "mine"), ("explain", "shared"))
            watcher = ended(daemon, [READERS], ("explain", ""), ("explain", "secret"))
        told = await client.explain(chain("stored", 1)[0])
    assert writer[:2] == ["mine leased by [] past None"] * 2
    assert writer[2].startswith("NO_RIGHT: the right to read on cache shared is missing")
    assert watcher[0] == "last,mine,shared leased by [0] past ['last', 'shared']"
    assert watcher[1].startswith("NO_RIGHT: ")
    assert {block.cache for block in told.blocks} == {"secret", "mine", "shared", "last"}


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
        f"NO_RIGHT: the right to read on cache secret is missing: no rule of the daemon's gives it to {who}"
    )
    assert "the right to admin on any cache" in answers[7]
    # What there is cannot be told from what there is not.
    assert answers[6] == answers[5].replace("secret", "other")


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
        await asyncio.to_thread((tmp_path / "kvtierd.toml").write_text, RULES.replace('"mine", ', ""))
        os.kill(daemon.pid, signal.SIGHUP)

        async def log():
            return daemon.log

        await eventually(log, lambda text: "changed=allow" in text)
        reader.go_on()
        assert reader.says() == {"blocks": 2, "calls": 0, "held": "NO_RIGHT"}
        reader.go_on()


async def test_connections_without_a_session_keep_no_other_user_out(start_daemon):
    rule = f'{{"uids": [{NOBODY}], "caches": ["*"], "verbs": ["read"]}}'
    daemon = start_daemon("--allow", rule, "--max-sessions", "4", host=8)
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    for path in daemon.sockets:
        path.chmod(0o666)
    with ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(AttachSocket(daemon.address))
        assert somebody(daemon, [NOBODY])["attached"] == "welcome"


async def test_a_cache_that_is_not_there_is_created_by_those_who_may_write_it(start_daemon):
    rule = f'{{"uids": [{NOBODY}], "caches": ["*"], "verbs": ["read"]}}'
    daemon = start_daemon("--allow", rule, host=8)
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    for path in daemon.sockets:
        path.chmod(0o666)
    (answer,) = ended(daemon, [NOBODY], ("open", "new"))
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
