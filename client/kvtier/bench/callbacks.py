"""``python -m kvtier.bench.callbacks FILE [kvtierd's arguments]``: a daemon that measures the callbacks of its loop.

At its end it writes the CPU of a callback at the quantile 99.9 %, in microseconds, to FILE.
"""

from __future__ import annotations

import runpy
import sys
import time
from array import array
from asyncio.events import Handle
from pathlib import Path

if __name__ == "__main__":
    file, times = Path(sys.argv.pop(1)), array("L")
    run = Handle._run  # private; every callback of a loop passes through it

    def measured(handle: Handle) -> None:
        started = time.thread_time_ns()  # CPU: on a busy machine the clock would make quick callbacks look slow
        run(handle)
        times.append(time.thread_time_ns() - started)

    setattr(Handle, "_run", measured)  # noqa: B010  mypy lets no method be assigned
    try:
        runpy.run_module("kvtierd.main", run_name="kvtierd.main")["main"]()
    finally:
        file.write_text(str(sorted(times)[int(0.999 * len(times))] / 1e3))
