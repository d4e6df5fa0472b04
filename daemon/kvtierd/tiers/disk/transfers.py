"""Reads and writes of many places of a file begun by one call, all of them in the disk's queue at once.

Through the kernel's queue of Linux AIO (``io_submit``; the system call, no library). One ``preadv`` after another keeps
a disk waiting for us, and, in a thread beside a busy one, for the interpreter lock after each: scattered records of 64
KiB were measured to move at half the rate. Where there is no such queue (another machine than those below, a sandbox,
all of ``fs.aio-max-nr`` taken) it is one call after another.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtierd.tiers.disk.runs import Run

DEPTH: Final = 128
"""Runs in the queue at a time; the disk is asked for more only when these are done."""

_log = logging.getLogger(__name__)


class Way(IntEnum):
    """The kernel's numbers of the vectored calls (``linux/aio_abi.h``)."""

    READ = 7
    WRITE = 8


class Calls(NamedTuple):
    """Numbers of the system calls."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_CALLS: Final = {"x86_64": Calls(206, 207, 209, 208), "aarch64": Calls(0, 1, 2, 4)}
_REQUEST: Final = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("rw_flags", "u4"),
        ("opcode", "u2"),
        ("priority", "i2"),
        ("fd", "u4"),
        ("buffer", "u8"),
        ("nbytes", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags", "u4"),
        ("event_fd", "u4"),
    ]
)
"""``struct iocb`` of the little-endian machines above."""
_EVENT: Final = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])
_VECTOR: Final = np.dtype([("base", "u8"), ("length", "u8")])
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


End = Callable[[], list[int]]
"""Waits for runs that have begun, and gives the bytes moved by each, or minus the error's number. Nothing is under way
any more when it returns or raises."""


class KernelQueue:
    """One context of the kernel's, for one call's runs at a time."""

    def __init__(self, calls: Calls) -> None:
        """Raises :class:`OSError`."""
        self._calls = calls
        self._context = ctypes.c_ulong(0)
        self._events = np.zeros(DEPTH, _EVENT)
        _call(calls.setup, DEPTH, ctypes.addressof(self._context))

    def begin(self, fd: int, way: Way, runs: Sequence[Run]) -> End:
        """As the function of that name; the end comes before the next beginning. An error ends the queue, too: it is
        not to be used again."""
        vectors, requests = _requests(fd, way, runs)
        addresses = requests.ctypes.data + np.arange(len(runs), dtype=np.uint64) * _REQUEST.itemsize
        moved = np.zeros(len(runs), np.int64)
        alive = [vectors, requests]  # the kernel reads from both
        begun = ended = 0

        def submit() -> None:
            nonlocal begun, ended
            while begun < len(runs) and begun - ended < DEPTH:
                try:
                    begun += self._submit(addresses[begun : ended + DEPTH])
                except OSError:  # the first of them is not under way then: a call of its own does it, or says why
                    moved[begun] = _move(fd, way, runs[begun])
                    begun, ended = begun + 1, ended + 1

        def end() -> list[int]:
            nonlocal ended
            with self._closed_by_errors():
                while ended < len(runs):
                    if ended < begun:
                        ended += self._wait(begun - ended, moved)
                    submit()
            alive.clear()
            return [int(each) for each in moved]

        with self._closed_by_errors():
            submit()
        return end

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Waits for what is still under way."""
        _call(self._calls.destroy, self._context.value)

    def _submit(self, addresses: NDArray[np.uint64]) -> int:
        """How many the kernel took of the requests at these addresses."""
        return _call(self._calls.submit, self._context.value, len(addresses), addresses.ctypes.data)

    def _wait(self, count: int, moved: NDArray[np.int64]) -> int:
        """Waits for all of these, unless a signal comes; how many have ended."""
        try:
            ended = _call(self._calls.getevents, self._context.value, count, count, self._events.ctypes.data, 0)
        except InterruptedError:
            return 0
        events = self._events[:ended]
        moved[events["data"]] = events["result"]
        return ended


def _requests(fd: int, way: Way, runs: Sequence[Run]) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """The vectors of all buffers, and a request a run that points to its own."""
    parts = [part for run in runs for part in run.parts]
    vectors = np.empty(len(parts), _VECTOR)
    vectors["base"] = [part.address for part in parts]
    vectors["length"] = [part.nbytes for part in parts]
    counts = np.fromiter((len(run.parts) for run in runs), np.uint64, len(runs))
    requests = np.zeros(len(runs), _REQUEST)
    requests["data"] = np.arange(len(runs))
    requests["opcode"] = way
    requests["fd"] = fd
    requests["buffer"] = vectors.ctypes.data + (np.cumsum(counts) - counts) * _VECTOR.itemsize
    requests["nbytes"] = counts
    requests["offset"] = [run.offset for run in runs]
    return vectors, requests


def _call(number: int, *arguments: int) -> int:
    """A system call, without the interpreter lock. Raises :class:`OSError`."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Queues:
    """As many as threads have wanted one at a time."""

    def __init__(self, calls: Calls | None) -> None:
        self.calls = calls
        """None where there are no queues to be had."""
        self._idle: deque[KernelQueue] = deque()

    def take(self) -> KernelQueue | None:
        """One that nobody else uses until it is given back."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()

    def give_back(self, queue: KernelQueue) -> None:
        self._idle.append(queue)

    def _make(self) -> KernelQueue | None:
        calls = self.calls  # another thread may find meanwhile that there are none
        if calls is None:
            return None
        try:
            return KernelQueue(calls)
        except OSError as error:
            _log.warning("disk I/O goes on without the kernel's queue, one call after another: %s", error)
            self.calls = None
            return None


QUEUES: Final = Queues(_CALLS.get(platform.machine()))


def begin(fd: int, way: Way, runs: Sequence[Run]) -> End:
    """Hands all runs to the disk. The buffers stay as they are until the end has been waited for, once, by any thread.

    Raises :class:`OSError` where the queue itself fails, as the end does; nothing is under way then.
    """
    queue = QUEUES.take() if len(runs) > 1 or way is Way.WRITE else None  # a single read is waited for at once
    if queue is None:
        moved = [_move(fd, way, run) for run in runs]
        return lambda: moved
    wait = queue.begin(fd, way, runs)

    def end() -> list[int]:
        moved = wait()
        QUEUES.give_back(queue)
        return moved

    return end


def _move(fd: int, way: Way, run: Run) -> int:
    buffers = [part.memory for part in run.parts]
    try:
        return os.pwritev(fd, buffers, run.offset) if way is Way.WRITE else os.preadv(fd, buffers, run.offset)
    except OSError as error:
        return -(error.errno or errno.EIO)
