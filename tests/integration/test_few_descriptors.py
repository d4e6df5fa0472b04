"""A daemon without a file descriptor left: who is there goes on, who comes is told why, and nothing stays behind."""

from __future__ import annotations

import os
import resource
from contextlib import AsyncExitStack
from itertools import count, islice, pairwise

import pytest

from kvtier import RetryableError, connect
from kvtier.abi import attach
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain
from tests.integration.raw import AttachSocket
from tests.integration.waiting import eventually

MOST_DESCRIPTORS = 4
"""Of a session: its connection, its line for commits, its gRPC connection and its pidfd."""


def descriptors(daemon):
    return {int(number) for number in os.listdir(f"/proc/{daemon.pid}/fd")}


def leave(daemon, free):
    """So many descriptors for all that it will ever open. Returns the limits of before."""
    taken = descriptors(daemon)
    first_refused = next(islice((number for number in count() if number not in taken), free, None))
    _, most = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    return resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (first_refused, most))


async def test_each_session_takes_as_many_descriptors(start_daemon):
    daemon = start_daemon(device=16, host=16, disk=16)
    async with AsyncExitStack() as stack:

        async def come(name):
            client = await stack.enter_async_context(await connect(daemon.address))
            cache = await client.open_cache("mine", SPEC)
            keys = chain(name, 2)
            await cache.put(keys, blocks(keys))
            return len(descriptors(daemon))

        taken = [await come(name) for name in ("first", "second", "third", "fourth")]
        (each,) = {after - before for before, after in pairwise(taken)}
        assert each <= MOST_DESCRIPTORS


async def test_without_descriptors_sessions_go_on_and_others_are_told_to_come_again(start_daemon):
    daemon = start_daemon(host=4, disk=4)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("mine", SPEC)
        keys = chain("mine", 2)
        await cache.put(keys, blocks(keys))
        before = descriptors(daemon)
        limits = leave(daemon, free=1)  # for the connection, and none for the pidfd
        with AttachSocket(daemon.address) as sock:
            answer = sock.hello()
            assert isinstance(answer, attach.Failure)
            assert answer.reason == "TOO_MANY_SESSIONS"
            assert "file descriptor" in answer.message
        with pytest.raises(RetryableError, match="no file descriptor left for a session, its limit is"):
            await connect(daemon.address)
        assert_bytes(keys, await cache.get(keys))
        more = chain("more", 2)
        await cache.put(more, blocks(more))

        async def taken():
            return descriptors(daemon)

        assert await eventually(taken, lambda now: now <= before)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        async with await connect(daemon.address) as other:
            again = await other.open_cache("mine")
            assert_bytes(more, await again.get(more))
    assert (
        "cannot accept an attach connection" in daemon.log
    )  # an error, rightly: a clean stop would find fault with it
    daemon.kill()
