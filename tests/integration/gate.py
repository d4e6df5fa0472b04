"""A fence that a test opens, in place of a stream that a GPU works off."""

import threading

from kvtier.deadline import Fence


class Gate(Fence):
    """Whoever hands it as ``stream`` waits until :meth:`open`. ``asked`` is set once it was looked at."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._open = False

    def passed(self) -> bool:
        self.asked.set()
        return self._open

    def open(self) -> None:
        self._open = True
