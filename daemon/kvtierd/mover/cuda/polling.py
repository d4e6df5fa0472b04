"""Waiting for the device without blocking in it: a call that waits cannot be given up, and nobody sees it hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

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
