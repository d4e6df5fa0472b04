"""An engine that runs without kvtier: attempts to open its cache, and a log line when that begins and when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from kvtier.deadline import Backoff
from kvtier.errors import ClientClosed, InvalidArgument, KvtierError

_LOOK_S: Final = 1.0
OPEN_S: Final = 5.0
"""Seconds that an attempt to open the cache may take, and most seconds until the next attempt."""


def can_pass(error: Exception) -> bool:
    """Whether the error can end while the engine runs. A wrong setting stays wrong until the engine starts again."""
    return not isinstance(error, InvalidArgument | ClientClosed)


class Outage:
    """Opens an engine's cache, and logs when the engine loses its cache and when it has it again. For any thread."""

    def __init__(self, log: logging.Logger, cache: str) -> None:
        self._log: Final = log
        self._cache: Final = cache
        self._lock: Final = threading.Lock()
        self.lasts = False
        self.closed: Final = threading.Event()

    def open(self, attempt: Callable[[], None], *, fail: bool = False) -> None:
        """Calls ``attempt``, and calls it again in a thread after an error that can pass. Raises other errors, with
        ``fail`` any error."""
        try:
            attempt()
        except (KvtierError, OSError) as error:  # OSError: memory or descriptors for the mapping are short
            if fail or not can_pass(error):
                raise
            self.begin(error)
            threading.Thread(target=self._open_later, args=[attempt], name="kvtier-open", daemon=True).start()

    def _open_later(self, attempt: Callable[[], None]) -> None:
        backoff = Backoff(0.1, OPEN_S)
        while not self.closed.wait(backoff.next()):
            try:
                attempt()
                return
            except (KvtierError, OSError) as error:
                if not can_pass(error):
                    self.begin(error)
                    return

    def begin(self, why: Exception | str) -> None:
        """Logs the reason, unless the outage lasts already and can still pass."""
        passes = isinstance(why, str) or can_pass(why)
        with self._lock:
            if self.closed.is_set() or (self.lasts and passes):
                return
            self.lasts = True
        then = "kvtier tries again in the background" if passes else "kvtier does not try again"
        self._log.warning("the engine runs without kvtier's cache %s: %s; %s", self._cache, why, then)

    def end(self) -> None:
        """Logs that the cache is back, if it was away."""
        with self._lock:
            lasted, self.lasts = self.lasts, False
        if lasted:
            self._log.warning("kvtier's cache %s is back", self._cache)

    def watch(self, connected: Callable[[], bool]) -> None:
        """Ends the outage. From now on, a daemon that does not answer is an outage."""
        self.end()
        threading.Thread(target=self._watch, args=[connected], name="kvtier-outage", daemon=True).start()

    def _watch(self, connected: Callable[[], bool]) -> None:
        while not self.closed.wait(_LOOK_S):
            if connected():
                self.end()
            else:
                self.begin("the daemon does not answer, so nothing is stored")

    def close(self) -> None:
        self.closed.set()
