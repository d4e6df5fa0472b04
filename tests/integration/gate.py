"""A fence that a test opens, in place of a stream that a GPU works off."""

from __future__ import annotations

import threading

from kvtier.memory.gpu import Fence


class Gate(Fence):
    """Whoever hands it as ``stream`` waits until :meth:`open`. ``asked`` is set once it was looked at."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._open = False
        self._error: Exception | None = None

    def passed(self) -> bool:
        self.asked.set()
        if self._error is not None:
            raise self._error
        return self._open

    def open(self) -> None:
        self._open = True

    def fail(self, error: Exception) -> None:
        self._error = error
