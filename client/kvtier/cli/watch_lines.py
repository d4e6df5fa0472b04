"""The output of ``kvtier watch``: lines for people, JSON and YAML for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any, Final

from rich.text import Text

from kvtier.bridge.trtllm import TrtllmEvents
from kvtier.cli.common import Interrupts
from kvtier.cli.output import yaml_lines
from kvtier.events import Disconnected, Event, Gap, Heartbeat, Reconnected, SnapshotEnd, SnapshotSlice, WatchItem
from kvtier.types import EventType, duration, size, tiers_of

Lines = Callable[[WatchItem], Iterator[str]]

_COLOURS: Final = {
    EventType.CREATED: "cyan",
    EventType.STORED: "green",
    EventType.UPDATED: "blue",
    EventType.REMOVED: "red",
    EventType.CLEARED: "magenta",
}


def text_lines(item: WatchItem, width: int = 0) -> Iterator[Text]:
    """Yields the item as a line for people, or nothing. ``width``: columns, for which a cache's long name is cut."""
    match item:
        case Event():
            yield _event(item, width)
        case Gap():
            yield _notice("gap", _lost(item))
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


def _lost(gap: Gap) -> str:
    if gap.reason == "unclean-stop":  # the number of ids in use is unknown
        return f"unlogged events from {gap.epoch}:{gap.first_id} on were lost: {gap.reason}; next id {gap.last_id + 1}"
    return f"events {gap.epoch}:{gap.first_id} to {gap.last_id} were lost: {gap.reason}"


def plain_lines(item: WatchItem) -> Iterator[str]:
    """Like :func:`text_lines`, without colours."""
    return (text.plain.rstrip() for text in text_lines(item))


def json_lines(item: WatchItem) -> Iterator[str]:
    """Yields the item as one JSON object; nothing for a heartbeat."""
    if not isinstance(item, Heartbeat):
        yield _compact(item.to_json())


def yaml_documents(item: WatchItem) -> Iterator[str]:
    """Like :func:`json_lines`, as one YAML document."""
    if not isinstance(item, Heartbeat):
        yield from ("---", *yaml_lines(item.to_json()))


def trtllm_lines(attention_dp_rank: int | None = None) -> Lines:
    """Returns a function for one stream of items, which it shows as TensorRT-LLM's JSON."""
    events = TrtllmEvents(attention_dp_rank)
    return lambda item: map(_compact, events.of(item))


def write(fd: int, lines: Iterator[str], interrupts: Interrupts) -> None:
    """Writes whole lines without a buffer: a signal can end a blocked write, and no bytes wait for a flush."""
    rest = "".join(f"{line}\n" for line in lines).encode()
    with interrupts.writing():
        while rest:
            rest = rest[os.write(fd, rest) :]


def _event(event: Event, width: int) -> Text:
    """The columns that other commands ask for come first, since a terminal of 80 columns cuts the rest."""
    at = datetime.fromtimestamp(event.time_ns / 1e9)
    number = len(event.keys)
    moved = f"  {size(event.moved_bytes)} in {duration(event.queue_ns + event.copy_ns)}" if event.moved_bytes else ""
    line = Text.assemble(
        (f"{at:%m-%d %H:%M:%S}", "dim"),
        (f" {event.type!s:<7}", _COLOURS[event.type]),
        f" {number or '':>4} {_path(event):<18}",
        f"  {f'{event.keys[0][:4].hex()}…' if number else '':<9}",
        f" {event.cursor!s:<7} ",
    )
    cause, name = f"  {event.cause}", event.cache
    room = max(1, width - line.cell_len - len(cause))
    return line.append(f"{name if not width or len(name) <= room else name[: room - 1] + '…'}{cause}{moved}")


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
        case EventType.UPDATED if event.moved_from is not None:
            return f"left {event.moved_from}, in {_places(event.residency)}"
        case EventType.UPDATED:
            return f"in {_places(event.residency)}"
        case _:
            return "→ gone" if event.moved_from is None else f"{event.moved_from} → gone"


def _places(residency: bytes) -> str:
    return "+".join(map(str, tiers_of(reduce(or_, residency, 0)))) or "nowhere"


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
