"""``kvtier watch``: shows events as they happen, a line each."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, Final

import click

from kvtier.abi.spec import MAX_GROUPS
from kvtier.cli.blocks import KeyType
from kvtier.cli.common import DaemonAt, Interrupts, address_option, cache_option, run
from kvtier.cli.options import ago_ns, command, output_option
from kvtier.cli.output import console
from kvtier.cli.watch_lines import Lines, json_lines, plain_lines, text_lines, trtllm_lines, write, yaml_documents
from kvtier.client import AsyncClient
from kvtier.errors import PermissionDenied
from kvtier.events import Event, SnapshotSlice, WatchItem
from kvtier.types import Cause, Cursor, EventType, Tier

NO_DAEMON: Final = 3
"""Exit status if no daemon answers at the start."""

FORMS: Final = "[EPOCH:]ID, or how long ago (30s, 5m, 2h, 1.5d)"

_CURSOR: Final = re.compile(r"(?:(\d+):)?(\d+)")

Moment = Cursor | int
"""A place in the event stream, or nanoseconds since the Unix epoch."""


def moment_of(text: str) -> Moment:
    """Converts one of :data:`FORMS`."""
    if cursor := _CURSOR.fullmatch(text):
        found = Cursor(int(cursor[1] or 0), int(cursor[2]))
        if max(found.epoch, found.id).bit_length() <= 64:
            return found
        raise click.BadParameter(f"{text!r}: epochs and ids have 64 bits")
    if (ago := ago_ns(text)) is not None:
        return max(0, time.time_ns() - ago)
    raise click.BadParameter(f"{text!r} is none of {FORMS}")


def _choices(kind: type[Tier] | type[Cause] | type[EventType]) -> click.Choice[str]:
    return click.Choice([str(each) for each in kind], case_sensitive=False)


@command()
@address_option
@output_option("trtllm")
@click.option(
    "--attention-dp-rank", "rank", type=click.IntRange(min=0), metavar="N", help="In every event of -o trtllm."
)
@click.option("--type", "types", multiple=True, type=_choices(EventType), help="Only these types. Repeatable.")
@click.option("--cause", "causes", multiple=True, type=_choices(Cause), help="Only these causes. Repeatable.")
@click.option("--tier", "tiers", multiple=True, type=_choices(Tier), help="Only what touches these tiers. Repeatable.")
@cache_option("caches", multiple=True, help="Only these caches. Repeatable.")
@click.option(
    "--group", "groups", multiple=True, type=click.IntRange(0, MAX_GROUPS - 1), help="Only these window groups."
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    type=KeyType(shortest=1),
    metavar="PREFIX",
    help="Only blocks whose keys begin so, in hex; events are cut down to them. Repeatable.",
)
@click.option("--since", type=moment_of, metavar="MOMENT", help=f"Begin after this event, or then: {FORMS}.")
@click.option("--oldest", is_flag=True, help="Begin with the oldest event that the daemon still holds.")
@click.option("--snapshot", is_flag=True, help="Begin with the blocks that are there now.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@click.option("--no-follow", is_flag=True, help="End when all that existed at the start has been shown.")
def watch(
    daemon: DaemonAt,
    form: str,
    rank: int | None,
    since: Moment | None,
    types: tuple[str, ...],
    causes: tuple[str, ...],
    tiers: tuple[str, ...],
    limit: int | None,
    no_follow: bool,
    **options: Any,
) -> None:
    """Follow every move, store and eviction as it happens.

    A line shows time, type, number of blocks, tiers, cause, bytes, time taken (waiting and copying), the cache, epoch
    and id, and the first key. Goes on over restarts of the daemon and reports them; lost events are shown as a gap.

    JSON prints an object per line, with TensorRT-LLM's field names; YAML prints a document per event. trtllm prints
    TensorRT-LLM's own event JSON of one --cache, for its routers: with the hashes that the cache was opened with, and
    token ids if you may see them. Begin with --snapshot.

    Exit status 3: no daemon answers at the start; 130 and 143: ended by Ctrl-C (SIGINT) and by SIGTERM.
    """
    if sys.stdout is None:
        raise click.ClickException("standard output is closed: there is nowhere to show anything")
    if (since is not None) + options["oldest"] + options["snapshot"] > 1:
        raise click.UsageError("--since, --oldest and --snapshot exclude each other.")
    if form == "trtllm" and (len(options["caches"]) != 1 or options["keys"] or types or causes or tiers):
        raise click.UsageError("-o trtllm needs one --cache, and no --type, --cause, --tier or --key.")
    if rank is not None and form != "trtllm":
        raise click.UsageError("--attention-dp-rank needs -o trtllm.")
    options |= {
        "since": since if isinstance(since, Cursor) else None,
        "since_time_ns": since if isinstance(since, int) else None,
        "types": [EventType[name.upper()] for name in types],
        "causes": [Cause[name.upper()] for name in causes],
        "tiers": [Tier[name.upper()] for name in tiers],
    }
    if no_follow:  # heartbeats show within a second that only filtered events are left
        options |= {"heartbeats": True, "heartbeat_s": 1.0}
    lines = {"json": json_lines, "yaml": yaml_documents, "trtllm": trtllm_lines(rank), "table": None}[form]
    work = _follow(daemon, lines, limit, not no_follow, options)
    try:
        raise SystemExit(run(work, no_daemon=NO_DAEMON))
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as error:
        raise click.ClickException(f"cannot write to standard output: {error.strerror}") from error


async def _follow(
    daemon: DaemonAt, lines: Lines | None, limit: int | None, follow: bool, options: dict[str, Any]
) -> int:
    """Shows events until the requested end. Returns the exit status."""
    with Interrupts() as interrupts:
        try:
            async with await daemon.connect() as client:
                if stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):  # end when its reader closes it
                    asyncio.get_running_loop().add_reader(sys.stdout.fileno(), interrupts.end_task)
                await warn_of_silence(client, options["caches"], options["groups"])
                last = None if follow else await _newest(client, options["caches"])
                show, concerned = _shown(lines, interrupts), set[str]()
                async with client.watch(**options, breaks=True) as watch:
                    async for item in watch:
                        if isinstance(item, Event | SnapshotSlice) and item.packed_keys:
                            concerned.add(item.cache)
                        if isinstance(item, Event):
                            if last is not None and item.event_id > last:
                                break
                            if options["keys"] and not item.packed_keys and item.cache not in concerned:
                                continue  # a cache was created or emptied, and had none of the blocks asked for
                            limit = limit - 1 if limit is not None else None
                        show(item)
                        if limit == 0 or (last is not None and watch.cursor is not None and watch.cursor.id >= last):
                            break
        except asyncio.CancelledError:
            return interrupts.status
    return 0


async def warn_of_silence(
    client: AsyncClient, caches: Collection[str], groups: Collection[int], *, tokens: bool = False
) -> None:
    """Warns on standard error of chosen caches and groups without events. ``tokens``: also of missing token ids."""
    if not caches and not groups:
        return
    try:
        there = {info.name: info for info in await client.caches() if not info.not_served}
    except PermissionDenied:  # listing caches and watching need different rights
        return
    for name in caches:
        if name not in there:
            names = ", ".join(sorted(there)) or "none that you may see"
            click.echo(f"warning: there is no cache {name} yet (there are: {names})", err=True)
        elif tokens and not there[name].options.keep_tokens:
            says = f"cache {name} keeps no token ids: it was opened without keep_tokens, as is the daemon's default"
            click.echo(f"warning: {says}", err=True)
    seen = [info for name, info in there.items() if name in caches or not caches]
    for group in groups:
        if seen and all(group >= len(info.groups) for info in seen):
            click.echo(f"warning: there is no window group {group} in {', '.join(i.name for i in seen)}", err=True)


async def _newest(client: AsyncClient, caches: Collection[str]) -> int | None:
    """Returns the id of the newest event. Ids rise over all epochs."""
    async with client.watch(caches=caches) as watch:
        return watch.cursor.id if watch.cursor is not None else None


def _shown(lines: Lines | None, interrupts: Interrupts) -> Callable[[WatchItem], None]:
    """Returns the function that shows an item. ``lines`` None: text for people, on a terminal coloured and cut."""
    if lines is not None or not sys.stdout.isatty():
        plain = lines or plain_lines
        return lambda item: write(sys.stdout.fileno(), plain(item), interrupts)
    terminal = console()

    def show(item: WatchItem) -> None:
        for line in text_lines(item, terminal.width):
            terminal.print(line, no_wrap=True, overflow="ellipsis")

    return show
