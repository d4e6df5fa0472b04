"""Mirrors against a scripted daemon: what is lost is made up for, and until then nothing false is said."""

import asyncio
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

import kvtier
from kvtier import Cursor, Mirror, MirrorState
from kvtier.v1 import caches_pb2, common_pb2, events_pb2
from tests.integration.waiting import eventually
from tests.unit.client.fake_daemon import Context, FakeDaemon, play

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(6)]
BROKEN = grpc.StatusCode.UNAVAILABLE

Step = events_pb2.WatchBatch | grpc.StatusCode | asyncio.Event | None
"""To send, to fail with, to wait for; None: silence without end."""


def slice_of(keys: Sequence[bytes], *, epoch: int = 1) -> events_pb2.WatchBatch:
    part = events_pb2.SnapshotSlice(
        cache="c",
        keys=b"".join(keys),
        parents=bytes(32 * len(keys)),
        residency=b"\1" * len(keys),
        priorities=bytes([35]) * len(keys),
        tokens_per_block=16,
        all_window_tokens=[0],
    )
    return events_pb2.WatchBatch(epoch=epoch, first_id=1, last_id=0, slice=part)


def end(cursor: int, *, epoch: int = 1) -> events_pb2.WatchBatch:
    return events_pb2.WatchBatch(epoch=epoch, first_id=cursor, last_id=cursor, snapshot_end=True)


def stored(event_id: int, key: bytes, *, up_to: int | None = None, epoch: int = 1, **more: Any) -> Any:
    """A batch of one event, and of what is filtered away up to ``up_to``."""
    event = events_pb2.Event(
        id=event_id,
        type=events_pb2.EVENT_TYPE_STORED,
        cause=common_pb2.CAUSE_COMMIT,
        cache="c",
        keys=key,
        parents=bytes(32),
        residency=b"\1",
        priorities=bytes([35]),
    )
    return events_pb2.WatchBatch(epoch=epoch, first_id=event_id, last_id=up_to or event_id, events=[event], **more)


def gap(first: int, last: int, reason: str) -> events_pb2.Gap:
    return events_pb2.Gap(epoch=1, first_id=first, last_id=last, reason=reason)


async def until(mirror: Mirror, state: MirrorState) -> None:
    async def now() -> MirrorState:
        return mirror.state

    await eventually(now, lambda found: found is state)


LOSSES: dict[str, list[Step]] = {
    "a hole": [stored(9, KEYS[3])],
    "too slow": [events_pb2.WatchBatch(epoch=1, first_id=7, last_id=6, gap=gap(7, 90, "slow"))],
    "a crash": [events_pb2.WatchBatch(epoch=2, first_id=91, last_id=90, gap=gap(7, 90, "unclean-stop"))],
    "another epoch without a word": [stored(8, KEYS[3], epoch=2)],
    "an event that does not add up": [stored(7, KEYS[3] + KEYS[4])],
    "a cursor that the daemon does not know": [BROKEN],
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_what_is_lost_is_made_up_for_and_the_last_truth_answers_meanwhile(
    daemon: FakeDaemon, client: kvtier.AsyncClient, loss: str
) -> None:
    gate = asyncio.Event()
    first: list[Step] = [slice_of(KEYS[:2]), end(5), stored(6, KEYS[2])]
    again: list[Step] = [slice_of(KEYS[1:2], epoch=3), gate, slice_of(KEYS[:1], epoch=3), end(95, epoch=3), None]
    refused: list[Sequence[Step]] = [[grpc.StatusCode.INVALID_ARGUMENT]] if LOSSES[loss] == [BROKEN] else []
    play(daemon, [*first, *LOSSES[loss], None], *refused, again)
    async with Mirror(client, ["c"]) as mirror:
        await daemon.until(lambda: len(daemon.calls["Watch"]) == 2 + len(refused))
        assert (mirror.state, mirror.cursor, mirror.resyncs) == (MirrorState.STALE, Cursor(1, 6), 0)
        assert mirror.longest_prefix(KEYS) == 3
        assert mirror.match(KEYS).as_of == Cursor(1, 6)
        gate.set()
        await until(mirror, MirrorState.EXACT)
        assert (mirror.cursor, mirror.resyncs, mirror.problem) == (Cursor(3, 95), 1, None)
        assert mirror.longest_prefix(KEYS) == 2
    assert [call.WhichOneof("start") for call in daemon.calls["Watch"]][-1] == "snapshot"
    assert list(daemon.calls["Watch"][0].filter.caches) == ["c"]


async def test_a_broken_stream_is_resumed_without_a_snapshot_and_stale_until_then(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    gate = asyncio.Event()
    play(daemon, [slice_of(KEYS[:2]), end(5), BROKEN], [gate, stored(6, KEYS[2]), None])
    async with Mirror(client, ["c"]) as mirror:
        await daemon.until(lambda: len(daemon.calls["Watch"]) == 2)
        assert (mirror.state, mirror.longest_prefix(KEYS)) == (MirrorState.STALE, 2)
        gate.set()
        await mirror.synced(Cursor(1, 6), timeout=10)
        assert (mirror.state, mirror.longest_prefix(KEYS), mirror.resyncs) == (MirrorState.EXACT, 3, 0)
    assert daemon.calls["Watch"][1].since.id == 5


async def test_a_snapshot_with_a_gap_in_it_is_not_shown(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    lossy = stored(4, KEYS[5], gap=gap(5, 20, "slow"))
    play(daemon, [slice_of(KEYS[:4]), lossy, end(25), None], [slice_of(KEYS[:2]), end(30), None])
    async with Mirror(client, ["c"]) as mirror:
        assert (len(mirror), mirror.cursor, mirror.resyncs) == (2, Cursor(1, 30), 0)


async def test_ids_that_concern_others_move_the_cursor_at_once(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    """Else whoever waits for one would wait for the next heartbeat."""
    play(daemon, [slice_of(KEYS[:1]), end(5), stored(6, KEYS[1], up_to=40, newest_id=45), None])
    async with Mirror(client, ["c"], heartbeat_s=3600) as mirror:
        await mirror.synced(Cursor(1, 40), timeout=10)
        assert (mirror.cursor, mirror.lag) == (Cursor(1, 40), 5)


@pytest.mark.parametrize("told", [2, None], ids=["as its daemon tells", "as there is a bound for all"])
async def test_a_mirror_that_has_more_blocks_than_may_be_is_given_up(
    daemon: FakeDaemon, client: kvtier.AsyncClient, monkeypatch: pytest.MonkeyPatch, told: int | None
) -> None:
    async def capacity(_: Any, __: Context) -> caches_pb2.ListCachesResponse:
        tier = caches_pb2.GroupTierInfo(tier=common_pb2.TIER_HOST, slots=told or 1 << 31)
        return caches_pb2.ListCachesResponse(
            caches=[caches_pb2.CacheInfo(name="c", groups=[caches_pb2.GroupInfo(tiers=[tier])])]
        )

    daemon.answers["List"] = capacity
    if told is None:
        monkeypatch.setattr("kvtier.mirror.follower.MOST_BLOCKS", 4)
    gate = asyncio.Event()
    play(daemon, [slice_of(KEYS[:4]), end(5), gate, stored(6, KEYS[4]), None])
    async with Mirror(client, ["c"]) as mirror:
        assert len(mirror) == 4
        gate.set()
        await until(mirror, MirrorState.SYNCING)
        assert str(mirror.problem) == "given up: 5 blocks of cache c, which has room for 4"
        assert (len(mirror), mirror.longest_prefix(KEYS)) == (0, 0)
        await asyncio.sleep(1)
        assert len(daemon.calls["Watch"]) == 1


async def test_a_mirror_ends_with_its_client(daemon: FakeDaemon) -> None:
    play(daemon, [slice_of(KEYS[:2]), end(5), None])
    async with await kvtier.connect(daemon.address) as client:
        mirror = await Mirror(client, ["c"]).__aenter__()
    await until(mirror, MirrorState.STALE)
    assert mirror.longest_prefix(KEYS) == 2
    with pytest.raises(kvtier.ClientClosed):
        await mirror.synced()
    await mirror.aclose()


async def test_it_can_be_waited_for_no_time_at_all_and_for_any(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    play(daemon, [slice_of(KEYS[:2]), end(5), None])
    async with Mirror(client, ["c"]) as mirror:
        for timeout in (0, 86400, math.inf):
            await mirror.synced(Cursor(1, 5), timeout=timeout)
        for timeout in (0, 0.05):
            with pytest.raises(kvtier.DeadlineExceeded, match="exact at 1:5"):
                await mirror.synced(Cursor(1, 6), timeout=timeout)
        with pytest.raises(kvtier.InvalidArgument):
            await mirror.synced(timeout=-1)


async def test_entering_it_ends_with_its_time(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    play(daemon, [None])
    mirror = Mirror(client, ["c"], timeout=0.05)
    with pytest.raises(kvtier.DeadlineExceeded):
        await mirror.__aenter__()
    assert (mirror.state, mirror.cursor, mirror.longest_prefix(KEYS)) == (MirrorState.SYNCING, None, 0)


async def test_bad_questions_are_refused(client: kvtier.AsyncClient) -> None:
    nobody: list[str] = []
    for caches in (nobody, "c"):
        with pytest.raises(kvtier.InvalidArgument, match="caches"):
            Mirror(client, caches)
    one, two = Mirror(client, ["c"]), Mirror(client, ["c", "d"])
    with pytest.raises(kvtier.InvalidArgument, match="cache = d"):
        one.longest_prefix(KEYS, "d")
    with pytest.raises(kvtier.InvalidArgument, match="one of c, d"):
        two.longest_prefix(KEYS)
    with pytest.raises(kvtier.InvalidArgument, match="31 bytes"):
        one.block(KEYS[0][:31])
    with pytest.raises(kvtier.CallerError, match="once it is entered"):
        one.longest_prefix(KEYS)
    one.start()
    with pytest.raises(kvtier.InvalidArgument, match="5 bytes"):
        one.longest_prefix(b"short")
    await one.aclose()
