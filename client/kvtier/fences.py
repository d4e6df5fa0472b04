"""What of this process's own work on a GPU must be over before the daemon is told that slots may be read or reused.

A kernel runs on after the call that launched it has returned. A commit that overtakes it makes a block of bytes that
are not there yet, a release gives away a slot that is still being read; neither shows as an error anywhere. So calls
about leases on a GPU take a point in a stream's work, a :class:`Fence`, and are sent once the stream has passed it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

from kvtier.errors import DeadlineExceeded, DeviceError, InvalidArgument

if TYPE_CHECKING:
    from kvtier.lease import Lease
    from kvtier.memory import Memory
    from kvtier.session import Deadline

_TURNS: Final = 32
"""Of the loop before it sleeps between them: most kernels are over by then, and epoll sleeps for 1 ms at least."""
_FIRST_SLEEP_S: Final = 0.001
_LONGEST_SLEEP_S: Final = 0.02


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


def fence_of(leases: Iterable[Lease], stream: Stream | None) -> Fence:
    """The point that ``stream`` has reached, for those of the leases that lie on a GPU and are mapped here; for the
    others there is nothing to wait for. None: torch's current stream of this thread, else the legacy default stream.

    Raises :class:`InvalidArgument`, :class:`DeviceError`.
    """
    if isinstance(stream, Fence):
        return stream
    return fence_over({id(memory): memory for lease in leases if (memory := lease.memory) is not None}.values(), stream)


def fence_over(memories: Iterable[Memory], stream: Stream | None) -> Fence:
    """The same for mapped memory."""
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


async def passing(fence: Fence, deadline: Deadline) -> None:
    """Returns once the fence has passed.

    Raises :class:`DeadlineExceeded` (WORK_UNFINISHED) where it has not by the deadline, :class:`DeviceError`.
    """
    turns, sleep = 0, _FIRST_SLEEP_S
    while not fence.passed():
        left = deadline.left()
        if not left:
            message = "this process's own work on the slots has not completed in time: nothing was sent, they are held"
            raise DeadlineExceeded(message, reason="WORK_UNFINISHED")
        turns += 1
        if turns <= _TURNS:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(min(sleep, left))
            sleep = min(sleep * 1.5, _LONGEST_SLEEP_S)
