"""``python -m tests.torture.slow_callbacks FILE [FLAGS]`` runs the daemon, and records long callbacks of its loop.

FILE begins with the CPU time of a fixed piece of work, in nanoseconds. While the daemon runs, each long callback adds a
line: its end in ``time.monotonic_ns``, and its CPU time.
"""

import sys
import time
from asyncio.events import Handle
from pathlib import Path
from typing import Final

from kvtierd.main import main

LONG_NS: Final = 5_000_000


def work_ns() -> int:
    """Measures the machine's speed: returns the CPU time of filling a dictionary with 30,000 pairs."""
    best = sys.maxsize
    for _ in range(5):
        started = time.thread_time_ns()
        _ = {number: (number, str(number)) for number in range(30_000)}
        best = min(best, time.thread_time_ns() - started)
    return best


def tell(path: Path) -> None:
    run = Handle._run  # private; every callback of a loop passes through it
    told = path.open("a", buffering=1)
    told.write(f"{work_ns()}\n")

    def measured(handle: Handle) -> None:
        started = time.thread_time_ns()  # CPU time: on a busy machine wall time is longer
        run(handle)
        took = time.thread_time_ns() - started
        if took > LONG_NS:
            told.write(f"{time.monotonic_ns()} {took}\n")

    setattr(Handle, "_run", measured)  # noqa: B010  mypy refuses an assignment to a method


if __name__ == "__main__":
    tell(Path(sys.argv.pop(1)))
    main()
