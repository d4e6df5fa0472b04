"""A GPU as this process's caches use it: copies that are over when they return, and fences in other streams' work.

It is found by its uuid, whatever number it has here, opened once a process in the primary context, which torch and
others of the process share, and kept open.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final, TypeVar

from kvtier.abi.cuda.driver import Copy, Driver, Event, Stream
from kvtier.abi.cuda.errors import CAPTURED_EVENT, CudaError, CudaLost
from kvtier.abi.cuda.opening import uuid_name
from kvtier.errors import DeviceError
from kvtier.fences import Fence

_LEGACY: Final = Stream(1)
"""``CU_STREAM_LEGACY``. A 0 means the same to torch, but to the bindings whatever their environment says."""
_LONGEST_PAUSE_S: Final = 0.001

Kept = TypeVar("Kept")


@dataclass(slots=True, frozen=True)
class _Lane:
    """What a thread copies with."""

    stream: Stream
    event: Event


class Gpu:
    """Any thread may use it. What fails raises :class:`DeviceError`."""

    _open: ClassVar[dict[tuple[int, str], Gpu]] = {}
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, driver: Driver) -> None:
        self.driver: Final = driver
        # Appending is atomic, and so is popping; to ask first whether there is any is not.
        self._lanes: Final[deque[_Lane]] = deque()
        self._events: Final[deque[Event]] = deque()

    @classmethod
    def of(cls, uuid: str) -> Gpu:
        """The one with this uuid, 32 hex digits. Takes long the first time.

        Raises :class:`kvtier.abi.cuda.errors.CudaUnavailable`, :class:`CudaError`.
        """
        with cls._opening:
            place = os.getpid(), uuid  # a forked child cannot use its parent's
            gpu = cls._open.get(place)
            if gpu is None:
                gpu = cls._open[place] = cls(Driver.open(uuid_name(bytes.fromhex(uuid))))
            return gpu

    def fence(self, stream: int | None) -> Fence:
        """The point that a stream has reached. None: torch's current one of this thread, else the legacy default."""
        place = Stream(self._current() if stream is None else stream) or _LEGACY
        with failing("marking how far a stream has come"), self.driver.visit():
            if self.driver.capturing(place):
                # An event recorded there belongs to the graph: to ask it would be an error, and spoil the graph.
                message = f"stream {place:#x} is being captured into a graph: its work has no end yet to wait for"
                raise DeviceError(message, call="cuEventRecord", code=CAPTURED_EVENT, reason="DEVICE_FAILED")
            event = _popped(self._events) or self.driver.event()
            fence = _Recorded(self, event)
            self.driver.record(event, place)
            return fence

    def done(self, event: Event) -> bool:
        with failing("asking whether work on the slots is over"):
            return self.driver.done(event)

    def take_back(self, event: Event) -> None:
        """Nobody asks for it any more; that it may still be pending does no harm to whoever records it next."""
        self._events.append(event)

    def copy(self, runs: Iterable[Iterable[Copy]]) -> None:
        """Copies, in no order; when it returns or raises, nothing is being copied any more. Only where the driver
        answers neither about an event nor about the stream, though the device is not lost, can nobody wait for that.

        Only within a run may the host memory of several copies be taken as one: what was page-locked apart stays apart
        to the driver, even where one range ends at the other's first byte.
        """
        with failing("copying to or from slots"), self.driver.visit():
            lane = _popped(self._lanes) or _Lane(self.driver.stream(), self.driver.event())
            try:
                for dst, src, nbytes in chain.from_iterable(map(joined, runs)):
                    self.driver.copy(dst, src, nbytes, lane.stream)
            finally:
                self.wait(self._over(lane))
                self._lanes.append(lane)

    def _over(self, lane: _Lane) -> Callable[[], bool]:
        """Whether what the lane was given so far is over. The point is marked when it is first asked, by :meth:`wait`:
        an interrupt in between would leave copies that nobody waits for. Where it cannot be marked, or asked for, the
        stream itself is asked, and what went wrong is raised when that is idle."""
        marked, fault = False, None

        def over() -> bool:
            nonlocal marked, fault
            if fault is None:
                try:
                    if not marked:
                        self.driver.record(lane.event, lane.stream)
                        marked = True
                    return self.driver.done(lane.event)
                except CudaLost:
                    raise
                except CudaError as error:
                    fault = error
            if self.driver.idle(lane.stream):
                raise fault
            return False

        return over

    @staticmethod
    def wait(passed: Callable[[], bool]) -> None:
        """In this thread, first without sleeping: whoever waits is short of time, not of CPU, while a small copy takes.

        An interrupt (Ctrl-C) is raised when it is over: the memory is a lease's or the caller's, and taken back then.
        """
        pause, interrupt = 0.0, None
        while True:
            try:
                if passed():
                    break
                time.sleep(pause)
            except KeyboardInterrupt as error:
                interrupt = error
            pause = min(pause + 20e-6, _LONGEST_PAUSE_S)
        if interrupt is not None:
            raise interrupt

    def _current(self) -> int:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return _LEGACY
        return int(torch.cuda.current_stream(self.driver.ordinal).cuda_stream)


class _Recorded(Fence):
    def __init__(self, gpu: Gpu, event: Event) -> None:
        self._gpu = gpu
        self._event = event

    def passed(self) -> bool:
        return self._gpu.done(self._event)

    def __del__(self) -> None:
        self._gpu.take_back(self._event)


def _popped(kept: deque[Kept]) -> Kept | None:
    try:
        return kept.pop()
    except IndexError:
        return None


def joined(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Fewer copies of the same bytes: those that follow each other at both ends become one."""
    held: Copy | None = None
    for copy in copies:
        if held is not None and (held[0] + held[2], held[1] + held[2]) == copy[:2]:
            held = held[0], held[1], held[2] + copy[2]
            continue
        if held is not None:
            yield held
        held = copy
    if held is not None:
        yield held


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Errors of CUDA as kvtier's, with what to do."""
    try:
        yield
    except CudaLost as error:
        what = "this process can use its GPU no more: end it, and the daemon has its slots back"
        raise DeviceError(
            f"{doing}: {error}; {what}", call=error.call, code=error.code, reason="DEVICE_LOST"
        ) from error
    except CudaError as error:
        message = f"{doing}: {error}"
        raise DeviceError(message, call=error.call, code=error.code, reason="DEVICE_FAILED") from error
