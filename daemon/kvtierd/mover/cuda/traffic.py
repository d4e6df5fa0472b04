"""A cache's copies between host and device: one stream a direction, one event a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtier.abi.cuda.driver import Copies, Driver, Event, Stream, joined
from kvtier.abi.cuda.errors import CudaError, CudaLost
from kvtier.abi.cuda.page_locks import PageLocks
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.cuda.plan import Direction
from kvtierd.mover.runtime import Unaccounted
from kvtierd.tiers.base import TierIOError
from kvtierd.tiers.cuda.pool import CudaDevice

Touched = Set[tuple[Tier, GroupId, SlotId]]


@dataclass(slots=True, eq=False)
class Passage:
    """A batch from the issue of its first copy until no copy of it runs. ``event`` signals the end, once it is
    recorded.

    ``event_failed``: the event says nothing about this batch. ``fault``: why the batch failed.
    """

    stream: Stream
    event: Event
    reads: Touched
    writes: Touched
    event_failed: bool = False
    fault: Exception | None = None

    def no_event(self, error: CudaError) -> None:
        """Notes that the event could not be recorded or queried."""
        self.event_failed, self.fault = True, self.fault or error

    def clashes(self, other: Passage) -> bool:
        """Whether the order of batches on two streams matters: read after write, write after read, write after
        write."""
        if self.stream == other.stream:
            return False
        ours, theirs = self.reads | self.writes, other.reads | other.writes
        return not (self.writes.isdisjoint(theirs) and other.writes.isdisjoint(ours))


SPIN_S: Final = 100e-6
"""A small copy ends within this time, and a sleep would last as long as the copy."""
POLL_S: Final = 100e-6


def soon(done: Callable[[], bool]) -> bool:
    """Polls for a moment without a sleep. Returns whether ``done`` came true."""
    end = time.perf_counter() + SPIN_S
    while not done():
        if time.perf_counter() > end:
            return False
    return True


def wait_until(done: Callable[[], bool]) -> None:
    """Polls without a sleep at first, then after sleeps."""
    if not soon(done):
        while not done():
            time.sleep(POLL_S)


_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Way:
    """``issuing``: held from a batch's entry to its event, so that a stream runs its batches in the order of their
    entries."""

    stream: Stream
    direction: Direction
    issuing: threading.Lock = field(default_factory=threading.Lock)


class Traffic:
    """Issues and settles batches, from any thread. Each issued batch is settled once. A lost device gets no more
    batches.

    A batch is issued only after the batches of the other stream that touch its slots have ended. Batches seldom wait:
    the core plans no slot that a move touches before that move has ended, and a lease covers the slots of most reads
    for clients.
    """

    def __init__(self, driver: Driver, device: CudaDevice, locks: PageLocks) -> None:
        self._driver: Final = driver
        self._device: Final = device
        self._locks: Final = locks
        self._changed = threading.Condition()
        self._under_way: set[Passage] = set()
        self._closed = False
        self._events: deque[Event] = deque()
        """Events of ended batches, for later batches."""
        driver.bind()
        self._ways: dict[Direction, _Way] = {}
        with ExitStack() as undo:
            for direction in (Direction.TO_HOST, Direction.TO_DEVICE):
                self._ways[direction] = _Way(driver.stream(), direction)
                undo.callback(driver.drop_stream, self._ways[direction].stream)
            undo.pop_all()

    @property
    def issuing(self) -> bool:
        """Whether a thread is inside a call that begins copies, which may hang."""
        return any(way.issuing.locked() for way in self._ways.values())

    @property
    def under_way(self) -> int:
        """Number of batches that the hardware may be working on."""
        return len(self._under_way)

    def issue(self, direction: Direction, copies: Copies, reads: Touched, writes: Touched) -> Passage:
        """Begins the copies of a batch, which run in any order. :meth:`settle` must follow, in any thread but that of a
        later batch on the same slots. Raises :class:`CudaError`, and :class:`TierIOError` after :meth:`close`; then no
        copy of the batch can be running."""
        with self._noticing():
            self._driver.bind()
        way = self._ways[direction]
        with way.issuing:
            with self._noticing():
                event = self._take_event()
            passage = Passage(way.stream, event, reads, writes)
            self._enter(passage)
            try:
                with self._noticing():
                    if self._device.lost is not None:
                        raise TierIOError(0, f"the device is lost: {self._device.lost}")
                    self._copy(way, copies)
            except Exception as error:  # noqa: BLE001 - raised by settle, when no copy of the batch runs
                passage.fault = error
            try:
                with self._noticing():
                    self._driver.record(passage.event, way.stream)
            except CudaLost:
                self._leave(passage)  # no copy runs: the driver reports a loss only after it has stopped all work
                raise
            except CudaError as error:
                passage.no_event(error)
        return passage

    def ends_soon(self, passage: Passage) -> bool:
        """Waits for a moment, if no other batch is in flight. Returns whether :meth:`settle` would return at once."""
        if self.under_way > 1 or passage.event_failed:
            return False
        self._driver.bind()
        with suppress(CudaError):  # settle queries again
            return soon(lambda: self._driver.done(passage.event))
        return False

    def settle(self, passage: Passage) -> None:
        """Returns when the batch is done. Raises the batch's fault once no copy of it runs, or :class:`Unaccounted` if
        that cannot be known."""
        self._driver.bind()
        try:
            with self._noticing():
                self._await(passage)
        except CudaLost:
            self._leave(passage)
            raise
        except CudaError as error:
            self._lose(error)
            raise Unaccounted(f"nobody can say whether copies still run: {error}") from error
        self._leave(passage)
        if passage.fault is not None:
            raise passage.fault

    def _await(self, passage: Passage) -> None:
        """Returns when no copy of the batch runs. A failed event says nothing about the device, so the stream is
        queried instead, and gets no other work meanwhile."""
        if not passage.event_failed:
            try:
                wait_until(lambda: self._driver.done(passage.event))
                return
            except CudaLost:
                raise
            except CudaError as error:
                passage.no_event(error)
        with next(way.issuing for way in self._ways.values() if way.stream == passage.stream):
            wait_until(lambda: self._driver.idle(passage.stream))

    def close(self, patience_s: float = 0.0) -> bool:
        """Gives streams and events back, after which no batch is issued. False, with nothing given back: after
        ``patience_s`` a batch is still in issue or in flight. Later calls do nothing."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under_way, patience_s) or self._closed:
                return self._closed
            self._closed = True
        self._driver.bind()
        with suppress(CudaLost):  # streams and events of a lost device are gone
            while self._events:
                self._driver.drop_event(self._events.pop())
            for way in self._ways.values():
                self._driver.drop_stream(way.stream)
        return True

    def _copy(self, way: _Way, copies: Copies) -> None:
        """Copies page-locked memory in as few calls as the driver allows, other memory copy by copy."""
        copies, _ = joined(copies, np.zeros_like(copies[0]))
        copies, locked = self._locks.split(copies, 0 if way.direction is Direction.TO_HOST else 1)
        self._driver.copy_many(copies, locked, way.stream)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Marks the device as lost if a call says so, before the batch is reported as failed."""
        try:
            yield
        except CudaLost as error:
            self._lose(error)
            raise

    def _lose(self, error: CudaError) -> None:
        self._device.lose(str(error))
        with self._changed:
            self._changed.notify_all()

    def _take_event(self) -> Event:
        try:
            return self._events.pop()
        except IndexError:
            return self._driver.event()

    def _enter(self, passage: Passage) -> None:
        """Waits for batches that clash with this one, unless the device is lost. Raises :class:`TierIOError` if
        :meth:`close` came first."""
        with self._changed:
            self._changed.wait_for(lambda: self._device.lost or not any(map(passage.clashes, self._under_way)))
            if not self._closed:
                self._under_way.add(passage)
                return
        self._driver.drop_event(passage.event)
        raise TierIOError(0, "the cache is closed")

    def _leave(self, passage: Passage) -> None:
        if not passage.event_failed:
            self._events.append(passage.event)
        else:
            with suppress(CudaError):  # the handle itself may have failed
                self._driver.drop_event(passage.event)
        with self._changed:
            self._under_way.remove(passage)
            self._changed.notify_all()
