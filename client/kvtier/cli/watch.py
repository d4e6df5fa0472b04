"""``kvtier watch``: events as they happen, a line each."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any, Final

import click

from kvtier.cli.common import DaemonAt, address_option, json_option, run
from kvtier.events import Event, Gap, SnapshotEnd, SnapshotSlice, WatchItem
from kvtier.trtllm import TrtllmEvents
from kvtier.types import Cause, Cursor, EventType, Tier, tiers_of
from kvtier.watch import Filter, Start
from kvtier.words import duration, size

Show = Callable[[WatchItem], Iterator[str]]
"""The lines that an item is shown as, if any."""

_COLOURS: Final[Mapping[EventType, str]] = {
    EventType.CREATED: "cyan",
    EventType.STORED: "green",
    EventType.UPDATED: "blue",
    EventType.REMOVED: "red",
    EventType.CLEARED: "magenta",
}


class CursorType(click.ParamType[Cursor]):
    """``[EPOCH:]ID``; without an epoch the present one."""

    name = "cursor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Cursor:
        if isinstance(value, Cursor):
            return value
        epoch, _, event_id = str(value).rpartition(":")
        try:
            cursor = Cursor(int(epoch or 0), int(event_id))
        except ValueError:
            self.fail(f"{value!r} is not [EPOCH:]ID, two numbers", param, ctx)
        if min(cursor.epoch, cursor.id) < 0:
            self.fail(f"{value!r}: epochs and ids are not negative", param, ctx)
        return cursor


def _choices(kind: type[Tier] | type[Cause] | type[EventType]) -> click.Choice[str]:
    return click.Choice([str(each) for each in kind], case_sensitive=False)


@click.command()
@address_option
@json_option("One JSON object a line; keys in hex, field names as TensorRT-LLM's.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "trtllm"]),
    default="text",
    help="Lines for people; JSON, as with --json; or TensorRT-LLM's own event JSON, of one --cache.",
)
@click.option("--type", "types", multiple=True, type=_choices(EventType), help="Only these types. Repeatable.")
@click.option("--cause", "causes", multiple=True, type=_choices(Cause), help="Only these causes. Repeatable.")
@click.option("--tier", "tiers", multiple=True, type=_choices(Tier), help="Only what touches these tiers. Repeatable.")
@click.option("--cache", "caches", multiple=True, metavar="NAME", help="Only these caches. Repeatable.")
@click.option("--since", type=CursorType(), metavar="[EPOCH:]ID", help="Begin after this event.")
@click.option("--oldest", is_flag=True, help="Begin with the oldest event that the daemon still holds.")
@click.option("--snapshot", is_flag=True, help="Begin with the blocks that are there now.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N events.")
def watch(
    daemon: DaemonAt,
    as_json: bool,
    form: str,
    types: tuple[str, ...],
    causes: tuple[str, ...],
    tiers: tuple[str, ...],
    caches: tuple[str, ...],
    since: Cursor | None,
    oldest: bool,
    snapshot: bool,
    limit: int | None,
) -> None:
    """Follow every move, store and eviction as it happens.

    A line shows time, epoch and id, type, number of blocks and the first one's key, where from and to, cause, bytes,
    time queued and copied, and the cache. Goes on over restarts of the daemon; what was lost is shown as a gap.

    With --format trtllm routers that follow TensorRT-LLM can follow kvtier. Hashes are those that the cache was opened
    with (its option event_hash); token ids are there if it keeps them and you may see them. Begin with --snapshot.
    """
    if (since is not None) + oldest + snapshot > 1:
        raise click.UsageError("--since, --oldest and --snapshot exclude each other.")
    if form == "trtllm" and (len(caches) != 1 or types or causes or tiers or as_json):
        raise click.UsageError("--format trtllm needs one --cache, and no --type, --cause, --tier or --json.")
    wanted = Filter(
        types=[EventType[name.upper()] for name in types],
        causes=[Cause[name.upper()] for name in causes],
        tiers=[Tier[name.upper()] for name in tiers],
        caches=caches,
    )
    try:
        run(_follow(daemon, Start(since, oldest, snapshot), wanted, _FORMATS["json" if as_json else form](), limit))
    except KeyboardInterrupt:
        pass  # the ordinary end of a watch
    except (BrokenPipeError, asyncio.CancelledError):
        # Whoever read our lines has enough of them; the interpreter's last flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _follow(daemon: DaemonAt, start: Start, wanted: Filter, show: Show, limit: int | None) -> None:
    left = limit
    async with await daemon.connect() as client:
        _stop_when_nobody_reads()
        stream = client.watch(
            since=start.since,
            oldest=start.oldest,
            snapshot=start.snapshot,
            types=wanted.types,
            causes=wanted.causes,
            tiers=wanted.tiers,
            caches=wanted.caches,
        )
        async with aclosing(stream):
            async for item in stream:
                for line in show(item):
                    click.echo(line)
                if left is not None and isinstance(item, Event):
                    left -= 1
                    if not left:
                        return


def _stop_when_nobody_reads() -> None:
    """Ends the command as soon as the other end of a pipe closes, not only at the next line."""
    if not stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        loop.add_reader(sys.stdout.fileno(), task.cancel)


def json_lines(item: WatchItem) -> Iterator[str]:
    if isinstance(item, (Event, Gap, SnapshotSlice, SnapshotEnd)):
        yield _compact(item.to_json())


def text_lines(item: WatchItem) -> Iterator[str]:
    """With colours, which ``click.echo`` takes out where there is no terminal."""
    match item:
        case Event():
            yield _event_line(item)
        case Gap():
            text = f"gap        {item.epoch}:{item.first_id} to {item.last_id} were lost: {item.reason}"
            yield click.style(text, fg="yellow", bold=True)
        case SnapshotSlice():
            blocks, where = _blocks(len(item.residency)), _places(item.residency)
            yield f"snapshot   {blocks}  {item.packed_keys[:4].hex()}…  in {where}  {item.cache}"
        case SnapshotEnd():
            yield click.style(f"snapshot   complete at {item.cursor}", bold=True)
        case _:
            pass


def trtllm_lines() -> Show:
    """Remembers what it has shown."""
    events = TrtllmEvents()
    return lambda item: map(_compact, events.of(item))


_FORMATS: Final[Mapping[str, Callable[[], Show]]] = {
    "text": lambda: text_lines,
    "json": lambda: json_lines,
    "trtllm": trtllm_lines,
}


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _event_line(event: Event) -> str:
    when = datetime.fromtimestamp(event.time_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
    count = len(event.packed_keys) // 32
    columns = [
        click.style(when, dim=True),
        f"{event.cursor!s:>10}",
        click.style(f"{event.type!s:<8}", fg=_COLOURS[event.type]),
        f"{_blocks(count):>11}" if count else " " * 11,
        f"{event.packed_keys[:4].hex()}…" if count else " " * 9,
        f"{_path(event):<16}",
        f"{event.cause!s:<13}",
    ]
    if event.moved_bytes:
        columns.append(
            f"{size(event.moved_bytes):>9}  queued {duration(event.queue_ns)} copied {duration(event.copy_ns)}"
        )
    return "  ".join([*columns, event.cache])


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


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
