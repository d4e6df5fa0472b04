"""``kvtier top``: tiers, moves, hits, caches and leases on one screen, repainted after each look at the daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier.cli import status
from kvtier.cli.common import DaemonAt, Interrupts, address_option, run
from kvtier.cli.options import command, output_option
from kvtier.cli.output import console, plain, show
from kvtier.errors import KvtierError, PermissionDenied
from kvtier.types import DaemonStats, LeaseInfo, clean

ROWS_SHOWN: Final = 8
"""Rows of caches, and of leases, on the screen, which has no room for all."""

INTERVAL_S: Final = 1.0
"""Seconds from one look at the daemon to the next."""

PATIENCE_S: Final = 2.0
"""Seconds after which a daemon that does not answer counts as away."""


@dataclass(slots=True, frozen=True)
class Look:
    """The daemon's statistics, now and at the previous look. ``leases``: the oldest first. ``refused``: why the daemon
    does not list them. ``away``: why it does not answer."""

    stats: DaemonStats
    before: DaemonStats | None = None
    leases: tuple[LeaseInfo, ...] = ()
    refused: str = ""
    away: str = ""

    def rate(self, counter: status.Counter) -> float | None:
        """Returns the rise of a counter per second; None at the first look, after a restart, or with other caches."""
        now, before = self.stats, self.before
        if before is None or (now.boot, now.pid) != (before.boot, before.pid) or now.uptime_ns == before.uptime_ns:
            return None
        if {cache.cache_id for cache in now.caches} != {cache.cache_id for cache in before.caches}:
            return None
        risen = sum(map(counter, now.caches)) - sum(map(counter, before.caches))
        return risen * 1e9 / (now.uptime_ns - before.uptime_ns)


@command()
@address_option
@click.option("--once", is_flag=True, help="Print one screen and end. Without a terminal it does so anyway.")
@output_option()
def top(daemon: DaemonAt, once: bool, form: str) -> None:
    """Follow tiers, moves, hits and leases on one screen.

    Press q to end. Goes on over restarts of the daemon. Shows the caches that you may administer. JSON and YAML print
    one look: the statistics, the statistics of a second before, and the leases.
    """
    once = once or form != "table"
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout)) and os.environ.get("TERM") != "dumb"
    raise SystemExit(run(_print_one(daemon, form) if once or not terminal else _follow(daemon)))


async def looks(daemon: DaemonAt) -> AsyncGenerator[Look, None]:
    """Yields a look every second. Raises an error of the first look; a later error yields the last look as ``away``."""
    last: Look | None = None
    while True:
        try:
            async with await daemon.connect() as client:
                while True:
                    stats = await client.stats(timeout=PATIENCE_S)
                    look = Look(stats, last.stats if last is not None else None)
                    try:
                        last = replace(look, leases=tuple(await client.leases(timeout=PATIENCE_S)))
                    except PermissionDenied as error:
                        last = replace(look, refused=str(error))
                    yield last
                    await asyncio.sleep(INTERVAL_S)
        except KvtierError as error:
            if last is None:
                raise
            yield replace(last, away=str(error))
            await asyncio.sleep(INTERVAL_S)


async def _print_one(daemon: DaemonAt, form: str) -> int:
    """Prints the second look, since rates need two looks."""
    async with aclosing(looks(daemon)) as following:
        await anext(following)
        look = await anext(following)
        show(form, plain(look), screen(look, daemon.address))
    return 0


async def _follow(daemon: DaemonAt) -> int:
    """Paints until q, Ctrl-C or SIGTERM. Returns the exit status."""
    with Interrupts() as interrupts:
        try:
            async with aclosing(looks(daemon)) as following:
                look = await anext(following)
                with _keys(interrupts), Live(console=console(), screen=True, auto_refresh=False) as live:
                    while True:
                        live.update(screen(look, daemon.address), refresh=True)
                        look = await anext(following)
        except asyncio.CancelledError:
            return 0 if interrupts.caught == signal.SIGINT else interrupts.status


@contextmanager
def _keys(interrupts: Interrupts) -> Iterator[None]:
    """Ends the task when q is pressed. The terminal does not echo keys."""

    def typed() -> None:
        if os.read(sys.stdin.fileno(), 64) in (b"", b"q"):
            interrupts.end_task()

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    asyncio.get_running_loop().add_reader(sys.stdin, typed)
    try:
        yield
    finally:
        asyncio.get_running_loop().remove_reader(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def screen(look: Look, address: str) -> RenderableType:
    stats = look.stats
    largest = sorted(stats.caches, key=lambda cache: -cache.blocks)[:ROWS_SHOWN]
    parts = (
        status.tiers(stats.caches),
        status.moves(stats.caches, look.rate),
        status.found_blocks(stats.caches, look.rate),
        _with_rest(status.caches_table(replace(stats, caches=tuple(largest)), look.rate), len(stats.caches), "caches"),
        _leases(look),
    )
    return Group(status.head(stats, address, look.away), *status.spaced(parts))


def _leases(look: Look) -> RenderableType:
    if look.refused:
        return Text(f"leases are not told: {clean(look.refused)}", style="dim")
    if not look.leases:
        return Text("nobody holds anything", style="dim")
    return _with_rest(status.leases_table(look.leases[:ROWS_SHOWN]), len(look.leases), "leases")


def _with_rest(rows: Table, number: int, what: str) -> RenderableType:
    rest = number - ROWS_SHOWN
    return Group(rows, Text(f"and {rest} more {what}", style="dim")) if rest > 0 else rows
