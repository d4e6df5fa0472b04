"""``python -m tests.torture.slow_callbacks FILE`` and the daemon's own flags: tells of the long callbacks of its loop.

While it runs it adds a line to FILE for each: when it ended, as ``time.monotonic_ns`` says, and its CPU in nanoseconds.
"""

from __future__ import annotations

import sys
import time
from asyncio.events import Handle
from pathlib import Path
from typing import Final

from kvtierd.main import main

LONG_NS: Final = 5_000_000


def tell(path: Path) -> None:
    run = Handle._run  # private; every callback of a loop passes through it
    told = path.open("a", buffering=1)

    def measured(handle: Handle) -> None:
        started = time.thread_time_ns()  # not the clock: on a busy machine no callback looks slow that is not
        run(handle)
        took = time.thread_time_ns() - started
        if took > LONG_NS:
            told.write(f"{time.monotonic_ns()} {took}\n")

    setattr(Handle, "_run", measured)  # noqa: B010  mypy would have it that a method is for ever


if __name__ == "__main__":
    tell(Path(sys.argv.pop(1)))
    main()
