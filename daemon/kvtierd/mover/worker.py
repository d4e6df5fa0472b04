"""Worker threads: take pieces in order, carry them out in batches, report each piece.

A batch may come in two halves. Another thread does the second half while the next batch's first half begins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import Queue
from typing import Final, TypeVar

from kvtier.abi.cuda.errors import CudaError
from kvtierd.core.ids import DEVICE
from kvtierd.core.outcome import Move
from kvtierd.mover.runtime import Batch, CacheRuntime, CopyPiece, Faults, Finish, Unaccounted
from kvtierd.mover.work import CarryOut, Concerns, CopyReport, Edge, reports_of
from kvtierd.tiers.base import TierError
from kvtierd.tiers.mapped import Chaos

RETIRES_PER_COPY: Final = 4
"""Number of deletions that a batch takes for each copy that it could take: deletions are cheap next to copies."""
FAILURE_SHOWN_S: Final = 60.0

_log = logging.getLogger(__name__)

R = TypeVar("R")

Post = Callable[[Sequence[CopyReport]], None]


@dataclass(slots=True, frozen=True)
class Lane:
    """A queue and its threads. A batch has pieces of one cache, in the order queued."""

    name: str
    edges: tuple[Edge, ...]
    threads: int
    batch_blocks: int
    """Limit of copies in a batch. With ``batch_bytes``, the limit of their bytes, it bounds the time between
    heartbeats."""
    carry_out: CarryOut
    concerns: Callable[[CopyPiece], Concerns] = lambda piece: frozenset()
    """Slots and blocks that no two pieces of a batch may share."""
    batch_bytes: int = 1 << 62
    """Limit of copied bytes in a batch. A single block may be larger."""
    in_turn: bool = False
    """Moves take turns, a piece each, so a small move does not wait for a large move. Otherwise first come, first
    served."""

    def blocks_at_once(self, runtime: CacheRuntime, move: Move) -> int:
        """Largest number of a move's items that one piece may have, so that the piece fits in a batch."""
        if move.dst is None:
            return self.batch_blocks
        nbytes = self.batch_bytes
        if runtime.cuda is not None and DEVICE in (move.src, move.dst):
            nbytes = min(nbytes, runtime.cuda.batch_bytes)
        return max(1, min(self.batch_blocks, nbytes // runtime.spec.record_bytes(move.group)))


class Gathering:
    """Pieces that are carried out together, with the counts that limit a batch."""

    def __init__(self, lane: Lane, first: CopyPiece) -> None:
        self._lane = lane
        self._counts = _counts(first)
        self._about = set(lane.concerns(first))
        self.pieces = [first]

    def join(self, piece: CopyPiece) -> bool:
        """Adds a piece if it fits in the batch. Returns whether it was added."""
        lane, runtime, about = self._lane, piece.runtime, self._lane.concerns(piece)
        if runtime is not self.pieces[0].runtime or not self._about.isdisjoint(about):
            return False
        counts = tuple(mine + more for mine, more in zip(self._counts, _counts(piece), strict=True))
        copies, retires, copied_bytes, device_bytes = counts
        if copies > lane.batch_blocks or copied_bytes > lane.batch_bytes:
            return False
        if retires > lane.batch_blocks * RETIRES_PER_COPY:
            return False
        if runtime.cuda is not None and device_bytes > runtime.cuda.batch_bytes:
            return False  # a small GPU batch keeps no other batch waiting for long
        self._counts = counts
        self._about |= about
        self.pieces.append(piece)
        return True


def _counts(piece: CopyPiece) -> tuple[int, ...]:
    """Copies, deletions, copied bytes, and copied bytes of the device tier."""
    count, move = len(piece.items), piece.move
    if move.dst is None:
        return 0, count, 0, 0
    nbytes = count * piece.runtime.spec.record_bytes(move.group)
    return count, 0, nbytes, nbytes if DEVICE in (move.src, move.dst) else 0


class WorkQueue:
    """Queue of pieces from the loop to threads. ``in_turn``: moves take turns, a piece each; otherwise first come,
    first served."""

    def __init__(self, *, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._changed = threading.Condition()
        self._lines: deque[deque[CopyPiece]] = deque()
        """The remaining pieces of each move, next move first. No line is empty."""
        self._stopped = False

    def put(self, pieces: Sequence[CopyPiece]) -> None:
        """Adds all pieces of one move, in order."""
        with self._changed:
            self._lines.append(deque(pieces))
            self._changed.notify_all()

    def stop(self) -> None:
        """Makes every thread get None; queued pieces stay."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def get(self, *, wait: bool) -> CopyPiece | None:
        """Returns the next piece; None after :meth:`stop`, or if there is none and the caller does not wait."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._lines or self._stopped)
            if self._stopped or not self._lines:
                return None
            line = self._lines[0]
            piece = line.popleft()
            if not line:
                self._lines.popleft()
            elif self._in_turn:
                self._lines.rotate(-1)
            return piece


class LaneThread:
    """A thread that works on batches. The thread writes the public fields and the loop reads them, each in one step."""

    def __init__(self, name: str, post: Post) -> None:
        self.name = name
        self.busy_since_ns: int | None = None
        """Heartbeat: ``time.monotonic_ns()`` at the start of the present batch, None between batches."""
        self.failure: tuple[int, str] | None = None
        """When (``time.monotonic_ns()``) and why a batch last failed as a whole."""
        self._post = post
        self._abandoned = False
        self._delays: dict[Chaos, Iterator[float]] = {}
        self.thread = threading.Thread(target=self._work, name=f"kvtierd-{name}", daemon=True)

    def abandon(self) -> None:
        """Notes that the thread is to end."""
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
        """Time that the present batch has been running; infinite if the thread died."""
        busy_since_ns = self.busy_since_ns
        if not self.thread.is_alive() and not self._abandoned:
            return inf
        return 0.0 if busy_since_ns is None else (now_ns - busy_since_ns) / 1e9

    def _work(self) -> None:
        raise NotImplementedError

    def _attempt(self, batch: Batch, work: Callable[[], R]) -> R | Faults | None:
        """Does ``work``. None: the batch must not be reported."""
        try:
            return work()
        except Unaccounted as error:
            self._note(error)
            return None
        except Exception as error:  # noqa: BLE001 - the batch failed and the thread goes on
            self._note(error)
            return Faults(failed=frozenset(range(sum(len(piece.items) for piece in batch))))

    def _note(self, error: Exception) -> None:
        self.failure = (time.monotonic_ns(), f"{type(error).__name__}: {error}")
        bug = None if isinstance(error, TierError | CudaError | Unaccounted) else error
        _log.error("a batch failed worker=%s why=%r", self.name, str(error), exc_info=bug)

    def _report(self, batch: Batch, faults: Faults | None, started_ns: int) -> None:
        if faults is None:
            self.busy_since_ns = None
            return
        ended_ns = time.monotonic_ns()
        if (chaos := batch[0].runtime.chaos) is not None:
            self._simulate_latency(chaos)
        self.busy_since_ns = None
        self._post(reports_of(batch, faults, started_ns, ended_ns))

    def _simulate_latency(self, chaos: Chaos) -> None:
        """Sleeps before a copy, so that it happens late, and after it, so that threads complete in any order."""
        if chaos not in self._delays:
            self._delays[chaos] = chaos.delays(self.name)
        time.sleep(next(self._delays[chaos]))


class FinishThread(LaneThread):
    """Does the second halves of a worker's batches, in order. A batch's time is counted from the end of the batch
    before, so the times of a lane add up to its busy time."""

    def __init__(self, name: str, post: Post) -> None:
        super().__init__(name, post)
        self._begun: Queue[tuple[Batch, Finish, int] | None] = Queue(maxsize=1)
        self._ended_ns = 0

    def put(self, batch: Batch, finish: Finish, started_ns: int) -> None:
        """Queues a second half. Blocks while another batch waits."""
        self._begun.put((batch, finish, started_ns))

    def end(self) -> None:
        """Ends the thread after the batches already put."""
        self._begun.put(None)

    def _work(self) -> None:
        while (begun := self._begun.get()) is not None:
            self._finish(*begun)
            del begun  # its views would keep a removed cache's memory until the next batch

    def _finish(self, batch: Batch, finish: Finish, started_ns: int) -> None:
        self.busy_since_ns = time.monotonic_ns()
        faults = self._attempt(batch, finish)
        turn_ns, self._ended_ns = max(started_ns, self._ended_ns), time.monotonic_ns()
        self._report(batch, faults, turn_ns)


class Worker(LaneThread):
    """Takes a lane's pieces. ``finish_thread``: does the second halves."""

    def __init__(self, name: str, lane: Lane, queue: WorkQueue, post: Post, finish_thread: FinishThread) -> None:
        super().__init__(name, post)
        self._lane = lane
        self._queue = queue
        self._finish_thread = finish_thread

    def _work(self) -> None:
        try:
            piece = self._queue.get(wait=True)
            while piece is not None and not self._abandoned:
                gathered = Gathering(self._lane, piece)
                while (piece := self._queue.get(wait=False)) is not None and gathered.join(piece):
                    pass
                self._carry_out(gathered.pieces)
                if piece is None:  # else it did not fit, and begins the next batch
                    piece = self._queue.get(wait=True)
        finally:
            self._finish_thread.end()

    def _carry_out(self, batch: Batch) -> None:
        started_ns = self.busy_since_ns = time.monotonic_ns()
        if (chaos := batch[0].runtime.chaos) is not None:
            self._simulate_latency(chaos)
        done = self._attempt(batch, partial(self._lane.carry_out, batch))
        if done is None or isinstance(done, Faults):
            self._report(batch, done, started_ns)
            return
        self.busy_since_ns = None
        self._finish_thread.put(batch, done, started_ns)


class LaneThreads:
    """A lane's queue and threads. Loop thread only."""

    def __init__(self, lane: Lane, post: Post) -> None:
        self._queue = WorkQueue(in_turn=lane.in_turn)
        self._threads: list[LaneThread] = []
        for number in range(lane.threads):
            name = lane.name if lane.threads == 1 else f"{lane.name}-{number}"
            finish_thread = FinishThread(f"{name}-finish", post)
            self._threads += [finish_thread, Worker(name, lane, self._queue, post, finish_thread)]
        for lane_thread in self._threads:
            lane_thread.thread.start()

    def put(self, pieces: Sequence[CopyPiece]) -> None:
        self._queue.put(pieces)

    def problems(self, now_ns: int, stuck_after_s: float) -> Iterator[str]:
        for lane_thread in self._threads:
            yield from lane_thread.problems(now_ns, stuck_after_s)

    def stalled_s(self, now_ns: int) -> float:
        return max(lane_thread.stalled_s(now_ns) for lane_thread in self._threads)

    def dismiss(self) -> None:
        """Ends the threads after their present batches; queued pieces are not carried out."""
        for lane_thread in self._threads:
            lane_thread.abandon()
        self._queue.stop()

    @property
    def gone(self) -> bool:
        return not any(lane_thread.thread.is_alive() for lane_thread in self._threads)
