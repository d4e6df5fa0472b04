"""Keeps the garbage collector of Python away from the blocks.

A collection looks at every container object of its generation while everything else stands still: 0.2 to 0.4 us each
was measured, and a block is four or five of them, so with a million blocks a full collection would stop the loop for
more than a second. Blocks are not in reference cycles and go as soon as nobody refers to them; what is, are the call
objects of the gRPC library, most of which are short-lived.

So the old generation is collected while it is small, and what survives is frozen: never looked at again. A call that
was under way at that moment is frozen with the rest and stays when it is over, a kilobyte or so. They are counted, and
after many of them one collection looks at everything.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import Final

THRESHOLDS: Final = (2500, 0, 0)
"""Of the three generations, as ``gc.set_threshold`` takes them: each is collected in turn, the old one at some 7,500
new objects. Calls that store and drop a few hundred blocks make and undo a thousand or two of them, which a lower first
threshold has looked at in vain, twice a call."""
FROZEN_CALLS_MAX: Final = 100_000

_log = logging.getLogger(__name__)


class Collector:
    """From :meth:`pause`, before what lives long is made, over :meth:`start` to :meth:`stop`, on the loop that runs at
    :meth:`start`."""

    def __init__(self, frozen_calls_max: int = FROZEN_CALLS_MAX) -> None:
        self._frozen_calls_max = frozen_calls_max
        self._frozen_calls = 0
        self._thresholds = gc.get_threshold()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.full_collections = 0

    def pause(self) -> None:
        """Collects what there is, and nothing of what comes until :meth:`start`."""
        gc.collect()
        gc.disable()

    def start(self) -> None:
        """What there is now lives as long as the daemon, and is frozen without another look."""
        self._loop = asyncio.get_running_loop()
        gc.freeze()
        gc.collect()  # of nothing: the interpreter waits until a quarter of what survived the last full one is new
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._collected)
        gc.enable()

    def stop(self) -> None:
        """Leaves the collector as it was before."""
        if self._loop is not None:
            self._loop = None
            gc.callbacks.remove(self._collected)
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()
        gc.enable()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Called by the interpreter, in whichever thread it was."""
        if phase == "stop" and info["generation"] == 2 and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._freeze)

    def _freeze(self) -> None:
        if self._loop is None:
            return
        self._frozen_calls += len(asyncio.all_tasks())
        if self._frozen_calls >= self._frozen_calls_max:
            self._look_at_everything()
        gc.freeze()

    def _look_at_everything(self) -> None:
        self._frozen_calls = 0
        self.full_collections += 1
        began = time.monotonic()
        gc.callbacks.remove(self._collected)
        gc.unfreeze()
        found = gc.collect()
        gc.callbacks.append(self._collected)
        _log.info("full garbage collection objects=%d ms=%.1f", found, (time.monotonic() - began) * 1e3)
