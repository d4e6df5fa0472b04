"""What a lane's threads take pieces from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from kvtierd.mover.work import Piece


class WorkQueue:
    """The loop puts, threads take. ``in_turn``: moves take turns, a piece each; else first come, first served.

    Every piece has a token in a queue of Python's own, which does the waiting; what the next piece is, is asked then.
    """

    def __init__(self, *, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._lines: deque[deque[Piece]] = deque()
        """Of each move what is left of it, the next one's first. Never empty ones."""
        self._choosing = threading.Lock()

    def put(self, pieces: Sequence[Piece]) -> None:
        """All of one move, in order."""
        with self._choosing:
            self._lines.append(deque(pieces))
        for _ in pieces:
            self._tokens.put(True)

    def stop(self) -> None:
        """One thread gets None, once as many pieces have been taken as were put by now."""
        self._tokens.put(False)

    def get(self, *, block: bool) -> Piece | None:
        """The next piece. Raises :class:`queue.Empty` where there is none and it is not to ``block``."""
        if not self._tokens.get(block=block):
            return None
        with self._choosing:
            line = self._lines[0]
            piece = line.popleft()
            if not line:
                self._lines.popleft()
            elif self._in_turn:
                self._lines.rotate(-1)
            return piece
