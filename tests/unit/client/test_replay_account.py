"""The replay's check of the events: it holds the table at the listing's own event, and it can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvtier
from kvtier.replay.account import EventAccount
from kvtier.replay.trace import key_of
from kvtier.residency import Mismatch
from kvtier.v1 import blocks_pb2, common_pb2, events_pb2
from tests.unit.client.fake_daemon import SPEC, Context, FakeDaemon

DEVICE, HOST = kvtier.Tier.DEVICE.bit, kvtier.Tier.HOST.bit
KEYS = [key_of(n) for n in range(4)]


class Daemon(FakeDaemon):
    """Events go out as a test puts them; listings are answered from a list, one a call."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.batches: asyncio.Queue[events_pb2.WatchBatch | None] = asyncio.Queue()
        self.listings: list[blocks_pb2.ListBlocksResponse] = []
        self.answers |= {"Watch": self._watch, "List": self._list}

    def event(
        self, event_id: int, kind: events_pb2.EventType.ValueType, residency: dict[bytes, int], **more: Any
    ) -> None:
        message = events_pb2.Event(
            id=event_id,
            type=kind,
            cache="c",
            keys=b"".join(residency),
            parents=bytes(32 * len(residency)),
            residency=bytes(residency.values()),
            priorities=bytes(len(residency)),
            **more,
        )
        self.batches.put_nowait(events_pb2.WatchBatch(epoch=1, first_id=event_id, last_id=event_id, events=[message]))

    def listing(self, as_of: int, residency: dict[bytes, int], next_page: int = 0) -> None:
        self.listings.append(
            blocks_pb2.ListBlocksResponse(
                keys=b"".join(residency),
                parents=bytes(32 * len(residency)),
                residency=bytes(residency.values()),
                priorities=bytes(len(residency)),
                next_page=next_page,
                as_of_event=blocks_pb2.Cursor(epoch=1, id=as_of),
            )
        )

    async def _watch(self, request: Any, context: Context) -> AsyncIterator[events_pb2.WatchBatch]:
        yield events_pb2.WatchBatch(epoch=1, first_id=1, last_id=0, snapshot_end=True)
        while (batch := await self.batches.get()) is not None:
            yield batch
        await context.abort(grpc.StatusCode.INTERNAL, "as scripted")

    async def _list(self, request: blocks_pb2.ListBlocksRequest, context: Context) -> blocks_pb2.ListBlocksResponse:
        return self.listings.pop(0)


@asynccontextmanager
async def account(directory: Path) -> AsyncIterator[tuple[Daemon, EventAccount]]:
    async with Daemon(directory) as daemon, await kvtier.connect(daemon.address, timeout=5.0) as client:
        cache = await client.open_cache("c", SPEC)
        async with EventAccount(client, cache) as book:
            yield daemon, book


STORED, UPDATED, REMOVED = (
    events_pb2.EVENT_TYPE_STORED,
    events_pb2.EVENT_TYPE_UPDATED,
    events_pb2.EVENT_TYPE_REMOVED,
)


async def test_events_and_listing_that_agree(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        daemon.event(1, STORED, {KEYS[0]: DEVICE, KEYS[1]: DEVICE})
        daemon.event(2, UPDATED, {KEYS[0]: HOST})
        daemon.event(3, REMOVED, {KEYS[1]: 0})
        daemon.listing(3, {KEYS[0]: HOST})
        assert await book.mismatches() == []
        assert (book.events, book.removed, book.gaps) == (3, 1, 0)


async def test_a_block_that_the_events_did_not_explain_is_found(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        daemon.event(1, STORED, {KEYS[0]: DEVICE, KEYS[1]: DEVICE})
        daemon.listing(1, {KEYS[0]: DEVICE | HOST, KEYS[1]: DEVICE, KEYS[2]: HOST})
        found = await book.mismatches()
        assert set(found) == {Mismatch(KEYS[0], DEVICE, DEVICE | HOST), Mismatch(KEYS[2], None, HOST)}


async def test_the_comparison_waits_for_the_events_that_the_listing_has_seen(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        daemon.listing(2, {KEYS[0]: HOST})
        comparing = asyncio.create_task(book.mismatches())
        await daemon.until(lambda: daemon.calls["List"])
        daemon.event(1, STORED, {KEYS[0]: DEVICE})
        daemon.event(2, UPDATED, {KEYS[0]: HOST})
        assert await comparing == []


async def test_events_beyond_the_listing_are_not_held_against_it(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        daemon.listing(1, {KEYS[0]: DEVICE})
        comparing = asyncio.create_task(book.mismatches())
        await daemon.until(lambda: daemon.calls["List"])
        daemon.event(1, STORED, {KEYS[0]: DEVICE})
        daemon.event(2, REMOVED, {KEYS[0]: 0})
        assert await comparing == []


async def test_a_listing_whose_pages_disagree_is_taken_again(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        daemon.event(1, STORED, {KEYS[0]: DEVICE, KEYS[1]: DEVICE})
        daemon.event(2, UPDATED, {KEYS[0]: HOST})
        daemon.listing(1, {KEYS[0]: DEVICE}, next_page=9)
        daemon.listing(2, {KEYS[1]: DEVICE})
        daemon.listing(2, {KEYS[0]: HOST}, next_page=9)
        daemon.listing(2, {KEYS[1]: DEVICE})
        assert await book.mismatches() == []
        assert [call.page for call in daemon.calls["List"]] == [0, 9, 0, 9]
        assert book.events == 2


async def test_moves_are_counted_by_edge(short_dir: Path) -> None:
    moved = {"moved_from": common_pb2.TIER_DEVICE, "moved_to": common_pb2.TIER_HOST, "moved_bytes": 8192}
    async with account(short_dir) as (daemon, book):
        daemon.event(1, STORED, {KEYS[0]: DEVICE, KEYS[1]: DEVICE})
        daemon.event(2, UPDATED, {KEYS[0]: HOST, KEYS[1]: HOST}, **moved)
        daemon.event(3, UPDATED, {KEYS[0]: HOST}, **moved)
        daemon.listing(3, {KEYS[0]: HOST, KEYS[1]: HOST})
        assert await book.mismatches() == []
        assert {edge: (one.blocks, one.bytes) for edge, one in book.moves.items()} == {"device>host": (3, 16384)}


async def test_lost_events_are_counted_as_gaps(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        gap = events_pb2.Gap(epoch=1, first_id=1, last_id=7, reason="slow")
        daemon.batches.put_nowait(events_pb2.WatchBatch(epoch=1, first_id=1, last_id=0, gap=gap))
        daemon.event(8, STORED, {KEYS[0]: DEVICE})
        daemon.listing(8, {KEYS[0]: DEVICE, KEYS[1]: DEVICE})
        assert len(await book.mismatches()) == 1
        assert book.gaps == 1


async def test_a_watch_that_fails_fails_the_account(short_dir: Path) -> None:
    async with account(short_dir) as (daemon, book):
        daemon.listing(5, {})
        daemon.batches.put_nowait(None)
        with pytest.raises(kvtier.DaemonError, match="the watch has ended"):
            await book.mismatches()
