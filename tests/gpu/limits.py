"""A test that hangs costs its own time, not the run: a GPU may be lent for minutes only.

What hangs inside a call that never comes back to Python is not ended by this, but by pytest's own time limit, and the
run with it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import pytest

LIMIT_S: Final = 120.0
"""Of each of a test's setup, call and end."""
_AGAIN_S: Final = 2.0
"""Somebody may take the first failure for one of their own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Fails the block where it takes longer, and prints where asyncio's tasks were. For the main thread."""
    over = False

    def end(number: int, frame: FrameType | None) -> None:
        if not over:
            _show_tasks()
            raise pytest.fail.Exception(f"it has not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _show_tasks() -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop is running: the stack of the failure says where it hangs
        return
    for task in tasks:
        task.print_stack(file=sys.stderr)
