"""What a watch is shown as: aligned lines for people, one JSON object a line for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from functools import reduce
from operator import or_
from typing import Any, Final

import click

from kvtier.abi.keys import KEY_BYTES
from kvtier.events import (
    Disconnected,
    Event,
    Gap,
    Heartbeat,
    Reconnected,
    SnapshotEnd,
    SnapshotSlice,
    WatchItem,
)
from kvtier.trtllm import TrtllmEvents
from kvtier.types import EventType, tiers_of
from kvtier.words import duration, size

Show = Callable[[WatchItem], Iterator[str]]
"""The lines that an item is shown as, if any."""

WIDE: Final = 132
"""From so many columns on everything is shown; below :data:`MEDIUM` no milliseconds, and blocks without their unit."""

MEDIUM: Final = 100

_COLOURS: Final = {
    EventType.CREATED: "cyan",
    EventType.STORED: "green",
    EventType.UPDATED: "blue",
    EventType.REMOVED: "red",
    EventType.CLEARED: "magenta",
}


@dataclass(slots=True, frozen=True)
class Cell:
    """``width``: padded to it and cut at it, with an ellipsis; None = as long as it is."""

    text: str
    width: int | None
    right: bool = False
    style: dict[str, Any] | None = None

    def padded(self) -> str:
        if self.width is None:
            return self.text
        text = cut(self.text, self.width)
        return text.rjust(self.width) if self.right else text.ljust(self.width)


class TextLines:
    """Lines for a person.

    ``width``: of the terminal, asked for at each line; None = nothing is cut. ``colour``: with ANSI colours. A line of
    its own says the day where it is not that of the line before, and before the first where it is not ``today``.
    """

    def __init__(
        self, width: Callable[[], int | None] = lambda: None, *, colour: bool = False, today: date | None = None
    ) -> None:
        self._width = width
        self._colour = colour
        self._day = today or datetime.now().date()

    def __call__(self, item: WatchItem) -> Iterator[str]:
        match item:
            case Event():
                at = datetime.fromtimestamp(item.time_ns / 1e9)
                if at.date() != self._day:
                    self._day = at.date()
                    yield self._line([Cell(f"── {self._day.isoformat()} ──", None, style={"dim": True})])
                yield self._line(*_event_cells(item, at, self._width()))
            case Gap():
                lost = f"{item.epoch}:{item.first_id} to {item.last_id} were lost: {item.reason}"
                yield self._notice("gap", lost, fg="yellow")
            case SnapshotSlice() if item.residency:
                count, where = _blocks(len(item.residency)), _places(item.residency)
                yield self._notice("snapshot", f"{count} from {_short(item.packed_keys)} in {where}  {item.cache}")
            case SnapshotEnd():
                yield self._notice("snapshot", f"complete at {item.cursor}", bold=True)
            case Disconnected():
                yield self._notice("away", f"the daemon does not answer: {item.reason}", fg="yellow")
            case Reconnected():
                again = "restarted" if item.restarted else "the same process"
                yield self._notice("back", f"{again}, epoch {item.epoch}, boot {item.boot}", fg="yellow")
            case _:
                pass

    def _notice(self, what: str, text: str, **style: Any) -> str:
        return self._line([Cell(f"{what:<10} {text}", None, style=style or None)])

    def _line(self, cells: list[Cell], gap: int = 1) -> str:
        left = self._width()
        parts = []
        for cell in cells:
            text = cell.padded()
            if left is not None:
                text = cut(text, max(0, left))
                left -= len(text) + gap
            parts.append(click.style(text, **cell.style) if cell.style and self._colour else text)
        return (" " * gap).join(part for part in parts if part).rstrip()


def json_lines(item: WatchItem) -> Iterator[str]:
    yield _compact(item.to_json())


def json_lines_without_heartbeats(item: WatchItem) -> Iterator[str]:
    if not isinstance(item, Heartbeat):
        yield _compact(item.to_json())


def trtllm_lines() -> Show:
    """Remembers what it has shown."""
    events = TrtllmEvents()
    return lambda item: map(_compact, events.of(item))


def cut(text: str, width: int) -> str:
    """At most ``width`` characters, the last an ellipsis where some are missing."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…" * (width > 0)


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _event_cells(event: Event, at: datetime, width: int | None) -> tuple[list[Cell], int]:
    """The columns that there is room for, and the gap between them."""
    count = len(event.packed_keys) // KEY_BYTES
    narrow = width is not None and width < MEDIUM
    wide = width is None or width >= WIDE
    took = duration(event.queue_ns + event.copy_ns) if event.moved_bytes else ""
    number = str(count) if narrow else _blocks(count)
    cells = [
        Cell(f"{at:%H:%M:%S}" if narrow else f"{at:%H:%M:%S.%f}"[:-3], 8 if narrow else 12, style={"dim": True}),
        *([Cell(str(event.cursor), 10, right=True)] if wide else []),
        Cell(str(event.type), 7, style={"fg": _COLOURS[event.type]}),
        Cell(number if count else "", 6 if narrow else 12, right=True),
        *([Cell(_short(event.packed_keys) if count else "", 9)] if wide else []),
        Cell(_path(event), 18 if wide else 15),
        Cell(str(event.cause), 13),
        Cell(size(event.moved_bytes) if event.moved_bytes else "", 9, right=True),
        Cell(took, 7, right=True),
        Cell(event.cache, None),
    ]
    return cells, 1 if narrow else 2


def _short(packed_keys: bytes) -> str:
    return f"{packed_keys[:4].hex()}…"


def _blocks(count: int) -> str:
    return f"{count} block " if count == 1 else f"{count} blocks"


def _path(event: Event) -> str:
    if event.moved_from is not None and event.moved_to is not None:
        return f"{event.moved_from} → {event.moved_to}"
    if event.type is EventType.CREATED:
        return "/".join(map(str, event.num_blocks_per_cache_level)) + " slots"
    if event.type is EventType.STORED:
        return f"→ {_places(event.residency)}"
    if event.type is EventType.UPDATED:
        return f"in {_places(event.residency)}"
    return "→ gone"


def _places(residency: bytes) -> str:
    return "+".join(map(str, tiers_of(reduce(or_, residency, 0)))) or "nowhere"
