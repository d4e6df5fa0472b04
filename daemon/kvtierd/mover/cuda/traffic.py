"""A cache's copies between host and device: one stream each way, one event a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvtier.abi.cuda.driver import Address, Direction, Driver, Event, Stream
from kvtier.abi.cuda.errors import CudaError, CudaLost
from kvtierd.mover.cuda.hazards import Hazards, Passage, Spot
from kvtierd.mover.cuda.pagelocks import PageLocks
from kvtierd.mover.cuda.plan import Rows
from kvtierd.mover.cuda.polling import soon, wait_until
from kvtierd.mover.runtime import Unaccounted
from kvtierd.tiers.base import TierIOError

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

    def __init__(self, driver: Driver, device: Losable, locks: PageLocks) -> None:
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

    def issue(
        self, direction: Direction, pieces: Sequence[Rows], reads: Iterable[Spot], writes: Iterable[Spot]
    ) -> Passage:
        """Begins the copies of a batch, which are in no order among themselves. :meth:`settle` must follow.

        Raises :class:`CudaError`, and :class:`TierIOError` after :meth:`close`, where nothing of it can be running; and
        :class:`Unaccounted`.
        """
        with self._noticing():
            self._driver.bind()
        way = self._ways[direction]
        with way.issuing:
            self._require_open()
            with self._noticing():
                event = self._take_event()
            passage = Passage(way.stream, event, frozenset(reads), frozenset(writes))
            clashing = self._hazards.enter(passage)
            try:
                with self._noticing():
                    self._hazards.order(clashing, lambda theirs: self._driver.wait(way.stream, theirs))
                    self._require_device()
                    self._copy(way, pieces)
            except Exception as error:  # noqa: BLE001 - raised by settle: the event tells when nothing of it runs
                passage.fault = error
            try:
                self._driver.record(passage.event, way.stream)
            except CudaError as error:
                raise self._unknowable(passage, error) from error
            finally:
                passage.recorded.set()
        return passage

    def ends_soon(self, passage: Passage) -> bool:
        """Waits for a moment, if nothing else is under way. Whether :meth:`settle` would return, or raise, at once."""
        if self.under_way > 1:
            return False
        self._driver.bind()
        try:
            return soon(lambda: self._driver.done(passage.event))
        except CudaError:
            return True

    def settle(self, passage: Passage) -> None:
        """Returns when the batch is done. Raises what went wrong, when nothing of it runs any more, or
        :class:`Unaccounted`."""
        self._driver.bind()
        try:
            wait_until(lambda: self._driver.done(passage.event))
        except CudaError as error:
            raise self._unknowable(passage, error) from error
        self._leave(passage)
        if passage.fault is not None:
            raise passage.fault

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

    def _copy(self, way: _Way, pieces: Sequence[Rows]) -> None:
        singles: list[tuple[Address, Address, int]] = []
        batched = self._driver.features.batch_copy and (len(pieces) > 1 or pieces[0].rows > 1)
        for piece in pieces:
            host = piece.dst if way.direction is Direction.TO_HOST else piece.src
            if batched and self._locks.covers(host):
                singles += ((Address(dst), Address(src), nbytes) for dst, src, nbytes in piece.singles())
            else:
                self._copy_piece(way, piece)
        if singles:
            self._driver.copy_batch(singles, way.stream)

    def _copy_piece(self, way: _Way, piece: Rows) -> None:
        dst, src, nbytes, rows, dst_stride, src_stride = piece
        if rows == 1:
            self._driver.copy(Address(dst), Address(src), nbytes, way.stream)
        else:
            self._driver.copy_rows(
                Address(dst), dst_stride, Address(src), src_stride, nbytes, rows, way.stream, direction=way.direction
            )

    def _unknowable(self, passage: Passage, error: CudaError) -> Exception:
        """The batch's event cannot be asked. With a lost device nothing runs any more: the driver says so only after
        it has stopped the device's work."""
        self._device.lose(str(error))
        if isinstance(error, CudaLost):
            self._leave(passage)
            return error
        return Unaccounted(f"nobody can say whether copies still run: {error}")

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
        self._events.append(passage.event)
