"""Worker threads: take pieces in order, carry them out in batches, report each one."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Final

from kvtierd.mover.lanes import Lane
from kvtierd.mover.work import Batch, Faults, Piece, Report, reports_of
from kvtierd.tiers.device import Chaos

FAILURE_SHOWN_S: Final = 60.0

_log = logging.getLogger(__name__)

WorkQueue = SimpleQueue[Piece | None]
"""None tells one worker to stop, after what was queued before it."""

Post = Callable[[Sequence[Report]], None]


class Worker:
    """One thread of a lane.

    The public fields are written by its own thread and read by the loop's, each in one step.
    """

    def __init__(self, name: str, lane: Lane, queue: WorkQueue, post: Post, exited: Callable[[], None]) -> None:
        self.name = name
        self.busy_since_ns: int | None = None
        """The heartbeat: ``time.monotonic_ns()`` at which the batch in hand was begun, None between batches."""
        self.failure: tuple[int, str] | None = None
        """When (``time.monotonic_ns()``) and why a batch last failed as a whole."""
        self._lane = lane
        self._queue = queue
        self._post = post
        self._exited = exited
        self._abandoned = False
        self._delays: dict[Chaos, Iterator[float]] = {}
        self.thread = threading.Thread(target=self._run, name=f"kvtierd-{name}", daemon=True)

    def abandon(self) -> None:
        """What is still queued will not be carried out, nor reported."""
        self._abandoned = True

    def problems(self, now_ns: int, stuck_after_s: float) -> Iterator[str]:
        busy_since_ns, failure = self.busy_since_ns, self.failure
        if not self.thread.is_alive() and not self._abandoned:
            yield f"{self.name}: its thread has died"
        if busy_since_ns is not None and (busy_s := (now_ns - busy_since_ns) / 1e9) > stuck_after_s:
            yield f"{self.name}: stuck, a batch has been running for {busy_s:.1f} s"
        if failure is not None and (ago_s := (now_ns - failure[0]) / 1e9) < FAILURE_SHOWN_S:
            yield f"{self.name}: a batch failed {ago_s:.1f} s ago: {failure[1]}"

    def stalled_s(self, now_ns: int) -> float:
        """How long the batch in hand has been running; infinite for a thread that died."""
        busy_since_ns = self.busy_since_ns
        if not self.thread.is_alive() and not self._abandoned:
            return inf
        return 0.0 if busy_since_ns is None else (now_ns - busy_since_ns) / 1e9

    def _run(self) -> None:
        try:
            for batch in self._batches():
                if not self._abandoned:
                    self._carry_out(batch)
        finally:
            self._exited()

    def _batches(self) -> Iterator[list[Piece]]:
        batch: list[Piece] = []
        while True:
            try:
                piece = self._queue.get(block=not batch)
            except Empty:
                yield batch
                batch = []
                continue
            if piece is not None and (not batch or self._lane.joins(batch, piece)):
                batch.append(piece)
                continue
            if batch:
                yield batch
            if piece is None:
                return
            batch = [piece]

    def _carry_out(self, batch: Batch) -> None:
        chaos = batch[0].runtime.chaos
        started_ns = self.busy_since_ns = time.monotonic_ns()
        self._simulate_latency(chaos)
        try:
            faults = self._lane.carry_out(batch)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the batch failed and the thread goes on
            faults = Faults(failed=frozenset(range(sum(len(piece.items) for piece in batch))))
            self.failure = (time.monotonic_ns(), f"{type(error).__name__}: {error}")
            _log.exception("%s: a batch failed", self.name)
        ended_ns = time.monotonic_ns()
        self._simulate_latency(chaos)
        self.busy_since_ns = None
        self._post(reports_of(batch, faults, started_ns, ended_ns))

    def _simulate_latency(self, chaos: Chaos | None) -> None:
        """Before a copy: it happens late. After it: threads complete in any order among each other."""
        if chaos is None:
            return
        if chaos not in self._delays:
            self._delays[chaos] = chaos.delays(self.name)
        time.sleep(next(self._delays[chaos]))


class Crew:
    """A lane's queue and threads. Loop thread only."""

    def __init__(self, lane: Lane, loop: asyncio.AbstractEventLoop, post: Post) -> None:
        self._lane = lane
        self._queue: WorkQueue = SimpleQueue()
        self._exits: dict[Worker, asyncio.Event] = {}
        for number in range(lane.threads):
            name = lane.name if lane.threads == 1 else f"{lane.name}-{number}"
            exited = asyncio.Event()
            worker = Worker(name, lane, self._queue, post, partial(_tell, loop, exited))
            self._exits[worker] = exited
            worker.thread.start()

    def put(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._queue.put(piece)

    def problems(self, now_ns: int, stuck_after_s: float) -> Iterator[str]:
        for worker in self._exits:
            yield from worker.problems(now_ns, stuck_after_s)

    def stalled_s(self, now_ns: int) -> float:
        return max(worker.stalled_s(now_ns) for worker in self._exits)

    def dismiss(self) -> None:
        """Ends the threads after the batch in hand; what is queued is not carried out."""
        for worker in self._exits:
            worker.abandon()
            self._queue.put(None)

    async def gone(self) -> None:
        """Returns when no thread is left."""
        for worker, exited in self._exits.items():
            await exited.wait()
            worker.thread.join()


def _tell(loop: asyncio.AbstractEventLoop, exited: asyncio.Event) -> None:
    """From a thread. A loop closed meanwhile has given up on the thread: nobody is left to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(exited.set)
