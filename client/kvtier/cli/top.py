"""``kvtier top``: tiers, moves, hits, caches and leases on one screen, painted anew after each look at the daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import DaemonAt, Interrupts, address_option, console, run
from kvtier.cli.status import remote_line
from kvtier.errors import KvtierError, PermissionDenied
from kvtier.types import TIERS, CacheStats, DaemonStats, LeaseInfo, Tier, clean, count, size

ROWS_SHOWN: Final = 8
"""Caches, and leases; the screen has no room for all."""

INTERVAL_S: Final = 1.0
"""Time from one look at the daemon to the next."""

PATIENCE_S: Final = 2.0
"""A daemon that takes longer to answer is away."""

UNKNOWN: Final = "–"


@dataclass(slots=True, frozen=True)
class Look:
    """What the daemon says of itself, now and at the look before.

    ``leases``: the oldest first. ``refused``: why there are none to see. ``away``: why no newer answer comes.
    """

    stats: DaemonStats
    before: DaemonStats | None = None
    leases: tuple[LeaseInfo, ...] = ()
    refused: str = ""
    away: str = ""

    def of_cache(self, name: str) -> Look:
        """With the counters of this cache alone."""
        return replace(
            self,
            stats=_of_cache(self.stats, name),
            before=_of_cache(self.before, name) if self.before is not None else None,
        )

    def total(self, counter: Callable[[CacheStats], int]) -> int:
        """A counter of the caches, summed."""
        return sum(map(counter, self.stats.caches))

    def rate(self, counter: Callable[[CacheStats], int]) -> float | None:
        """How much a counter rose a second; None at the first look, after a restart and for a new cache."""
        now, before = self.stats, self.before
        if before is None or (now.boot, now.pid) != (before.boot, before.pid) or now.uptime_ns == before.uptime_ns:
            return None
        if {cache.cache_id for cache in now.caches} != {cache.cache_id for cache in before.caches}:
            return None
        risen = sum(map(counter, now.caches)) - sum(map(counter, before.caches))
        return risen * 1e9 / (now.uptime_ns - before.uptime_ns)


@click.command()
@address_option
@click.option("--once", is_flag=True, help="Print one screen and end. Without a terminal it does so anyway.")
def top(daemon: DaemonAt, once: bool) -> None:
    """Watch tiers, moves, hits, caches and leases, live on the whole screen; q ends it.

    Goes on over restarts of the daemon. You see the caches that you may administer.
    """
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout)) and os.environ.get("TERM") != "dumb"
    raise SystemExit(run((_print_one if once or not terminal else _follow)(daemon)))


async def looks(daemon: DaemonAt) -> AsyncGenerator[Look, None]:
    """One a second. The first refusal is raised; a later one is a look that says why nothing newer comes."""
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


async def _print_one(daemon: DaemonAt) -> int:
    """The second look, since rates take two."""
    async with aclosing(looks(daemon)) as following:
        await anext(following)
        console().print(screen(await anext(following), daemon.address))
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
    """Ends the task when q is pressed. What is typed is not shown."""

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


def _of_cache(stats: DaemonStats, name: str) -> DaemonStats:
    return replace(stats, caches=tuple(cache for cache in stats.caches if cache.name == name))


def screen(look: Look, address: str) -> RenderableType:
    """All that is shown of a look."""
    parts = (_tiers, _moves, _hits, _caches, _leases)
    return Group(_head(look, address), *(Padding(part(look), (1, 0, 0, 0)) for part in parts))


def _head(look: Look, address: str) -> RenderableType:
    stats = look.stats
    first = f"kvtierd {stats.version}  {address}  pid {stats.pid}  epoch {stats.epoch}  boot {stats.boot}"
    lines = [
        Text(f"{first}  up {timedelta(seconds=stats.uptime_ns // 10**9)}", style="bold", overflow="ellipsis"),
        Text(
            f"caches {len(stats.caches)}  calls waiting {look.total(lambda cache: cache.waiting)}  "
            f"last event {stats.last_event_id}  "
            f"watchers {stats.watchers}, behind {max((each.lag for each in stats.watcher_stats), default=0)}"
        ),
    ]
    lines += [Text(f"problem: {clean(problem)}", style="bold red") for problem in stats.problems]
    if look.away:
        lines.append(Text(f"AWAY: {clean(look.away)}", style="bold red"))
    elif not stats.problems:
        lines.append(Text("healthy", style="green"))
    if stats.remote.url:
        lines.append(remote_line(stats.remote))
    return Group(*lines)


def _tiers(look: Look) -> RenderableType:
    rows = _rows(("tier", "filled", "", "slots", "held", "free", "clean", "out"), left=("tier", ""))
    for tier in TIERS:
        parts = [part for cache in look.stats.caches for part in cache.tiers if part.tier is tier]
        if not parts:
            continue
        slots, ready, held, free, reclaimable = (
            sum(getattr(part, name) for part in parts) for name in ("capacity", "ready", "held", "free", "clean")
        )
        out = sum(part.orphaned + part.quarantined for part in parts)
        bar = ProgressBar(total=max(slots, 1), completed=ready, width=24)
        rows.add_row(str(tier), _share(ready, slots), bar, *map(count, (slots, held, free, reclaimable, out)))
    return rows


def _moves(look: Look) -> RenderableType:
    rows = _rows(("move", "blocks/s", "bytes/s", "queued", "blocks", "failures", ""), left=("move", ""))
    for name in sorted({edge.edge for cache in look.stats.caches for edge in cache.edges}):
        edges = [edge for cache in look.stats.caches for edge in cache.edges if edge.edge == name]
        blocks = _moved(name, "blocks")
        if not any(edge.blocks or edge.failures or edge.queued_blocks or edge.degraded for edge in edges):
            continue
        speed = look.rate(_moved(name, "bytes"))
        degraded = any(edge.degraded for edge in edges)
        rows.add_row(
            name,
            _rate(look.rate(blocks)),
            UNKNOWN if speed is None else size(speed),
            count(max(edge.queued_blocks for edge in edges)),  # the queue is the daemon's, and the same in each cache
            count(look.total(blocks)),
            count(look.total(_moved(name, "failures"))),
            "DEGRADED" if degraded else "",
            style="bold red" if degraded else None,
        )
    return rows


def _moved(edge: str, field: str) -> Callable[[CacheStats], int]:
    """The counter of a cache that says how much went along an edge."""
    return lambda cache: sum(getattr(each, field) for each in cache.edges if each.edge == edge)


def _hits(look: Look) -> RenderableType:
    """Blocks that were looked for, by the fastest tier that had them."""
    rows = _rows(("found in", *map(str, Tier), "missed", "hits"), left=("found in",))
    counters: list[Callable[[CacheStats], int]] = [
        lambda cache: cache.hits_device,
        lambda cache: cache.hits_host,
        lambda cache: cache.hits_disk,
        lambda cache: cache.misses,
    ]
    total = [look.total(counter) for counter in counters]
    rows.add_row("blocks/s", *(_rate(look.rate(counter)) for counter in counters), "")
    rows.add_row("since start", *map(count, total), _share(sum(total) - total[-1], sum(total)))
    return rows


def _caches(look: Look) -> RenderableType:
    found = sorted(look.stats.caches, key=lambda cache: -cache.blocks)
    rows = _rows(("cache", "blocks", *map(str, Tier), "hits", "new/s", "gone/s", "waiting"), left=("cache",))
    for cache in found[:ROWS_SHOWN]:
        one = look.of_cache(cache.name)
        filled = {part.tier: _share(part.ready, part.capacity) for part in cache.tiers}
        hits = cache.hits_device + cache.hits_host + cache.hits_disk
        rows.add_row(
            cache.name,
            count(cache.blocks),
            *(filled.get(tier, UNKNOWN) for tier in TIERS),
            _share(hits, hits + cache.misses),
            _rate(one.rate(lambda cache: cache.stored)),
            _rate(one.rate(lambda cache: cache.removed)),
            str(cache.waiting),
            style="yellow" if cache.waiting else None,
        )
    return _with_rest(rows, len(found), "caches")


def _leases(look: Look) -> RenderableType:
    if look.refused:
        return Text(f"leases are not told: {clean(look.refused)}", style="dim")
    if not look.leases:
        return Text("nobody holds anything", style="dim")
    columns = ("lease of", "age", "tier", "blank", "held", "cache", "state")
    rows = _rows(columns, left=("tier", "cache", "state"))
    rows.add_column("command", no_wrap=True, max_width=24)
    for lease in look.leases[:ROWS_SHOWN]:
        rows.add_row(
            f"pid {lease.pid}",
            str(timedelta(seconds=lease.age_ns // 10**9)),
            str(lease.tier),
            count(lease.blank_slots),
            count(lease.held_blocks),
            lease.cache,
            "orphaned" if lease.orphaned else "live",
            Text(lease.command),
            style="yellow" if lease.orphaned else None,
        )
    return _with_rest(rows, len(look.leases), "leases")


def _rows(columns: Sequence[str], left: Collection[str]) -> Table:
    """Numbers to the right, the columns of ``left`` to the left."""
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    for column in columns:
        rows.add_column(column, justify="left" if column in left else "right", no_wrap=True, max_width=24)
    return rows


def _with_rest(rows: Table, number: int, what: str) -> RenderableType:
    rest = number - ROWS_SHOWN
    return Group(rows, Text(f"and {rest} more {what}", style="dim")) if rest > 0 else rows


def _rate(number: float | None) -> str:
    return UNKNOWN if number is None else count(number)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else UNKNOWN
