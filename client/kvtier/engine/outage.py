"""The log lines of an engine that runs without kvtier: one when that begins, one when kvtier is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from kvtier.errors import InvalidArgument

_LOOK_S: Final = 1.0


def can_pass(error: Exception) -> bool:
    """Whether the error can end while the engine runs. A wrong setting stays wrong until the engine starts again."""
    return not isinstance(error, InvalidArgument)


class Outage:
    """Logs when an engine loses its cache and when it has it again. For any thread."""

    def __init__(self, log: logging.Logger, cache: str) -> None:
        self._log: Final = log
        self._cache: Final = cache
        self._lock: Final = threading.Lock()
        self._lasts = False
        self._closed: Final = threading.Event()

    def begin(self, why: Exception | str) -> None:
        """Logs the reason, unless the outage lasts already and can still pass."""
        passes = isinstance(why, str) or can_pass(why)
        with self._lock:
            if self._lasts and passes:
                return
            self._lasts = True
        then = "kvtier tries again in the background" if passes else "kvtier does not try again"
        self._log.warning("the engine runs without kvtier's cache %s: %s; %s", self._cache, why, then)

    def end(self) -> None:
        """Logs that the cache is back, if it was away."""
        with self._lock:
            lasted, self._lasts = self._lasts, False
        if lasted:
            self._log.warning("kvtier's cache %s is back", self._cache)

    def watch(self, connected: Callable[[], bool]) -> None:
        """Ends the outage. From now on, a daemon that does not answer is an outage."""
        self.end()
        threading.Thread(target=self._watch, args=[connected], name="kvtier-outage", daemon=True).start()

    def _watch(self, connected: Callable[[], bool]) -> None:
        while not self._closed.wait(_LOOK_S):
            if connected():
                self.end()
            else:
                self.begin("the daemon does not answer, so nothing is stored")

    def close(self) -> None:
        self._closed.set()
