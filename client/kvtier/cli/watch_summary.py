"""The last line of a terminal while a watch goes on: how much happens, how far behind it is, and of which daemon."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.events import Disconnected, Event, Gap, Reconnected, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import Cursor
from kvtier.words import size

WINDOW_S: Final = 5.0
_BUCKET_S: Final = 0.25


@dataclass(slots=True)
class _Bucket:
    """What came in a quarter of a second that began at ``at``."""

    at: float
    events: int = 0
    blocks: int = 0
    moved: int = 0


class Summary:
    """Counts what a watch shows. Times are a monotonic clock's seconds, given in."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._buckets: deque[_Bucket] = deque()
        self._gaps = 0
        self._lost = 0
        self._away_since: float | None = None
        self._snapshot: int | None = None

    def note(self, item: WatchItem, now: float) -> None:
        match item:
            case Event():
                bucket = self._bucket(now)
                bucket.events += 1
                bucket.blocks += len(item.packed_keys) // KEY_BYTES
                bucket.moved += item.moved_bytes
            case Gap():
                self._gaps += 1
                self._lost += item.last_id - item.first_id + 1
            case Disconnected():
                self._away_since = now
            case Reconnected():
                self._away_since = None
            case SnapshotStart():
                self._snapshot = 0
            case SnapshotSlice():
                self._snapshot = (self._snapshot or 0) + len(item.residency)
            case SnapshotEnd():
                self._snapshot = None
            case _:
                pass

    def line(self, now: float, cursor: Cursor | None, lag: int) -> str:
        """Without an end of line, and as long as it is."""
        while self._buckets and self._buckets[0].at < now - WINDOW_S:
            self._buckets.popleft()
        seconds = max(1.0, min(WINDOW_S, now - self._began))
        events, blocks, moved = (
            sum(getattr(bucket, name) for bucket in self._buckets) / seconds for name in ("events", "blocks", "moved")
        )
        gaps = f"{self._gaps} ({self._lost} events)" if self._gaps else "0"
        rates = f"{_number(events)} events/s  {_number(blocks)} blocks/s  {size(moved)}/s"
        return f"{self._state(now, cursor)}  {rates}  lag {lag}  gaps {gaps}"

    def _state(self, now: float, cursor: Cursor | None) -> str:
        if self._away_since is not None:
            return f"daemon away for {now - self._away_since:.0f} s"
        if self._snapshot is not None:
            return f"snapshot: {self._snapshot} blocks"
        return f"at {cursor}" if cursor is not None else "connected"

    def _bucket(self, now: float) -> _Bucket:
        if not self._buckets or now - self._buckets[-1].at >= _BUCKET_S:
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]


def _number(value: float) -> str:
    if value < 9.95:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"
