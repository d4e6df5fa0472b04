"""What all drains together may have the daemon remember, and what one may still tell once a right is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvtier.v1 import events_pb2
from kvtierd.core.ids import SessionId, Tier
from kvtierd.rights import ALL_RIGHTS, Right
from kvtierd.service.catalog import Catalog
from kvtierd.service.drain import REMEMBERED_SLOTS, Drains
from kvtierd.service.errors import CallRefused
from kvtierd.service.sessions import Session

SLOTS = {"half": REMEMBERED_SLOTS // 2, "whole": REMEMBERED_SLOTS, "larger": 2 * REMEMBERED_SLOTS, "tiny": 1}


class Caches:
    def named(self, name: str) -> Any:
        half = SLOTS[name] // 2
        return SimpleNamespace(slots={Tier.HOST: (half,), Tier.DISK: (SLOTS[name] - half,)})


async def quiet(session: Session, request: Any) -> AsyncGenerator[bytes, None]:
    """A watch of a cache in which nothing happens."""
    await asyncio.Event().wait()
    yield b""


def session(number: int) -> Session:
    return Session(SessionId(number), "token", cast(Any, None), None)


async def begins(drains: Drains, number: int, name: str) -> None:
    answer = await drains.drain(session(number), events_pb2.DrainRequest(name=name))
    assert answer.events == "[]"


async def test_room_is_shared_by_all_sessions_and_given_back() -> None:
    drains = Drains(quiet, cast(Catalog, Caches()), lambda session, name: ALL_RIGHTS)
    await begins(drains, 1, "half")
    await begins(drains, 2, "half")
    with pytest.raises(CallRefused, match="1 of tiny would be too many") as refused:
        await begins(drains, 3, "tiny")
    assert (refused.value.code, refused.value.detail.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_DRAINS",
    )
    await begins(drains, 1, "half")  # one that there is needs no more
    await drains.close()
    await begins(drains, 3, "tiny")
    await drains.close()


async def test_a_cache_larger_than_all_that_may_be_drained_alone() -> None:
    drains = Drains(quiet, cast(Catalog, Caches()), lambda session, name: ALL_RIGHTS)
    await begins(drains, 1, "larger")
    with pytest.raises(CallRefused):
        await begins(drains, 1, "tiny")
    await drains.close()


TOLD = 3
"""Blocks of a batch."""


async def with_tokens(session: Session, request: Any) -> AsyncGenerator[bytes, None]:
    """A watch that has one batch after another for whoever reads."""
    for number in count(1):
        blocks = [events_pb2.BlockTokens(token_ids=bytes(4)) for _ in range(TOLD)]
        keys = b"".join(bytes([number % 256, place]) * 16 for place in range(TOLD))
        stored = events_pb2.Event(
            id=number, type=events_pb2.EVENT_TYPE_STORED, cache="tiny", keys=keys, parents=bytes(32 * TOLD)
        )
        stored.residency = stored.priorities = bytes([2] * TOLD)
        stored.tokens.extend(blocks)
        yield events_pb2.WatchBatch(epoch=1, first_id=number, last_id=number, events=[stored]).SerializeToString()


@pytest.mark.parametrize("lost", [Right.TOKENS, Right.WATCH])
@pytest.mark.parametrize("turns", range(8))
async def test_nothing_read_with_a_right_is_told_without_it(lost: Right, turns: int) -> None:
    """Whatever a call was just doing, and whatever waited for it."""
    rights = set(ALL_RIGHTS)
    drains = Drains(with_tokens, cast(Catalog, Caches()), lambda session, name: frozenset(rights))
    first = await drains.drain(session(1), events_pb2.DrainRequest(name="tiny", max_events=1))
    assert "token_id" in first.events
    going_on = events_pb2.DrainRequest(name="tiny", next_event_id=first.next_event_id, timeout_ns=10**9)
    call = asyncio.create_task(drains.drain(session(1), going_on))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not call.done()
    rights.discard(lost)
    drains.rights_changed()
    for refused in (call, drains.drain(session(1), going_on)):
        with pytest.raises(CallRefused, match="begin with next_event_id = 0"):
            await refused
    await drains.close()


async def test_rights_that_a_drain_does_not_read_by_may_come_and_go() -> None:
    rights = set(ALL_RIGHTS) - {Right.TOKENS}
    drains = Drains(quiet, cast(Catalog, Caches()), lambda session, name: frozenset(rights))
    await begins(drains, 1, "tiny")
    for change in (rights.discard, rights.add):
        for right in (Right.WRITE, Right.READ, Right.TOKENS):
            change(right)
            drains.rights_changed()
    await begins(drains, 1, "tiny")
    await drains.close()
