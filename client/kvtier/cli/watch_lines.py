"""What ``kvtier watch`` shows: lines for people, one JSON object a line for programs, and a terminal's status line."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import reduce
from operator import or_
from time import monotonic
from typing import Any, Final

from rich.text import Text

from kvtier.cli.common import Interrupts
from kvtier.cli.trtllm import TrtllmEvents
from kvtier.events import Disconnected, Event, Gap, Heartbeat, Reconnected, SnapshotEnd, SnapshotSlice, WatchItem
from kvtier.types import EventType, count, duration, size, tiers_of
from kvtier.watch import Watch

Lines = Callable[[WatchItem], Iterator[str]]
"""What an item is shown as."""

_COLOURS: Final = {
    EventType.CREATED: "cyan",
    EventType.STORED: "green",
    EventType.UPDATED: "blue",
    EventType.REMOVED: "red",
    EventType.CLEARED: "magenta",
}


def text_lines(item: WatchItem) -> Iterator[Text]:
    """A line for people."""
    match item:
        case Event():
            yield _event(item)
        case Gap():
            yield _notice("gap", f"events {item.epoch}:{item.first_id} to {item.last_id} were lost: {item.reason}")
        case SnapshotSlice() if item.residency:
            yield _notice("snapshot", f"{len(item.residency)} blocks in {_places(item.residency)}  {item.cache}", "")
        case SnapshotEnd():
            yield _notice("snapshot", f"complete at {item.cursor}", "bold")
        case Disconnected():
            yield _notice("away", f"the daemon does not answer: {item.reason}")
        case Reconnected():
            again = "restarted" if item.restarted else "the same process"
            yield _notice("back", f"{again}, epoch {item.epoch}, boot {item.boot}")
        case _:
            pass


def plain_lines(item: WatchItem) -> Iterator[str]:
    """As :func:`text_lines`, without colours."""
    return (text.plain.rstrip() for text in text_lines(item))


def json_lines(item: WatchItem) -> Iterator[str]:
    """The item as one JSON object; nothing for a heartbeat."""
    if not isinstance(item, Heartbeat):
        yield _compact(item.to_json())


def trtllm_lines() -> Lines:
    """TensorRT-LLM's JSON, which remembers what it has shown."""
    events = TrtllmEvents()
    return lambda item: map(_compact, events.of(item))


def write(fd: int, lines: Iterator[str], interrupts: Interrupts) -> None:
    """Whole lines, past any buffer: a signal can end a write that nobody reads, and nothing is left to be flushed."""
    rest = "".join(f"{line}\n" for line in lines).encode()
    with interrupts.writing():
        while rest:
            rest = rest[os.write(fd, rest) :]


class Status:
    """The last line of a terminal: the position, rates over some seconds, and what was lost."""

    WINDOW: Final = 20
    """Rates are over so many drawings."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._totals = (0, 0, 0)
        self._drawn: deque[tuple[float, tuple[int, int, int]]] = deque(maxlen=self.WINDOW)
        self._gaps = self._lost = 0

    def note(self, item: WatchItem) -> None:
        match item:
            case Event():
                events, blocks, moved = self._totals
                self._totals = (events + 1, blocks + len(item.keys), moved + item.moved_bytes)
            case Gap():
                self._gaps += 1
                self._lost += item.last_id - item.first_id + 1

    def __rich__(self) -> Text:
        now = monotonic()
        self._drawn.append((now, self._totals))
        since, before = self._drawn[0]
        events, blocks, moved = (
            (after - first) / max(0.25, now - since) for after, first in zip(self._totals, before, strict=True)
        )
        where = f"at {self._watch.cursor}" if self._watch.live else "connecting"
        rates = f"{count(events)} events/s  {count(blocks)} blocks/s  {size(moved)}/s"
        text = f"{where}  {rates}  lag {self._watch.lag}  gaps {self._gaps} ({self._lost} events)"
        return Text(text, style="reverse", no_wrap=True, overflow="ellipsis")


def _event(event: Event) -> Text:
    at = datetime.fromtimestamp(event.time_ns / 1e9)
    took = duration(event.queue_ns + event.copy_ns) if event.moved_bytes else ""
    number = len(event.keys)
    return Text.assemble(
        (f"{at:%m-%d %H:%M:%S.%f}"[:-3], "dim"),
        (f" {event.type!s:<7}", _COLOURS[event.type]),
        f" {number or '':>6} {_path(event):<18} {event.cause!s:<13}",
        f" {size(event.moved_bytes) if event.moved_bytes else '':>9} {took:>7}",
        f"  {event.cache}  {event.cursor}",
        f"  {event.keys[0][:4].hex()}…" if number else "",
    )


def _notice(what: str, text: str, style: str = "yellow") -> Text:
    return Text(f"{what:<10} {text}", style=style)


def _path(event: Event) -> str:
    if event.moved_from is not None and event.moved_to is not None:
        return f"{event.moved_from} → {event.moved_to}"
    match event.type:
        case EventType.CREATED:
            return "/".join(map(str, event.num_blocks_per_cache_level)) + " slots"
        case EventType.STORED:
            return f"→ {_places(event.residency)}"
        case EventType.UPDATED:
            return f"in {_places(event.residency)}"
        case _:
            return "→ gone"


def _places(residency: bytes) -> str:
    return "+".join(map(str, tiers_of(reduce(or_, residency, 0)))) or "nowhere"


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
