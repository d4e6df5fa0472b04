"""Runs that wait to be logged: first in, first out, bounded in bytes, and found by id meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from kvtierd.event_log.runs import LoggedRun


class Backlog:
    """Not safe for several threads by itself. The newest run is held, however long it is."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._runs: dict[
            int, LoggedRun
        ] = {}  # by a number that rises by one: the ends of a queue, the lookups of a list
        self._head = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[LoggedRun]:
        return iter(self._runs.values())

    def append(self, run: LoggedRun) -> list[LoggedRun]:
        """Takes a run, with ids above all before. Returns those that had to go for it."""
        self._runs[self._head + len(self._runs)] = run
        self.bytes += run.size
        gone = []
        while self.bytes > self._max_bytes and len(self._runs) > 1:
            gone.append(self._pop())
        return gone

    def drop_up_to(self, last: int) -> None:
        """Lets go of runs that end at or before this id."""
        while self._runs and self._runs[self._head].last <= last:
            self._pop()

    def above(self, cursor: int) -> LoggedRun | None:
        """The first run with an id above ``cursor``."""
        end = self._head + len(self._runs)
        index = bisect_left(range(end), cursor + 1, lo=self._head, key=lambda number: self._runs[number].last)
        return self._runs[index] if index < end else None

    def _pop(self) -> LoggedRun:
        run = self._runs.pop(self._head)
        self._head += 1
        self.bytes -= run.size
        return run
