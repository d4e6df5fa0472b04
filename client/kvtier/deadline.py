"""The waits of calls: until their deadline, between attempts, and for fences, of :mod:`kvtier.memory.gpu`."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

from kvtier.errors import DeviceError, require_within

MAX_TIMEOUT_S: Final = 3600.0

_ANSWER_SHARE: Final = 0.25
_MOST_ANSWER_S: Final = 1.0
"""A call that waits in the daemon keeps this share of its time, at most ``_MOST_ANSWER_S`` seconds, for the answer."""

_JITTER: Final = random.Random()


class Backoff:
    """Waiting times that double from ``first`` to ``most`` seconds, each shortened by up to half at random."""

    def __init__(self, first: float = 0.02, most: float = 1.0) -> None:
        self._next = first
        self._most = most

    def next(self) -> float:
        delay = self._next * _JITTER.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return delay


def require_timeout(timeout: float) -> None:
    """Raises :class:`InvalidArgument` if the timeout is not above 0 and at most an hour."""
    require_within("timeout", timeout, 1e-9, MAX_TIMEOUT_S, f"above 0 and at most {MAX_TIMEOUT_S:g} seconds")


async def in_turn(timeout: float | None) -> None:
    """Yields to the loop before an answer without a call, so that a caller that polls does not block other tasks.
    Raises :class:`InvalidArgument`."""
    if timeout is not None:
        require_timeout(timeout)
    await asyncio.sleep(0)


class Deadline:
    """A point in the loop's time."""

    def __init__(self, timeout: float) -> None:
        """``timeout`` in seconds. Raises :class:`InvalidArgument`."""
        require_timeout(timeout)
        self.at = asyncio.get_running_loop().time() + timeout

    def left(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def wait_ns(self) -> int:
        """Nanoseconds that a call may wait in the daemon so that its answer comes in time. At least 1, since 0 means
        the daemon's default."""
        left = self.left()
        return max(1, int((left - min(left * _ANSWER_SHARE, _MOST_ANSWER_S)) * 1e9))


class Fence(ABC):
    """A point in the work of one or several streams."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether all earlier work of the stream has completed. Does not wait. Raises
        :class:`kvtier.errors.DeviceError` if the device cannot tell; it never will then."""


@runtime_checkable
class StreamObject(Protocol):
    """A stream of torch, or any object with its handle in ``cuda_stream``."""

    @property
    def cuda_stream(self) -> int: ...


Stream: TypeAlias = int | StreamObject | Fence
"""A ``CUstream``, an object with one, or a fence from :meth:`kvtier.Cache.fence`."""


@dataclass(slots=True, frozen=True)
class Unknown(Fence):
    """A fence that could not be marked. Asking it raises the error."""

    error: DeviceError

    def passed(self) -> bool:
        raise self.error


@dataclass(slots=True, frozen=True)
class _All(Fence):
    fences: tuple[Fence, ...]

    def passed(self) -> bool:
        return all(fence.passed() for fence in self.fences)


PASSED: Final[Fence] = _All(())


def all_of(fences: Iterable[Fence]) -> Fence:
    """A fence that has passed when all have."""
    waiting = tuple(fence for fence in fences if fence is not PASSED)
    if len(waiting) > 1:
        return _All(waiting)
    return waiting[0] if waiting else PASSED
