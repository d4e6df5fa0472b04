"""Fences: this process's own GPU work that must end before the daemon lets others read or reuse slots.

A kernel runs on after the call that launched it has returned. A commit that overtakes the kernel makes a block of
missing bytes; a release that overtakes it gives away a slot that is still being read. Neither shows as an error. So
calls about leases on a GPU take a point in a stream's work, a :class:`Fence`, and are sent once the stream has passed
it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda.driver import Copies, Driver, Event
from kvtier.abi.cuda.driver import Stream as DriverStream
from kvtier.abi.cuda.errors import CAPTURE_IMPLICIT, CAPTURED_EVENT, CudaError, CudaLost, CudaUnavailable
from kvtier.abi.cuda.memory import end
from kvtier.abi.cuda.opening import uuid_name
from kvtier.deadline import Deadline, Fence, Stream, StreamObject, all_of
from kvtier.errors import DeadlineExceeded, DeviceError, InvalidArgument
from kvtier.memory.arrays import OnGpu, address_of, is_tensor

_log = logging.getLogger(__name__)


def handle_of(stream: int | StreamObject) -> int:
    """The stream's ``CUstream``. Raises :class:`InvalidArgument`."""
    handle = stream.cuda_stream if isinstance(stream, StreamObject) else stream
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 <= handle < 2**64:
        raise InvalidArgument("stream", stream, "a CUstream as a number, an object with cuda_stream, or a fence")
    return handle


class Fenced(Protocol):
    """Mapped memory on which a stream of this process may work."""

    def fence(self, stream: int | None) -> Fence: ...


def fence_over(memories: Iterable[Fenced], stream: Stream | None) -> Fence:
    """The point that ``stream`` has reached, over all memories. None: torch's current stream of this thread, else the
    legacy default stream. Raises :class:`InvalidArgument`, :class:`DeviceError`."""
    if isinstance(stream, Fence):
        return stream
    handle = None if stream is None else handle_of(stream)
    return all_of(memory.fence(handle) for memory in memories)


_LOOK_S: Final = 0.0005
"""Seconds between two checks of pending fences: half of the delay that fences may add to a commit."""


def _look(asked: SimpleQueue[tuple[Fence, Future[None]]]) -> None:
    """Checks pending fences in a thread, and sleeps without any. An event loop would check less often, or do little
    else."""
    waiting: list[tuple[Fence, Future[None]]] = []
    while True:
        while not waiting or not asked.empty():
            waiting.append(asked.get())
        waiting = [each for each in waiting if not _settled(*each)]
        if waiting:
            time.sleep(_LOOK_S)


async def passing(fence: Fence, deadline: Deadline) -> None:
    """Returns once the fence has passed. Raises :class:`DeadlineExceeded` (WORK_UNFINISHED) if it has not by the
    deadline, :class:`DeviceError`."""
    if fence.passed():
        return
    try:
        async with asyncio.timeout_at(deadline.at):
            await asyncio.wrap_future(passage(fence))
    except TimeoutError:
        message = "this process's own work on the slots has not completed in time: nothing was sent, they are held"
        raise DeadlineExceeded(message, reason="WORK_UNFINISHED") from None


def _settled(fence: Fence, told: Future[None]) -> bool:
    """Whether the fence needs no further check."""
    with suppress(InvalidStateError):  # the future was cancelled meanwhile
        try:
            if not fence.passed():
                return told.cancelled()
            told.set_result(None)
        except Exception as error:  # noqa: BLE001  raised to the waiter
            told.set_exception(error)
    return True


@cache
def _lookout(pid: int) -> SimpleQueue[tuple[Fence, Future[None]]]:
    """The queue of the process's own thread: a forked child has none of its parent's threads."""
    asked: SimpleQueue[tuple[Fence, Future[None]]] = SimpleQueue()
    threading.Thread(target=_look, args=[asked], name="kvtier-fences", daemon=True).start()
    return asked


def passage(fence: Fence) -> Future[None]:
    """A future that is done less than a millisecond after the fence has passed, or fails with the error of
    :meth:`Fence.passed`."""
    future: Future[None] = Future()
    _lookout(os.getpid()).put((fence, future))
    return future


_LEGACY: Final = DriverStream(1)
"""``CU_STREAM_LEGACY``. Torch takes 0 for the same stream; for the bindings the meaning of 0 depends on the
environment."""
_LONGEST_PAUSE_S: Final = 0.001

Kept = TypeVar("Kept")


class Gpu:
    """A GPU of this process. Thread-safe. Failures raise :class:`DeviceError`."""

    _open: ClassVar[dict[tuple[int, str], Gpu]] = {}
    """Open GPUs by process, since a forked child cannot use its parent's, and by each name that opened them."""
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, driver: Driver) -> None:
        """Raises :class:`CudaError`."""
        self.driver: Final = driver
        self.to_host: Final = driver.stream()
        self.to_device: Final = driver.stream()
        # Appending and popping are atomic; checking for content first is not.
        self._events: Final[deque[Event]] = deque()
        self._pid: Final = os.getpid()
        _lookout(self._pid)  # start the thread now: garbage collection can come when no thread can be started

    @classmethod
    def of(cls, uuid: str) -> Gpu:
        """The GPU with this uuid, 32 hex digits. Slow the first time. Raises
        :class:`kvtier.abi.cuda.errors.CudaUnavailable`, :class:`CudaError`."""
        return cls._named(uuid_name(bytes.fromhex(uuid)))

    @classmethod
    def holding(cls, block: OnGpu) -> Gpu | None:
        """The GPU whose memory holds a block; None, with a logged warning, if it cannot be used here."""
        try:
            ordinal = block.device.index if is_tensor(block) else Driver.ordinal_at(address_of(block))
            return cls._named(f"cuda:{ordinal}")
        except (CudaUnavailable, CudaError) as error:
            _warn_once(f"blocks of a GPU are copied by way of the CPU's memory: {error}")
            return None

    @classmethod
    def _named(cls, device: str) -> Gpu:
        with cls._opening:
            pid = os.getpid()
            if (pid, device) not in cls._open:
                driver = Driver.open(device)
                uuid = uuid_name(driver.uuid)
                if (pid, uuid) in cls._open:
                    driver.close()
                else:
                    cls._open[pid, uuid] = cls(driver)
                cls._open[pid, device] = cls._open[pid, uuid]
            return cls._open[pid, device]

    def fence(self, stream: int | None) -> Fence:
        """The point that a stream has reached. None: torch's current stream of this thread, else the legacy default
        stream."""
        place = DriverStream(self._current() if stream is None else stream) or _LEGACY
        with failing("marking how far a stream has come"), self.driver.visit():
            try:
                captured = self.driver.capturing(place)
            except CudaError as error:
                if error.code != CAPTURE_IMPLICIT:
                    raise
                return _Unmarked(self, place)
            if captured:
                # An event recorded in a capture belongs to the graph: querying it would be an error, and spoil the
                # graph.
                message = f"stream {place:#x} is being captured into a graph: its work has no end yet to wait for"
                raise DeviceError(message, call="cuEventRecord", code=CAPTURED_EVENT, reason="DEVICE_FAILED")
            event = _popped(self._events) or self.driver.event()
            fence = _Recorded(self.driver, event, self._events)
            self.driver.record(event, place)
            return fence

    def reached(self, fences: Iterable[Fence]) -> None:
        for fence in set(fences):
            self.wait(fence.passed)

    def copy(self, stream: DriverStream, copies: Copies, locked: NDArray[np.bool_]) -> None:
        """Copies, unordered. When it returns or raises, no copy is running. There is one exception: the driver answers
        neither for an event nor for the stream although the device is not lost; then the end cannot be awaited.

        Args:
            stream: :attr:`to_host` or :attr:`to_device`.
            locked: copies between page-locked and device memory.
        """
        with failing("copying to or from slots"), self.driver.visit():
            event = _popped(self._events) or self.driver.event()
            try:
                self.driver.copy_many(copies, locked, stream)
            finally:
                self.wait(self._over(stream, event))
                self._events.append(event)

    def unmap_later(self, undo: ExitStack) -> None:
        """Ends an unreferenced mapping with ``undo`` once this thread's current stream and the default stream have done
        their work on it. If the GPU cannot tell, the mapping stays to the end of the process."""
        if self._pid != os.getpid():
            return  # the mapping is the parent's
        with suppress(DeviceError):
            passage(all_of([self.fence(None), self.fence(_LEGACY)])).add_done_callback(partial(_unmap, undo))

    def _over(self, stream: DriverStream, event: Event) -> Callable[[], bool]:
        """Returns a check whether all earlier work of the stream is over.

        The first call, inside :meth:`wait`, marks the point: an interrupt between mark and wait would leave copies
        without a waiter. If the point cannot be marked or queried, the check queries the stream itself, and raises the
        error once the stream is idle.
        """
        marked, fault = False, None

        def over() -> bool:
            nonlocal marked, fault
            if fault is None:
                try:
                    if not marked:
                        self.driver.record(event, stream)
                        marked = True
                    return self.driver.done(event)
                except CudaLost:
                    raise
                except CudaError as error:
                    fault = error
            if self.driver.idle(stream):
                raise fault
            return False

        return over

    @staticmethod
    def wait(passed: Callable[[], bool]) -> None:
        """Waits in this thread, first without sleeping: a small copy is over soon, and its caller is short of time, not
        of CPU.

        An interrupt (Ctrl-C) is raised after the wait: only then may the lease or the caller take the memory back.
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
    def __init__(self, driver: Driver, event: Event, reusable: deque[Event]) -> None:
        self._driver = driver
        self._event = event
        self._reusable = reusable

    def passed(self) -> bool:
        with failing("asking whether work on the slots is over"):
            return self._driver.done(self._event)

    def __del__(self) -> None:
        self._reusable.append(self._event)  # a pending event does no harm: the next use records it anew


class _Unmarked(Fence):
    """A point in the default stream while a stream that waits for it is captured into a graph.

    No event can be recorded in the default stream then. The point is marked when the capture has ended. Source: CUDA
    driver API, ``cuStreamIsCapturing``.
    """

    def __init__(self, gpu: Gpu, stream: DriverStream) -> None:
        self._gpu = gpu
        self._stream = stream
        self._marked: Fence | None = None

    def passed(self) -> bool:
        if self._marked is None:
            marked = self._gpu.fence(self._stream)
            if isinstance(marked, _Unmarked):
                return False
            self._marked = marked
        return self._marked.passed()


def _unmap(undo: ExitStack, passed: Future[None]) -> None:
    def unmap() -> None:
        try:
            end(undo)
        except CudaError as error:
            _log.warning("device memory stays mapped: %s", error)

    if passed.exception() is None:
        # Not in the thread that checks fences: unmapping may take long.
        threading.Thread(target=unmap, name="kvtier-unmap", daemon=True).start()


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _popped(kept: deque[Kept]) -> Kept | None:
    try:
        return kept.pop()
    except IndexError:
        return None


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turns CUDA errors into :class:`DeviceError`, with advice."""
    try:
        yield
    except CudaLost as error:
        message = f"{doing}: {error}; this process can use its GPU no more: end it, and the daemon has its slots back"
        raise DeviceError(message, call=error.call, code=error.code, reason="DEVICE_LOST") from error
    except CudaError as error:
        message = f"{doing}: {error}"
        raise DeviceError(message, call=error.call, code=error.code, reason="DEVICE_FAILED") from error
