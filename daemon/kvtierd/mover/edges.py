"""Edges: take moves, return results, and count the blocks in between.

Loop thread only. Queues need no bound of their own: a move is planned only if its destination slot exists.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvtierd.core.ids import CacheId, MoveId, Tier
from kvtierd.core.outcome import Move, MoveResult
from kvtierd.mover import disk_io
from kvtierd.mover.runtime import Batch, CacheRuntime, CopyPiece, Faults, Finish
from kvtierd.mover.work import CopyReport, Edge, Mailbox, copy
from kvtierd.mover.worker import Lane, LaneThreads


def _copy(batch: Batch) -> Faults | Finish:
    """Copies between memory tiers, by the CPU or the copy engines of the cache's GPU."""
    cuda = batch[0].runtime.cuda
    return copy(batch) if cuda is None else cuda.copy(batch)


def _write(batch: Batch) -> Finish:
    cuda = batch[0].runtime.cuda
    return disk_io.write(batch) if cuda is None else cuda.write(batch)


def _read(batch: Batch) -> Faults | Finish:
    cuda = batch[0].runtime.cuda
    return disk_io.read(batch) if cuda is None else cuda.read(batch)


def _memory_lane(src: Tier, dst: Tier) -> Lane:
    return Lane(f"{src}-to-{dst}", ((src, dst),), threads=1, batch_blocks=256, carry_out=_copy, in_turn=True)


LANES: Final = (
    _memory_lane(Tier.DEVICE, Tier.HOST),
    _memory_lane(Tier.HOST, Tier.DEVICE),
    Lane(
        "disk-writer",
        ((Tier.HOST, Tier.DISK), (Tier.DEVICE, Tier.DISK), (Tier.DISK, None)),
        threads=1,  # one, for order: ancestors are committed before descendants, deletions before reuse
        batch_blocks=256,
        batch_bytes=32 << 20,  # a disk writes no faster in larger pieces; the next batch is checksummed meanwhile
        carry_out=_write,
        concerns=disk_io.concerns,
    ),
    Lane(
        "disk-reader",
        ((Tier.DISK, Tier.HOST), (Tier.DISK, Tier.DEVICE)),
        threads=2,  # two threads use the whole bandwidth of the disk
        batch_blocks=32,
        carry_out=_read,
    ),
)


def lanes_for(gpus: int) -> Sequence[Lane]:
    """:data:`LANES`, with a thread a direction for every GPU, so that the copies of one GPU do not wait for
    another's."""
    return [replace(lane, threads=max(1, gpus)) if lane.carry_out is _copy else lane for lane in LANES]


STUCK_AFTER_S: Final = 10.0
LEAVE_GRACE_S: Final = 1.0
"""Time that idle threads get to end."""
_LOOK_S: Final = 0.002
BLOCKS_PER_TURN: Final = 128
"""Limit of blocks whose results one loop callback gives the core; the rest follow in the next turn."""

Deliver = Callable[[CacheRuntime, Sequence[MoveResult]], None]
Trace = Callable[[CacheRuntime, Move], Callable[[MoveResult], None]]
"""Called with each planned move. Returns a function that is called with the move's result."""


@dataclass(slots=True)
class _Journey:
    """A move between its plan and its result."""

    runtime: CacheRuntime
    move: Move
    pieces_left: int
    ended: Callable[[MoveResult], None] | None
    failed: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    waits_ns: list[int] = field(default_factory=list)
    copy_ns: int = 0

    def add(self, report: CopyReport) -> None:
        self.pieces_left -= 1
        self.failed |= report.failed
        self.corrupt |= report.corrupt
        self.waits_ns.append(report.queue_ns)
        self.copy_ns += report.copy_ns

    def result(self) -> MoveResult:
        return MoveResult(
            self.move.id, frozenset(self.failed), frozenset(self.corrupt), min(self.waits_ns), self.copy_ns
        )


class Edges:
    """The lanes with their threads, and the moves in flight. ``deliver`` gets the results of ended moves: all results
    of a cache at once, at most once a loop turn. ``deliver`` must not raise."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver,
        lanes: Sequence[Lane] = LANES,
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        self._deliver = deliver
        self._stuck_after_s = stuck_after_s
        self._mailbox: Mailbox[CopyReport] = Mailbox(loop, self._drain)
        self._journeys: dict[tuple[CacheId, MoveId], _Journey] = {}
        self._delivered = asyncio.Event()
        """Set for a moment whenever results have been delivered."""
        self.trace: Trace | None = None
        self._lane_threads = [LaneThreads(lane, self._mailbox.post) for lane in lanes]
        self._routes = {
            edge: (lane, threads)
            for lane, threads in zip(lanes, self._lane_threads, strict=True)
            for edge in lane.edges
        }

    def submit(self, runtime: CacheRuntime, move: Move) -> None:
        """Queues a move. Its slots belong to the mover until its result is delivered."""
        lane, threads = self._routes[move.src, move.dst]
        ended = None if self.trace is None else self.trace(runtime, move)  # first: a span covers its move's wait
        pieces = list(_cut(runtime, move, lane.blocks_at_once(runtime, move)))
        self._journeys[runtime.id, move.id] = _Journey(runtime, move, len(pieces), ended)
        threads.put(pieces)

    def in_flight(self, cache: CacheId | None = None) -> int:
        """Number of moves whose result has not been delivered, of one cache or of all."""
        return sum(cache in (None, place[0]) for place in self._journeys)

    def queued(self) -> dict[Edge, int]:
        """Number of blocks planned on each edge and not yet reported."""
        queued = dict.fromkeys(self._routes, 0)
        for one in self._journeys.values():
            queued[one.move.src, one.move.dst] += len(one.move.items)
        return queued

    def touches(self, cache: CacheId, tier: Tier) -> bool:
        """Whether a move of a cache to or from a tier is in flight."""
        return any(one.runtime.id == cache and tier in (one.move.src, one.move.dst) for one in self._journeys.values())

    async def idle(self, cache: CacheId | None = None) -> None:
        """Returns when no move is in flight and all results are delivered."""
        while self.in_flight(cache):
            await self._delivered.wait()

    async def written(self, cache: CacheId) -> None:
        """Returns when the present writes and deletions to the cache's disk have ended."""
        on_the_way = {place for place, one in self._journeys.items() if place[0] == cache and _on_disk(one.move)}
        while not on_the_way.isdisjoint(self._journeys):
            await self._delivered.wait()

    def problems(self) -> list[str]:
        now_ns = time.monotonic_ns()
        return [problem for threads in self._lane_threads for problem in threads.problems(now_ns, self._stuck_after_s)]

    def stalled_s(self) -> float:
        """Time that the slowest thread has spent in one batch; infinite if a thread died."""
        now_ns = time.monotonic_ns()
        return max(threads.stalled_s(now_ns) for threads in self._lane_threads)

    async def stop(self, grace_s: float = LEAVE_GRACE_S) -> bool:
        """Ends the threads. Moves in flight are abandoned: neither delivered nor counted any more. False if a thread
        hangs in a call for longer than ``grace_s`` and was left behind."""
        for threads in self._lane_threads:
            threads.dismiss()
        lanes, until = self._lane_threads, time.monotonic() + grace_s
        try:
            while not all(each.gone for each in lanes) and time.monotonic() < until:  # noqa: ASYNC110 - of threads
                await asyncio.sleep(_LOOK_S)
            return all(each.gone for each in lanes)
        finally:
            self._mailbox.close()
            self._journeys.clear()
            self._wake()

    def _drain(self) -> None:
        ended: defaultdict[CacheRuntime, list[MoveResult]] = defaultdict(list)
        for report in self._mailbox.take(BLOCKS_PER_TURN, _blocks):
            journey = self._journeys[report.piece.runtime.id, report.piece.move.id]
            journey.add(report)
            if journey.pieces_left == 0:
                ended[journey.runtime].append(self._arrived(journey))
        for runtime, results in ended.items():
            self._deliver(runtime, results)
        self._wake()

    def _wake(self) -> None:
        self._delivered.set()
        self._delivered.clear()

    def _arrived(self, journey: _Journey) -> MoveResult:
        del self._journeys[journey.runtime.id, journey.move.id]
        result = journey.result()
        if journey.ended is not None:
            journey.ended(result)
        return result


def _on_disk(move: Move) -> bool:
    return move.dst is Tier.DISK or move.dst is None


def _blocks(report: CopyReport) -> int:
    return len(report.piece.items)


def _cut(runtime: CacheRuntime, move: Move, blocks: int) -> Iterator[CopyPiece]:
    """Cuts a move into pieces of at most ``blocks`` items, in order."""
    now_ns = time.monotonic_ns()
    for first in range(0, len(move.items), blocks):
        yield CopyPiece(runtime, move, first, move.items[first : first + blocks], now_ns)
