"""A write goes on whatever becomes of those who wait for it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio
import pytest

from kvtierd.service.writes import Write


class Peer:
    """Takes messages when it likes."""

    def __init__(self) -> None:
        self.takes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.told: list[bytes] = []

    async def write(self, message: bytes) -> None:
        await self.takes
        self.told.append(message)


def write(peer: Peer) -> Write:
    return Write(cast("grpc.aio.ServicerContext[Any, Any]", peer), b"message")


async def test_it_begins_at_once_and_is_taken() -> None:
    peer = Peer()
    writing = write(peer)
    peer.takes.set_result(None)
    await writing.taken()
    assert peer.told == [b"message"]
    assert await writing.ended()


async def test_a_cancelled_waiter_does_not_end_it() -> None:
    peer = Peer()
    writing = write(peer)
    waiter = asyncio.create_task(writing.taken())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    peer.takes.set_result(None)
    assert await writing.ended()
    assert peer.told == [b"message"]


async def test_who_waits_for_so_long_hears_that_it_has_not_ended_and_may_wait_on() -> None:
    peer = Peer()
    writing = write(peer)
    assert not await writing.ended(0.001)
    waiter = asyncio.create_task(writing.ended(60))
    await asyncio.sleep(0)
    peer.takes.set_result(None)
    assert await waiter
    assert peer.told == [b"message"]


async def test_what_ends_it_badly_is_told_to_those_who_ask() -> None:
    peer = Peer()
    writing = write(peer)
    peer.takes.set_exception(ConnectionError("gone"))
    assert await writing.ended()
    with pytest.raises(ConnectionError):
        await writing.taken()


async def test_one_that_is_abandoned_is_over() -> None:
    peer = Peer()
    writing = write(peer)
    writing.abandon()
    assert peer.takes.cancelled()
    assert await writing.ended()
    assert peer.told == []
