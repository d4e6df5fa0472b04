"""A cache's copies between host and device: one stream each way, one event a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvtier.abi.cuda.driver import Driver, Event, Stream
from kvtier.abi.cuda.errors import CudaError, CudaLost
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.cuda.plan import Copies, Direction, SegmentLocks, joined
from kvtierd.mover.runtime import Unaccounted
from kvtierd.tiers.base import TierIOError

Touched = Mapping[tuple[Tier, GroupId], Set[SlotId]]
"""Slots of each tier and group."""


@dataclass(slots=True, eq=False)
class Passage:
    """A batch from its first copy's issue until nothing of it runs any more. ``event`` says that, once it is recorded.

    ``recorded`` is set when it is, or when it never will be. ``event_failed``: it says nothing of this batch.
    ``fault``: why the batch failed.
    """

    stream: Stream
    event: Event
    reads: Touched
    writes: Touched
    recorded: threading.Event = field(default_factory=threading.Event)
    event_failed: bool = False
    fault: Exception | None = None

    def no_event(self, error: CudaError) -> None:
        """Its event could not be recorded or asked."""
        self.event_failed, self.fault = True, self.fault or error

    def clashes(self, other: Passage) -> bool:
        """Whether the order of the two matters: read after write, write after read, write after write."""
        return _meet(self.writes, other.writes) or _meet(self.writes, other.reads) or _meet(self.reads, other.writes)


def _meet(some: Touched, others: Touched) -> bool:
    return any(not slots.isdisjoint(others[place]) for place, slots in some.items() if place in others)


class Hazards:
    """Which batches under way touch which slots, and for which of them another batch has to wait.

    The core never plans a slot that a move touches before that move has ended, and a slot read or written for a client
    is under its lease, so no batch should ever have to wait. If one of them errs, one stream waits for the other, and
    bytes are not mixed up. There is an entry a batch, not a slot: few batches are under way at a time.

    Any thread. Passages of one stream are entered in the order in which they are issued to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Passage, None] = {}

    def __len__(self) -> int:
        """Batches under way."""
        return len(self._under_way)

    def enter(self, passage: Passage) -> list[Passage]:
        """A batch is about to be issued. Those that it has to wait for: what runs in its own stream is ordered."""
        with self._lock:
            clashing = [other for other in self._under_way if other.stream != passage.stream and other.clashes(passage)]
            self._under_way[passage] = None
        return clashing

    def order(self, after: Iterable[Passage], wait: Callable[[Event], None]) -> None:
        """Has ``wait`` called for the event of each of these that is still under way.

        It waits until their events are recorded: before that there is nothing to wait for. No circle comes of it, since
        each waits only for what was entered before. Nobody's event goes back to the pool during ``wait``. Raises
        :class:`TierIOError` where an event failed.
        """
        for passage in after:
            passage.recorded.wait()
            with self._lock:
                if passage not in self._under_way:
                    continue
                if passage.event_failed:
                    raise TierIOError(0, f"a batch on the same slots cannot be waited for: {passage.fault}")
                wait(passage.event)

    def leave(self, passage: Passage) -> None:
        """Nothing of it runs any more."""
        with self._lock:
            del self._under_way[passage]


SPIN_S: Final = 100e-6
"""A block of a megabyte is there before this, and a sleep would last as long as its copy."""
SHORTEST_S: Final = 50e-6
LONGEST_S: Final = 1e-3
_SHARE: Final = 8


def soon(done: Callable[[], bool]) -> bool:
    """Asks all the time, for a moment. Whether it was done by then."""
    end = time.perf_counter() + SPIN_S
    while not done():
        if time.perf_counter() > end:
            return False
    return True


def wait_until(done: Callable[[], bool]) -> None:
    """Asks all the time at first, then after sleeps of an eighth of the time waited so far, within bounds."""
    began = time.perf_counter()
    if soon(done):
        return
    while not done():
        waited = time.perf_counter() - began
        time.sleep(min(LONGEST_S, max(SHORTEST_S, waited / _SHARE)))


_log = logging.getLogger(__name__)


class Losable(Protocol):
    """What can be lost. ``lost``: why, or None."""

    @property
    def lost(self) -> str | None: ...

    def lose(self, why: str) -> None:
        """Once and for all. Any thread; says nothing the second time."""
        ...


@dataclass(slots=True, frozen=True)
class _Way:
    """``issuing``: held from a batch's entry to its event, so that a stream's batches run in the order of their
    entries."""

    stream: Stream
    direction: Direction
    issuing: threading.Lock = field(default_factory=threading.Lock)


class Traffic:
    """Any thread may issue; whoever has issued settles. Once the device is lost nothing is issued any more."""

    def __init__(self, driver: Driver, device: Losable, locks: SegmentLocks) -> None:
        self._driver: Final = driver
        self._device: Final = device
        self._locks: Final = locks
        self._hazards = Hazards()
        self._closed = False
        self._events: deque[Event] = deque()
        """Whose batch is over, for the next one."""
        driver.bind()
        self._ways: dict[Direction, _Way] = {}
        with ExitStack() as undo:
            for direction in (Direction.TO_HOST, Direction.TO_DEVICE):
                self._ways[direction] = _Way(driver.stream(), direction)
                undo.callback(driver.drop_stream, self._ways[direction].stream)
            undo.pop_all()

    @property
    def issuing(self) -> bool:
        """Whether somebody is inside a call that begins copies, which may hang."""
        return any(way.issuing.locked() for way in self._ways.values())

    @property
    def under_way(self) -> int:
        """Batches that the hardware may be working on."""
        return len(self._hazards)

    def issue(self, direction: Direction, copies: Copies, reads: Touched, writes: Touched) -> Passage:
        """Begins the copies of a batch, which are in no order among themselves. :meth:`settle` must follow.

        Raises :class:`CudaError`, and :class:`TierIOError` after :meth:`close`, where nothing of it can be running.
        """
        with self._noticing():
            self._driver.bind()
        way = self._ways[direction]
        with way.issuing:
            self._require_open()
            with self._noticing():
                event = self._take_event()
            passage = Passage(way.stream, event, reads, writes)
            clashing = self._hazards.enter(passage)
            try:
                with self._noticing():
                    self._hazards.order(clashing, lambda theirs: self._driver.wait(way.stream, theirs))
                    self._require_device()
                    self._copy(way, copies)
            except Exception as error:  # noqa: BLE001 - raised by settle: the event tells when nothing of it runs
                passage.fault = error
            try:
                with self._noticing():
                    self._driver.record(passage.event, way.stream)
            except CudaLost:
                self._leave(passage)  # nothing runs any more: the driver says so only after it has stopped all work
                raise
            except CudaError as error:
                passage.no_event(error)
            finally:
                passage.recorded.set()
        return passage

    def ends_soon(self, passage: Passage) -> bool:
        """Waits for a moment, if nothing else is under way. Whether :meth:`settle` would return at once."""
        if self.under_way > 1 or passage.event_failed:
            return False
        self._driver.bind()
        with suppress(CudaError):  # settle asks again
            return soon(lambda: self._driver.done(passage.event))
        return False

    def settle(self, passage: Passage) -> None:
        """Returns when the batch is done. Raises what went wrong, when nothing of it runs any more, or
        :class:`Unaccounted`."""
        self._driver.bind()
        try:
            with self._noticing():
                self._await(passage)
        except CudaLost:
            self._leave(passage)
            raise
        except CudaError as error:
            self._device.lose(str(error))
            raise Unaccounted(f"nobody can say whether copies still run: {error}") from error
        self._leave(passage)
        if passage.fault is not None:
            raise passage.fault

    def _await(self, passage: Passage) -> None:
        """Returns when nothing of the batch runs. An error of its event says nothing of the device: the stream is asked
        then, and given no other work meanwhile."""
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
        """Gives streams and events back; nothing is issued any more. False: something is under way, or being issued for
        longer than ``patience_s``, and nothing has been given back. Once is enough, more does nothing."""
        until = time.monotonic() + patience_s
        with ExitStack() as issuing:
            for way in self._ways.values():
                if not way.issuing.acquire(timeout=max(0.0, until - time.monotonic())):
                    return False
                issuing.callback(way.issuing.release)
            if self.under_way or self._closed:
                return self._closed
            self._closed = True
        self._driver.bind()
        with suppress(CudaLost):  # they went with the device
            while self._events:
                self._driver.drop_event(self._events.pop())
            for way in self._ways.values():
                self._driver.drop_stream(way.stream)
        return True

    def _copy(self, way: _Way, copies: Copies) -> None:
        """Page-locked memory by as few calls as the driver has, other memory copy by copy."""
        if copies.shape[1] > 1:
            chunks = self._locks.chunks_at(copies[0 if way.direction is Direction.TO_HOST else 1])
            copies, chunks = joined(copies, chunks)
            if self._driver.features.batch_copy:
                locked = chunks < self._locks.locked
                dsts, srcs, sizes = copies[:, locked].tolist()
                self._driver.copy_batch(dsts, srcs, sizes, way.stream)
                copies = copies[:, ~locked]
        for dst, src, nbytes in copies.T.tolist():
            self._driver.copy(dst, src, nbytes, way.stream)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Whatever call says that the device is lost: that is told before the batch is reported as failed."""
        try:
            yield
        except CudaLost as error:
            self._device.lose(str(error))
            raise

    def _require_device(self) -> None:
        if self._device.lost is not None:
            raise TierIOError(0, f"the device is lost: {self._device.lost}")

    def _require_open(self) -> None:
        if self._closed:
            raise TierIOError(0, "the cache is closed")

    def _take_event(self) -> Event:
        try:
            return self._events.pop()
        except IndexError:
            return self._driver.event()

    def _leave(self, passage: Passage) -> None:
        self._hazards.leave(passage)
        if not passage.event_failed:
            self._events.append(passage.event)
            return
        with suppress(CudaError):  # its handle may be what failed
            self._driver.drop_event(passage.event)
