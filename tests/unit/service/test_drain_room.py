"""What all drains together may have the daemon remember."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvtier.v1 import events_pb2
from kvtierd.core.ids import SessionId, Tier
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
    drains = Drains(quiet, cast(Catalog, Caches()))
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
    drains = Drains(quiet, cast(Catalog, Caches()))
    await begins(drains, 1, "larger")
    with pytest.raises(CallRefused):
        await begins(drains, 1, "tiny")
    await drains.close()
