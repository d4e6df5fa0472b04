"""What of this process's own work on a GPU must be over before the daemon is told that slots may be read or reused.

A kernel runs on after the call that launched it has returned. A commit that overtakes it makes a block of bytes that
are not there yet, a release gives away a slot that is still being read; neither shows as an error anywhere. So calls
about leases on a GPU take a point in a stream's work, a :class:`Fence`, and are sent once the stream has passed it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from kvtier.abi.cuda.driver import Copy, Driver, Event
from kvtier.abi.cuda.driver import Stream as DriverStream
from kvtier.abi.cuda.errors import CAPTURE_IMPLICIT, CAPTURED_EVENT, CudaError, CudaLost, CudaUnavailable
from kvtier.abi.cuda.memory import end
from kvtier.abi.cuda.opening import uuid_name
from kvtier.deadline import Deadline
from kvtier.errors import DeadlineExceeded, DeviceError, InvalidArgument
from kvtier.memory.arrays import OnGpu, address_of, is_tensor

_log = logging.getLogger(__name__)


class Fence(ABC):
    """A point in the work of one stream or of several."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether all that was given to the stream before has completed. Does not wait.

        Raises :class:`kvtier.errors.DeviceError` where the device cannot tell: then it never will.
        """


@runtime_checkable
class StreamObject(Protocol):
    """A stream of torch, or of whatever else says its handle so."""

    @property
    def cuda_stream(self) -> int: ...


Stream: TypeAlias = int | StreamObject | Fence
"""A ``CUstream``, an object that has one, or a fence that :meth:`kvtier.Cache.fence` gave earlier."""


class _Passed(Fence):
    def passed(self) -> bool:
        return True


PASSED: Final[Fence] = _Passed()
"""There is no work to wait for."""


@dataclass(slots=True, frozen=True)
class Unknown(Fence):
    """A point that could not be marked."""

    error: DeviceError

    def passed(self) -> bool:
        raise self.error


@dataclass(slots=True, frozen=True)
class _All(Fence):
    fences: tuple[Fence, ...]

    def passed(self) -> bool:
        return all(fence.passed() for fence in self.fences)


def handle_of(stream: int | StreamObject) -> int:
    """The stream's ``CUstream``. Raises :class:`InvalidArgument`."""
    handle = stream.cuda_stream if isinstance(stream, StreamObject) else stream
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 <= handle < 2**64:
        raise InvalidArgument("stream", stream, "a CUstream as a number, an object with cuda_stream, or a fence")
    return handle


class Fenced(Protocol):
    """Mapped memory that a stream of this process may be working on."""

    def fence(self, stream: int | None) -> Fence: ...


def fence_over(memories: Iterable[Fenced], stream: Stream | None) -> Fence:
    """The point that ``stream`` has reached, over all memories. None: torch's current stream of this thread, else the
    legacy default stream.

    Raises :class:`InvalidArgument`, :class:`DeviceError`.
    """
    if isinstance(stream, Fence):
        return stream
    handle = None if stream is None else handle_of(stream)
    return all_of(memory.fence(handle) for memory in memories)


def all_of(fences: Iterable[Fence]) -> Fence:
    """Has passed when all have."""
    waiting = tuple(fence for fence in fences if fence is not PASSED)
    if len(waiting) > 1:
        return _All(waiting)
    return waiting[0] if waiting else PASSED


_LOOK_S: Final = 0.0005
"""Between two looks at fences that have not passed: half of the delay that a commit may have from them."""


class _Lookout:
    """A thread that looks whether fences have passed, and sleeps while there are none. An event loop would look less
    often, or do little else."""

    def __init__(self) -> None:
        self.asked: Final[SimpleQueue[tuple[Fence, Future[None]]]] = SimpleQueue()
        threading.Thread(target=self._run, name="kvtier-fences", daemon=True).start()

    def _run(self) -> None:
        waiting: list[tuple[Fence, Future[None]]] = []
        while True:
            while not waiting or not self.asked.empty():
                waiting.append(self.asked.get())
            waiting = [each for each in waiting if not _settled(*each)]
            if waiting:
                time.sleep(_LOOK_S)


async def passing(fence: Fence, deadline: Deadline) -> None:
    """Returns once the fence has passed.

    Raises :class:`DeadlineExceeded` (WORK_UNFINISHED) where it has not by the deadline, :class:`DeviceError`.
    """
    if fence.passed():
        return
    try:
        async with asyncio.timeout_at(deadline.at):
            await asyncio.wrap_future(passage(fence))
    except TimeoutError:
        message = "this process's own work on the slots has not completed in time: nothing was sent, they are held"
        raise DeadlineExceeded(message, reason="WORK_UNFINISHED") from None


def _settled(fence: Fence, told: Future[None]) -> bool:
    """Whether nobody has to look any more."""
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        try:
            if not fence.passed():
                return told.cancelled()
            told.set_result(None)
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            told.set_exception(error)
    return True


@cache
def _lookout(pid: int) -> _Lookout:
    """The process's own: a forked child has none of its parent's threads."""
    return _Lookout()


def passage(fence: Fence) -> Future[None]:
    """Is done less than a millisecond after the fence has passed, or fails with what :meth:`Fence.passed` raises."""
    future: Future[None] = Future()
    _lookout(os.getpid()).asked.put((fence, future))
    return future


_LEGACY: Final = DriverStream(1)
"""``CU_STREAM_LEGACY``. A 0 means the same to torch, but to the bindings whatever their environment says."""
_LONGEST_PAUSE_S: Final = 0.001

Kept = TypeVar("Kept")


class Gpu:
    """Any thread may use it. What fails raises :class:`DeviceError`."""

    _open: ClassVar[dict[tuple[int, str], Gpu]] = {}
    """By process, since a forked child cannot use its parent's, and by each name that it was opened by."""
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, driver: Driver) -> None:
        """Raises :class:`CudaError`."""
        self.driver: Final = driver
        self.to_host: Final = driver.stream()
        self.to_device: Final = driver.stream()
        # Appending is atomic, and so is popping; to ask first whether there is any is not.
        self._events: Final[deque[Event]] = deque()
        self._pid: Final = os.getpid()
        _lookout(self._pid)  # garbage is collected at any moment, at some of which no thread can be started

    @classmethod
    def of(cls, uuid: str) -> Gpu:
        """The one with this uuid, 32 hex digits. Takes long the first time.

        Raises :class:`kvtier.abi.cuda.errors.CudaUnavailable`, :class:`CudaError`.
        """
        return cls._named(uuid_name(bytes.fromhex(uuid)))

    @classmethod
    def holding(cls, block: OnGpu) -> Gpu | None:
        """The one in whose memory a block lies; None: it cannot be used here, and a warning says why."""
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
        """The point that a stream has reached. None: torch's current one of this thread, else the legacy default."""
        place = DriverStream(self._current() if stream is None else stream) or _LEGACY
        with failing("marking how far a stream has come"), self.driver.visit():
            try:
                captured = self.driver.capturing(place)
            except CudaError as error:
                if error.code != CAPTURE_IMPLICIT:
                    raise
                return _Unmarked(self, place)
            if captured:
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

    def reached(self, fences: Iterable[Fence]) -> None:
        """Returns when all have passed."""
        for fence in set(fences):
            self.wait(fence.passed)

    def copy(self, stream: DriverStream, singles: Iterable[Copy], batch: Sequence[Copy]) -> None:
        """Copies, in no order; when it returns or raises, nothing is being copied any more. Only where the driver
        answers neither about an event nor about the stream, though the device is not lost, can nobody wait for that.

        Args:
            stream: :attr:`to_host` or :attr:`to_device`.
            singles: each one in a call of its own.
            batch: of page-locked memory and of the device's, in one call where the driver has it.
        """
        with failing("copying to or from slots"), self.driver.visit():
            event = _popped(self._events) or self.driver.event()
            if not self.driver.features.batch_copy:
                singles, batch = chain(singles, batch), ()
            try:
                if batch:
                    dsts, srcs, sizes = map(list, zip(*batch, strict=True))
                    self.driver.copy_batch(dsts, srcs, sizes, stream)
                for dst, src, nbytes in singles:
                    self.driver.copy(dst, src, nbytes, stream)
            finally:
                self.wait(self._over(stream, event))
                self._events.append(event)

    def unmap_later(self, undo: ExitStack) -> None:
        """Nothing refers to a mapping any more, which ``undo`` ends. This thread's current stream and the default
        stream may still be at work on it: it ends when they are done. Where the GPU cannot tell, it stays mapped to the
        end of the process."""
        if self._pid != os.getpid():
            return  # it is the parent's
        with suppress(DeviceError):
            passage(all_of([self.fence(None), self.fence(_LEGACY)])).add_done_callback(partial(_unmap, undo))

    def _over(self, stream: DriverStream, event: Event) -> Callable[[], bool]:
        """Whether what the stream was given so far is over. The point is marked when this is first asked, by
        :meth:`wait`: an interrupt in between would leave copies that nobody waits for. Where it cannot be marked, or
        asked for, the stream itself is asked, and what went wrong is raised when that is idle."""
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


class _Unmarked(Fence):
    """A point in the default stream while a stream that waits for it is captured into a graph.

    No event can be recorded in the default stream then. The point is marked when the capture has ended.
    Source: CUDA driver API, ``cuStreamIsCapturing``.
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
        # Not in the thread that looks at fences: it may take long.
        threading.Thread(target=unmap, name="kvtier-unmap", daemon=True).start()


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


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
