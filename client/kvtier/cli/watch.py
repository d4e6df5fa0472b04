"""``kvtier watch``: events as they happen, a line each."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import click

from kvtier.aio import AsyncClient
from kvtier.cli.common import DaemonAt, address_option, explained, json_option
from kvtier.cli.watch_ending import Bounds, Ending, Interrupts, Stopped, end_when_nobody_reads
from kvtier.cli.watch_lines import Show, TextLines, json_lines, json_lines_without_heartbeats, trtllm_lines
from kvtier.cli.watch_moments import FORMS, Instant, Moment, MomentType
from kvtier.cli.watch_output import Output
from kvtier.cli.watch_summary import Summary
from kvtier.errors import DaemonUnavailable, InvalidArgument, KvtierError
from kvtier.events import Gap
from kvtier.types import Cause, EventType, Tier
from kvtier.watch import DEFAULT_HEARTBEAT_S, Filter, Start, Watch, key_prefix

SUMMARY_S: Final = 0.25
"""The status line is drawn so often."""

BOUNDED_HEARTBEAT_S: Final = 1.0
"""Where it is to end at a moment: how late the command may notice that only filtered events lie before it."""


class Exit(IntEnum):
    """Exit statuses, besides 2 of a command line that makes no sense, and 128 and the number of a signal."""

    DONE = 0
    FAILED = 1
    NO_DAEMON = 3
    GAP = 4


@dataclass(slots=True, frozen=True)
class Plan:
    """What the command line asks for."""

    start: Start
    wanted: Filter
    bounds: Bounds
    show: Show
    heartbeats: bool
    fail_on_gap: bool
    summary: bool


class PrefixType(click.ParamType[bytes]):
    """What a block key begins with, in hex."""

    name = "prefix"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        try:
            return key_prefix("prefix", value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)


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
@click.option("--group", "groups", multiple=True, type=click.IntRange(min=0), help="Only these window groups.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    type=PrefixType(),
    metavar="PREFIX",
    help="Only blocks whose keys begin so, in hex; events are cut down to them. Repeatable.",
)
@click.option("--since", type=MomentType(), metavar="MOMENT", help=f"Begin after this event, or then: {FORMS}.")
@click.option("--oldest", is_flag=True, help="Begin with the oldest event that the daemon still holds.")
@click.option("--snapshot", is_flag=True, help="Begin with the blocks that are there now.")
@click.option("--until", type=MomentType(), metavar="MOMENT", help="End with this event, or then; forms as --since.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@click.option("--no-follow", is_flag=True, help="End when all that existed at the start has been shown.")
@click.option("--fail-on-gap", is_flag=True, help="End with status 4 at the first gap.")
@click.option("--heartbeats", is_flag=True, help="With --json: say that all is quiet, too.")
def watch(daemon: DaemonAt, **options: Any) -> None:
    """Follow every move, store and eviction as it happens.

    A line shows time, type, number of blocks, from where to where, cause, bytes, time taken (waiting and copying) and
    the cache; with more than 131 columns, and where it is no terminal, also epoch, id and the first key. On a terminal
    the last line sums up. Goes on over restarts of the daemon, and says so; what was lost is shown as a gap.

    With --format trtllm routers that follow TensorRT-LLM can follow kvtier. Hashes are those that the cache was opened
    with (its option event_hash); token ids are there if it keeps them and you may see them. Begin with --snapshot.

    \b
    Exit status:
      0    the end that was asked for is reached, or nobody reads any more
      1    refused, or failed
      2    the command line makes no sense
      3    no daemon answers at the start
      4    a gap, with --fail-on-gap
      130  ended by Ctrl-C (SIGINT); 143 by SIGTERM
    """
    if sys.stdout is None:
        raise click.ClickException("standard output is closed: there is nowhere to show anything")
    output = Output(sys.stdout)
    plan = _plan(output, **options)
    sys.exit(_run(daemon, plan, output))


def _plan(
    output: Output,
    *,
    as_json: bool,
    form: str,
    since: Moment | None,
    oldest: bool,
    snapshot: bool,
    until: Moment | None,
    limit: int | None,
    no_follow: bool,
    fail_on_gap: bool,
    heartbeats: bool,
    types: tuple[str, ...],
    causes: tuple[str, ...],
    tiers: tuple[str, ...],
    **others: Any,
) -> Plan:
    """Raises click's error of usage for what does not go together."""
    if (since is not None) + oldest + snapshot > 1:
        raise click.UsageError("--since, --oldest and --snapshot exclude each other.")
    form = "json" if as_json and form == "text" else form
    if form == "trtllm" and (as_json or len(others["caches"]) != 1 or others["keys"] or types or causes or tiers):
        raise click.UsageError("--format trtllm needs one --cache, and no --type, --cause, --tier, --key or --json.")
    if heartbeats and form != "json":
        raise click.UsageError("--heartbeats is for --json.")
    try:
        wanted = Filter(
            types=[EventType[name.upper()] for name in types],
            causes=[Cause[name.upper()] for name in causes],
            tiers=[Tier[name.upper()] for name in tiers],
            **others,
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    return Plan(
        start=_start(since, oldest, snapshot),
        wanted=wanted,
        bounds=Bounds(limit, until, not no_follow),
        show=_show(form, heartbeats, output),
        heartbeats=heartbeats,
        fail_on_gap=fail_on_gap,
        summary=form == "text" and output.is_terminal,
    )


def _start(since: Moment | None, oldest: bool, snapshot: bool) -> Start:
    if isinstance(since, Instant):
        return Start(since_time_ns=since.time_ns)
    return Start(since, oldest, snapshot)


def _show(form: str, heartbeats: bool, output: Output) -> Show:
    match form:
        case "json":
            return json_lines if heartbeats else json_lines_without_heartbeats
        case "trtllm":
            return trtllm_lines()
        case _:
            return TextLines(output.columns, colour=output.colour)


def _run(daemon: DaemonAt, plan: Plan, output: Output) -> int:
    """The exit status."""
    interrupts = Interrupts(output)
    with interrupts.handled():
        try:
            return asyncio.run(_follow(daemon, plan, output, interrupts))
        except (asyncio.CancelledError, Stopped, BrokenPipeError):
            # Whoever read our lines has enough of them, or never reads: the interpreter's last flush must neither
            # complain of it nor wait for it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
            return 128 + interrupts.caught if interrupts.caught else Exit.DONE
        except DaemonUnavailable as error:
            click.echo(f"Error: {explained(error)}", err=True)
            return Exit.NO_DAEMON
        except KvtierError as error:
            raise click.ClickException(explained(error)) from error
        except OSError as error:
            raise click.ClickException(f"cannot write to standard output: {error.strerror}") from error


async def _follow(daemon: DaemonAt, plan: Plan, output: Output, interrupts: Interrupts) -> Exit:
    interrupts.end_this_task()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await daemon.connect())
        end_when_nobody_reads(sys.stdout)
        ending = Ending(
            lambda since: client.watch(since=since, caches=plan.wanted.caches, heartbeats=True), plan.bounds
        )
        await ending.begin()
        watch = await stack.enter_async_context(_watch(client, plan))
        summary = Summary(time.monotonic())
        if plan.summary:
            stack.push_async_callback(_cancelled, asyncio.create_task(_draw(summary, watch, output)), output)
        async for item in watch:
            if ending.lies_beyond(item):
                return Exit.DONE
            summary.note(item, time.monotonic())
            output.lines(plan.show(item))
            if plan.fail_on_gap and isinstance(item, Gap):
                return Exit.GAP
            if await ending.reached_with(item, watch):
                return Exit.DONE
    return Exit.DONE


def _watch(client: AsyncClient, plan: Plan) -> Watch:
    return client.watch(
        since=plan.start.since,
        oldest=plan.start.oldest,
        snapshot=plan.start.snapshot,
        since_time_ns=plan.start.since_time_ns,
        types=plan.wanted.types,
        causes=plan.wanted.causes,
        tiers=plan.wanted.tiers,
        caches=plan.wanted.caches,
        groups=plan.wanted.groups,
        keys=plan.wanted.keys,
        heartbeats=plan.heartbeats or plan.bounds.moment,
        breaks=True,
        heartbeat_s=BOUNDED_HEARTBEAT_S if plan.bounds.moment else DEFAULT_HEARTBEAT_S,
    )


async def _draw(summary: Summary, watch: Watch, output: Output) -> None:
    """Keeps the status line true, and as wide as the terminal is."""
    resized = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, resized.set)
    while True:
        output.status(summary.line(time.monotonic(), watch.cursor, watch.lag))
        resized.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(resized.wait(), SUMMARY_S)


async def _cancelled(drawing: asyncio.Task[None], output: Output) -> None:
    drawing.cancel()
    await asyncio.wait([drawing])
    output.status("")
