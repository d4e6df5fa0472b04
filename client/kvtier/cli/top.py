"""``kvtier top``: tiers, moves, hits, caches and leases on one screen, repainted after each look at the daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier.cli import status
from kvtier.cli.common import DaemonAt, Interrupts, address_option, run
from kvtier.cli.options import command, output_option
from kvtier.cli.output import UNKNOWN, console, plain, share, show, table
from kvtier.errors import KvtierError, PermissionDenied
from kvtier.types import TIERS, CacheStats, DaemonStats, LeaseInfo, clean, count, size

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

    def total(self, counter: Callable[[CacheStats], int]) -> int:
        return sum(map(counter, self.stats.caches))

    def rate(self, counter: Callable[[CacheStats], int]) -> float | None:
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
    parts = (status.tiers(look.stats.caches), _moves(look), _hits(look), _caches(look), _leases(look))
    return Group(status.head(look.stats, address, look.away), *status.spaced(parts))


def _moves(look: Look) -> Table:
    rows: list[Sequence[RenderableType]] = []
    for edge in status.edges(look.stats.caches):
        speed = look.rate(_moved(edge.edge, "bytes"))
        rows.append(
            (
                status.edge_name(edge),
                _rate(look.rate(_moved(edge.edge, "blocks"))),
                UNKNOWN if speed is None else size(speed),
                *map(count, (edge.queued_blocks, edge.blocks, edge.failures)),
            )
        )
    return table(("move", "blocks/s", "bytes/s", "queued", "blocks", "failures"), rows, left=("move",))


def _moved(edge: str, field: str) -> Callable[[CacheStats], int]:
    """Returns a counter of a cache: the sum of ``field`` over an edge."""
    return lambda cache: sum(getattr(each, field) for each in cache.edges if each.edge == edge)


def _of_cache(name: str, field: str) -> Callable[[CacheStats], int]:
    """Returns a counter of one cache."""
    return lambda cache: getattr(cache, field) if cache.name == name else 0


def _hits(look: Look) -> Table:
    counters: list[Callable[[CacheStats], int]] = [attrgetter(name) for name in status.COUNTERS]
    total = [look.total(counter) for counter in counters]
    rows = (
        ("blocks/s", *(_rate(look.rate(counter)) for counter in counters), ""),
        ("since start", *map(count, total), status.hit_ratio(total)),
    )
    return table(status.LOOKED_FOR, rows, left=status.LOOKED_FOR[:1])


def _caches(look: Look) -> RenderableType:
    found = sorted(look.stats.caches, key=lambda cache: -cache.blocks)
    rows: list[Sequence[RenderableType]] = []
    for cache in found[:ROWS_SHOWN]:
        filled = {part.tier: share(part.ready, part.capacity) for part in cache.tiers}
        rows.append(
            (
                cache.name,
                count(cache.blocks),
                *(filled.get(tier, "") for tier in TIERS),
                status.hit_ratio(status.looked_for(cache)),
                *(_rate(look.rate(_of_cache(cache.name, field))) for field in ("stored", "removed")),
                str(cache.waiting),
            )
        )
    columns = ("cache", "blocks", *map(str, TIERS), "hits", "new/s", "gone/s", "waiting")
    return _with_rest(table(columns, rows, left=("cache",)), len(found), "caches")


def _leases(look: Look) -> RenderableType:
    if look.refused:
        return Text(f"leases are not told: {clean(look.refused)}", style="dim")
    if not look.leases:
        return Text("nobody holds anything", style="dim")
    return _with_rest(status.leases_table(look.leases[:ROWS_SHOWN]), len(look.leases), "leases")


def _with_rest(rows: Table, number: int, what: str) -> RenderableType:
    rest = number - ROWS_SHOWN
    return Group(rows, Text(f"and {rest} more {what}", style="dim")) if rest > 0 else rows


def _rate(number: float | None) -> str:
    return UNKNOWN if number is None else count(number)
