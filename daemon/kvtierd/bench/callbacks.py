"""How long callbacks keep the loop: ``python -m kvtierd.bench.callbacks FILE [kvtierd's arguments]``.

A daemon as any other, except that the CPU time of each callback of its loop is written down between two SIGUSR1, and
told in FILE, as JSON, when the daemon ends. It is the thread's CPU and not the clock, so that a busy machine does not
count as a slow callback. Costs about a microsecond a callback.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from array import array
from asyncio.events import Handle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from kvtierd.main import main as kvtierd

SLOW_NS: Final = 500_000
"""Callbacks above this are counted by name."""


class Record:
    def __init__(self) -> None:
        self.on = False
        self._times = array("L")
        self._slow: Counter[str] = Counter()
        self._slowest: dict[str, int] = {}

    def add(self, handle: Any, nanoseconds: int) -> None:
        self._times.append(nanoseconds)
        if nanoseconds > SLOW_NS:
            name = _name(handle)
            self._slow[name] += 1
            self._slowest[name] = max(self._slowest.get(name, 0), nanoseconds)

    def summary(self) -> dict[str, Any]:
        """Microseconds. ``slow``: by name, how many were above 500 and the longest of them."""
        ranked = sorted(self._times) or [0]
        at = {name: ranked[min(len(ranked) - 1, int(q * len(ranked)))] / 1e3 for name, q in _QUANTILES.items()}
        slow = {name: [count, self._slowest[name] / 1e3] for name, count in self._slow.most_common()}
        return {"callbacks": len(self._times), **at, "max": ranked[-1] / 1e3, "slow": slow}


_QUANTILES: Final = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def _name(handle: Any) -> str:
    """Of the coroutine where it is the step of a task."""
    callback = handle._callback
    if callback is None:
        return "cancelled"
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"task {getattr(task.get_coro(), '__qualname__', '?')}"
    return getattr(callback, "__qualname__", None) or repr(callback)


def install(record: Record) -> None:
    """Every loop of the process, from now on."""
    run: Callable[[Handle], None] = Handle._run  # private, and where every callback passes through

    def timed(self: Handle) -> None:
        if not record.on:
            run(self)
            return
        started = time.thread_time_ns()
        try:
            run(self)
        finally:
            record.add(self, time.thread_time_ns() - started)

    setattr(Handle, "_run", timed)  # noqa: B010  a method is not assigned to, says mypy


def main() -> None:
    """Raises SystemExit with the daemon's status."""
    record, told = Record(), Path(sys.argv.pop(1))

    def switch(number: int, frame: FrameType | None) -> None:
        record.on = not record.on

    signal.signal(signal.SIGUSR1, switch)
    install(record)
    try:
        kvtierd()
    finally:
        told.write_text(json.dumps(record.summary()))


if __name__ == "__main__":
    main()
