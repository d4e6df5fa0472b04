"""Keeps the garbage collector of Python away from the blocks, and out of the calls.

A collection looks at every container object of its generation while everything else stands still: 0.2 to 0.5 us each
was measured, and a block is four or five of them, so with a million blocks a full collection would stop the loop for
more than a second. Blocks are not in reference cycles and go as soon as nobody refers to them; what is, are the call
objects of the gRPC library, most of which are short-lived.

So what is new is collected when the loop has leisure, before it is much, and what survives is frozen: never looked at
again. Of a call that was under way at that moment something may stay when it is over. Such calls are counted, and after
many of them one collection looks at everything.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import Any, Final

from kvtierd.mover.leisure import Leisure

SLICE: Final = 200
"""New objects that are worth a collection, which takes 0.1 to 0.4 ms."""
BACKSTOP: Final = (10_000, 0, 0)
"""Of the three generations, as ``gc.set_threshold`` takes them: where one turn of the loop makes so many more than it
undoes, the interpreter collects by itself."""
FROZEN_CALLS_MAX: Final = 300_000
"""What each left was 0.1 to 1.5 objects when it was looked for: some 100 MB at most."""

_log = logging.getLogger(__name__)


class Collector:
    """From :meth:`pause`, before what lives long is made, over :meth:`start` to :meth:`stop`."""

    def __init__(self, frozen_calls_max: int = FROZEN_CALLS_MAX) -> None:
        self._frozen_calls_max = frozen_calls_max
        self._frozen_calls = 0
        self._counted: set[asyncio.Task[Any]] = set()
        self._thresholds = gc.get_threshold()
        self._leisure: Leisure | None = None
        self._due = False
        self.full_collections = 0

    def pause(self) -> None:
        """Nothing is collected until :meth:`start`."""
        gc.disable()

    def start(self, leisure: Leisure | None) -> None:
        """What there is now lives as long as the daemon, and is frozen without another look. ``leisure``: of the loop
        that runs; None: it has none, and the interpreter collects as it does elsewhere."""
        if leisure is None:
            gc.enable()
            return
        self._leisure = leisure
        gc.freeze()
        gc.collect()  # of nothing: the interpreter waits until a quarter of what survived the last full one is new
        gc.set_threshold(*BACKSTOP)
        leisure.between = self._look
        gc.enable()

    def stop(self) -> None:
        """Leaves the collector as it was before."""
        if self._leisure is not None:
            self._leisure.between = None
            self._leisure = None
            self._counted.clear()
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()
        gc.enable()

    def _look(self) -> None:
        if not self._due and self._leisure is not None and gc.get_count()[0] >= SLICE:
            self._due = True
            self._leisure.defer(self._collect)

    def _collect(self) -> None:
        self._due = False
        if self._leisure is None:
            return
        under_way = asyncio.all_tasks()
        self._frozen_calls += len(under_way - self._counted)
        self._counted = under_way
        if self._frozen_calls >= self._frozen_calls_max:
            self._look_at_everything()
        else:
            gc.collect(1)
        gc.freeze()

    def _look_at_everything(self) -> None:
        self._frozen_calls = 0
        self.full_collections += 1
        began = time.monotonic()
        gc.unfreeze()
        found = gc.collect()
        _log.info("full garbage collection objects=%d ms=%.1f", found, (time.monotonic() - began) * 1e3)
