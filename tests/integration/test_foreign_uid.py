"""Another user of the host: kept out by the directory, and behind it by peer credentials and tokens.

Runs as root only, since only root can become somebody else.
"""

from __future__ import annotations

import os

import pytest

from kvtier import Tier, connect
from tests.integration.actors import NOBODY, Actor
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.raw import attached, close_all

ALLOWED = f'{{"uids": [{NOBODY}], "caches": ["*"], "verbs": ["read", "write", "watch"]}}'

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

REFUSED = "PermissionError"


async def foreigner(daemon):
    """What nobody is told, with a live session's token and descriptors in hand."""
    async with attached(daemon.address) as victim:
        cache_id = (await victim.open("mine", SPEC)).cache_id
        fds = victim.socket.map(cache_id, write=True)
        try:
            with Actor(
                "be_foreign",
                pass_fds=list(fds.values()),
                address=daemon.address,
                token=victim.welcome.token,
                fds=fds,
            ) as stranger:
                return stranger.says()
        finally:
            close_all(fds)


def open_up(daemon):
    """As a careless administrator would."""
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    for path in daemon.sockets:
        path.chmod(0o666)


async def test_the_directory_keeps_others_out(start_daemon):
    daemon = start_daemon(device=2, host=2)
    assert os.stat(daemon.address).st_mode & 0o777 == 0o750
    assert [path.stat().st_mode & 0o777 for path in daemon.sockets] == [0o660, 0o660]
    daemon.home.chmod(0o755)
    told = await foreigner(daemon)
    assert told["connects"] == {"attach.sock": REFUSED, "kvtierd.sock": REFUSED}
    assert set(told["rpc"].values()) == {"UNAVAILABLE"}


async def test_the_sockets_keep_others_out_of_an_open_directory(start_daemon):
    daemon = start_daemon(device=2, host=2)
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    told = await foreigner(daemon)
    assert told["connects"] == {"attach.sock": REFUSED, "kvtierd.sock": REFUSED}


async def test_credentials_and_tokens_keep_others_out_of_open_sockets(start_daemon):
    """A token is as good as its session on gRPC, which cannot tell who calls: it is the directory's mode that keeps
    others from trying one. On the attach socket, and with descriptors, a user's identity is what counts."""
    daemon = start_daemon(device=2, host=2)
    open_up(daemon)
    told = await foreigner(daemon)
    assert told["connects"] == {"attach.sock": "connected", "kvtierd.sock": "connected"}
    assert told["hello"] == "PERMISSION_DENIED"
    assert told["rpc"] == {"no token": "UNAUTHENTICATED", "stolen token": "answered"}
    # Even with a read-only descriptor in hand another user cannot make a writable one of it.
    assert told["reopened"] == {"control": REFUSED, "host": REFUSED, "device": REFUSED}
    async with await connect(daemon.address) as client:
        await works(client)


async def test_a_user_who_is_allowed_may_attach(start_daemon):
    daemon = start_daemon("--allow", ALLOWED, device=2, host=2)
    open_up(daemon)
    assert (await foreigner(daemon))["hello"] == "welcome"


async def test_a_user_who_may_write_a_cache_spoils_its_bytes_and_nothing_more(start_daemon):
    """Least of all what says where they are: others read by that, without asking anybody."""
    daemon = start_daemon("--allow", ALLOWED, device=2, host=8)
    open_up(daemon)
    async with await connect(daemon.address) as client:
        theirs = await client.open_cache("theirs", SPEC, budgets=sizes(host=4))
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
    keys = chain("mine", 2)
    await cache.put(keys, blocks(keys))
    assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))
