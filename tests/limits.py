"""A test that hangs costs its own time and fails by its name, with where it hangs; all others still run.

What hangs inside a call that never comes back to Python is not ended by this, but by pytest's own time limit, and the
run with it.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import pytest

from tests import devices

LIMIT_S: Final = 200.0
"""Of each of a test's setup, call and end; for a slow machine that is busy with something else, too."""
GPU_LIMIT_S: Final = 60.0
"""On a GPU, which may be lent for minutes only."""
LONG_LIMIT_S: Final = 3000.0
"""With ``make test-long``."""
LONG: Final = os.environ.get("KVTIER_LONG") == "1"
SHRINKING_S: Final = 60
"""For so long a property's failing example is made smaller. By default it is five minutes: one whose examples take long
would be told as a test that hangs, without what it failed with."""
_AGAIN_S: Final = 2.0
"""Somebody may take the first failure for one of their own."""


def limit_s(item: pytest.Item) -> float:
    if marker := item.get_closest_marker("limit"):
        (seconds,) = marker.args
        return float(seconds)
    if devices.ON_CUDA and not devices.ON_FAKE:
        return GPU_LIMIT_S
    return LONG_LIMIT_S if LONG else LIMIT_S


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Fails the block where it takes longer, and prints where asyncio's tasks were. For the main thread; one inside
    another holds as well."""
    over = False

    def end(number: int, frame: FrameType | None) -> None:
        if not over:
            _show_tasks()
            raise pytest.fail.Exception(f"it has not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    started = time.monotonic()
    outer_s, outer_again_s = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        over = True
        left_s = max(outer_s - (time.monotonic() - started), _AGAIN_S) if outer_s else 0.0
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s, outer_again_s)


def _show_tasks() -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop is running: the stack of the failure says where it hangs
        return
    for task in tasks:
        try:
            task.print_stack(file=sys.stderr)
        except TypeError:  # gRPC's own frames have no line
            print(task, file=sys.stderr)
