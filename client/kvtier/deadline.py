"""Waiting times of calls: until their deadline, and between attempts."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from kvtier.errors import require_within

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
