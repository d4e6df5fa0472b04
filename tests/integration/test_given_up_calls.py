"""What a call granted that its caller gave up is given back, however long the daemon does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from kvtier import Cache, Tier, arena, connect
from kvtier.lease import ReadLease, WriteLease
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.waiting import eventually

KEYS = chain("given up", 2)
Take = Callable[[Cache], Awaitable[WriteLease | ReadLease]]


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(host=8)


@pytest.mark.parametrize(
    "take",
    [lambda cache: cache.reserve(2, Tier.HOST), lambda cache: cache.acquire(KEYS, Tier.HOST)],
    ids=["reserve", "acquire"],
)
async def test_a_daemon_that_hangs_when_a_call_is_given_up(daemon, take, monkeypatch, caplog):
    monkeypatch.setattr(arena, "_GIVE_BACK_S", 0.05)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC, budgets=sizes(host=8))
        await cache.put(KEYS, blocks(KEYS))
        granted, send = asyncio.Event(), arena.send

        async def unheard(*call):
            await send(*call)
            granted.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as deaf:
            deaf.setattr(arena, "send", unheard)
            taking = asyncio.ensure_future(take(cache))
            await granted.wait()
            daemon.pause()
            taking.cancel()
            await asyncio.wait([taking])
        try:
            with caplog.at_level(logging.DEBUG, "kvtier.arena"):
                await eventually(_records(caplog), lambda said: len(said) > 0)
        finally:
            daemon.resume()
        await eventually(client.leases, lambda held: not held)


def _records(caplog):
    """What was said of attempts to give back that did not succeed."""

    async def said():
        return [record.getMessage() for record in caplog.records if "give" in record.getMessage()]

    return said
