"""``kvtier status``, ``leases`` and ``kick``: show the daemon's state and its leases, and end a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import DaemonAt, address_option, cache_option, confirmed
from kvtier.cli.options import command, dry_run_option, output_option, yes_option
from kvtier.cli.output import UNKNOWN, nonzero, plain, share, show, table
from kvtier.client import AsyncClient
from kvtier.errors import NotFound
from kvtier.types import (
    TIERS,
    CacheStats,
    DaemonStats,
    KickReport,
    LeaseInfo,
    PeerStats,
    RemoteStats,
    SessionStats,
    TierBytes,
    clean,
    count,
    duration,
    size,
)

Counter = Callable[[CacheStats], int]
Rate = Callable[[Counter], float | None]
"""Returns the rise of a counter per second over all caches; None: unknown."""

_RARE: Final = ("blank", "filling", "retiring", "orphaned", "quarantined")
"""States of slots that are shown only if a tier has slots in them."""


@command()
@address_option
@output_option()
def status(daemon: DaemonAt, form: str) -> None:
    """Show tiers, moves, hits, caches, sessions and problems.

    Zeros and the session of this command are left out; JSON and YAML have everything.
    """

    async def asked(client: AsyncClient) -> tuple[DaemonStats, int]:
        return await client.stats(), client.session_id

    stats, own = daemon.ask(asked)
    show(form, plain(stats), report(stats, daemon.address, own))


@command()
@address_option
@cache_option(help="Only those of this cache.")
@click.option("--session", "session_id", type=click.IntRange(min=1), metavar="ID", help="Only those of this session.")
@output_option()
def leases(daemon: DaemonAt, cache: str | None, session_id: int | None, form: str) -> None:
    """Show every lease and its holder, the oldest first."""
    found = daemon.ask(lambda client: client.leases(cache=cache, session_id=session_id))
    show(form, [plain(lease) for lease in found], leases_table(found) if found else "no leases")


@command()
@address_option
@click.argument("session_id", type=click.IntRange(min=1), metavar="SESSION")
@dry_run_option
@yes_option
@output_option()
def kick(daemon: DaemonAt, session_id: int, dry_run: bool, yes: bool, form: str) -> None:
    """End a session, by its number from `leases` or `status`.

    The session loses its leases. Its process is not touched: if it lives, it finds its leases lost. Slots that it may
    be writing stay out of use until it releases them or ends.
    """

    async def kicked(client: AsyncClient, pid: int | None = None) -> tuple[SessionStats, KickReport]:
        """Ends the session if process ``pid`` still has it: a restarted daemon reuses numbers. None: a dry run."""
        sessions = (await client.stats()).sessions
        holder = next((one for one in sessions if one.session_id == session_id and pid in (None, one.pid)), None)
        if holder is None:
            raise NotFound(f"no such session: {session_id}", reason="NO_SUCH_SESSION")
        return holder, await client.kick(session_id, dry_run=pid is None)

    holder, report = daemon.ask(kicked)
    who = f"session {session_id}, pid {holder.pid} {holder.command}"
    if not dry_run:
        confirmed(f"End {who}, which holds {report.slots} slots?", yes)
        _, report = daemon.ask(lambda client: kicked(client, holder.pid))
    value = {"session_id": session_id, "pid": holder.pid, "command": holder.command, **dataclasses.asdict(report)}
    given = "would be taken" if dry_run else "taken"
    show(form, {**value, "dry_run": dry_run}, f"{who}: {report.leases} leases, {report.slots} slots {given}")


def report(stats: DaemonStats, address: str, own_session: int = 0) -> RenderableType:
    """Returns the status for people, without the session ``own_session``."""
    lines: list[RenderableType] = [head(stats, address), _event_log(stats)]
    for device in stats.devices:
        gpu = f"{device.name} {device.uuid}, {size(device.memory_bytes)}"
        lines.append(Text(f"device: {clean(gpu if device.uuid else device.kind)}"))
    lines += map(peer_line, stats.peers)
    sessions = [session for session in stats.sessions if session.session_id != own_session]
    parts = (
        _budgets(stats.tiers),
        tiers(stats.caches),
        moves(stats.caches),
        found_blocks(stats.caches),
        caches_table(stats),
        _sessions(sessions),
    )
    return Group(*lines, *spaced(parts))


def peer_line(peer: PeerStats) -> Text:
    """Returns a line with a peer, its state and its problem."""
    why = f": {clean(peer.problem)}" if peer.problem else ""
    style = "green" if peer.state == "exact" and not why else "yellow"
    return Text(f"peer {peer.address}: {peer.state}, {peer.blocks} blocks of caches here{why}", style=style)


def spaced(parts: Collection[RenderableType]) -> Iterator[RenderableType]:
    """Yields the parts, each after an empty line, without tables that have no rows."""
    for part in parts:
        if not isinstance(part, Table) or part.row_count:
            yield from (Text(), part)


def head(stats: DaemonStats, address: str, away: str = "") -> RenderableType:
    """Returns the daemon's identity and health. ``away``: why it does not answer."""
    waiting = sum(cache.waiting for cache in stats.caches)
    behind = max((each.lag for each in stats.watcher_stats), default=0)
    up = timedelta(seconds=stats.uptime_ns // 10**9)
    lines = [
        Text(f"kvtierd {stats.version}  {address}  pid {stats.pid}  up {up}", style="bold"),
        Text(
            f"caches {len(stats.caches)}{f'  calls waiting {waiting}' if waiting else ''}  "
            f"watchers {stats.watchers}{f', behind {behind}' if behind else ''}  "
            f"last event {stats.last_event_id}  epoch {stats.epoch}  boot {stats.boot}"
        ),
        *(Text(f"problem: {clean(problem)}", style="bold red") for problem in stats.problems),
        *(Text(f"note: {clean(note)}") for note in stats.notes),
    ]
    if away:
        lines.append(Text(f"AWAY: {clean(away)}", style="bold red"))
    elif not stats.problems:
        lines.append(Text("healthy", style="green"))
    if stats.remote.url:
        lines.append(_remote_line(stats.remote))
    return Group(*lines)


def _remote_line(remote: RemoteStats) -> Text:
    """Returns the remote store in one line: blocks, bytes and the mean time of a call since the daemon's start."""
    blocks = ", ".join(f"{outcome} {remote.blocks.get(outcome, 0)}" for outcome in ("written", "fetched", "damaged"))
    calls = ", ".join(
        f"{each.operation} {size(each.bytes)} ({duration(each.seconds * 1e9 / max(each.calls, 1))})"
        for each in remote.operations
        if each.operation in ("get", "put")
    )
    waiting = sum(remote.unwritten.values())
    line = f"remote {remote.url}: {'failing' if remote.problem else 'healthy'}; {blocks}, unwritten {waiting}; {calls}"
    return Text(clean(line), style="red" if remote.problem else "")


def _event_log(stats: DaemonStats) -> Text:
    log = stats.event_log
    if not log.max_bytes:
        return Text("event log: none; past events are in memory alone")
    seconds = log.oldest_age_ns // 10**9
    age = f"{seconds} s" if seconds < 120 else timedelta(seconds=seconds)
    held = (
        f"{size(log.bytes)}, events {log.oldest_id} to {log.newest_id}, oldest {age} ago" if log.oldest_id else "empty"
    )
    lost = f"; {log.lost_events} events are missing" if log.lost_events else ""
    return Text(f"event log: {held}{lost}")


def _budgets(found: Sequence[TierBytes]) -> Table:
    """Returns the size of each tier and the caches that have its bytes, the largest first."""
    rows = (
        (
            f"{each.tier} of {each.device}" if each.device else str(each.tier),
            size(each.size),
            size(each.size - each.left),
            size(each.left),
            ", ".join(f"{name} {size(n)}" for name, n in sorted(each.given.items(), key=lambda one: -one[1])),
        )
        for each in found
    )
    return table(("bytes", "size", "given out", "left", "to"), rows, left=("bytes", "to"), clip="to")


def tiers(caches: Sequence[CacheStats]) -> Table:
    rows: list[Sequence[RenderableType]] = []
    for tier in TIERS:
        parts = [part for cache in caches for part in cache.tiers if part.tier is tier]
        if not parts:
            continue
        total = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("ready", "capacity", "held", "free", "clean", *_RARE)
        }
        bar = ProgressBar(total=max(total["capacity"], 1), completed=total["ready"], width=24)
        counts = (count(total[name]) for name in ("capacity", "held", "free", "clean"))
        rare = ", ".join(f"{count(total[name])} {name}" for name in _RARE if total[name])
        rows.append((str(tier), share(total["ready"], total["capacity"]), bar, *counts, rare))
    return table(
        ("tier", "filled", "of given out", "slots", "held", "free", "clean", "of them"),
        rows,
        left=("tier", "of given out", "of them"),
    )


def moves(caches: Sequence[CacheStats], rate: Rate | None = None) -> Table:
    """Returns a row for each edge in use. Without ``rate`` the columns of rates are left out, also in other tables."""
    rows: list[Sequence[RenderableType]] = []
    found = [edge for cache in caches for edge in cache.edges]
    for name in sorted({edge.edge for edge in found}):
        parts = [edge for edge in found if edge.edge == name]
        sums = ("blocks", "bytes", "failures", "queue_ns", "copy_ns")
        blocks, nbytes, failures, queue_ns, copy_ns = (sum(getattr(edge, each) for edge in parts) for each in sums)
        queued = max(edge.queued_blocks for edge in parts)  # the daemon's: each cache reports the same queue
        degraded = any(edge.degraded for edge in parts)
        if blocks or failures or queued or degraded:
            rows.append(
                (
                    Text(f"{name} DEGRADED", style="bold red") if degraded else name,
                    _rise(rate, _moved(name, "blocks")),
                    _rise(rate, _moved(name, "bytes"), size),
                    count(blocks),
                    size(nbytes),
                    duration(queue_ns / max(blocks, 1)),
                    duration(copy_ns / max(blocks, 1)),
                    nonzero(queued),
                    nonzero(failures),
                )
            )
    columns = ("move", "blocks/s", "bytes/s", "blocks", "bytes", "mean wait", "mean copy", "queued", "failures")
    return table(columns, rows, left=("move",))


def _rise(rate: Rate | None, counter: Counter, shown: Callable[[float], str] = count) -> str:
    if rate is None:
        return ""
    number = rate(counter)
    return UNKNOWN if number is None else shown(number)


def _moved(edge: str, field: str) -> Counter:
    """Returns a counter of a cache: the sum of ``field`` over an edge."""
    return lambda cache: sum(getattr(each, field) for each in cache.edges if each.edge == edge)


_COUNTERS: Final = (*(f"hits_{tier}" for tier in TIERS), "queried", "found")
"""Blocks read, by the fastest tier that had them; blocks of requested chains, and found blocks of these chains."""


def found_blocks(caches: Sequence[CacheStats], rate: Rate | None = None) -> Table:
    counters: list[Counter] = [attrgetter(name) for name in _COUNTERS]
    total = [sum(map(counter, caches)) for counter in counters]
    rows = [("blocks", *map(count, total), share(total[-1], total[-2]))] if any(total) else []
    if rate is not None:
        rows.append(("blocks/s", *(_rise(rate, counter) for counter in counters), ""))
    return table(("read from", *map(str, TIERS), "asked for", "found", "hits"), rows, left=("read from",))


def caches_table(stats: DaemonStats, rate: Rate | None = None) -> Table:
    """Returns a row for each window group, with its device if the daemon has several."""
    rows: list[Sequence[str]] = []
    for cache in stats.caches:
        for group in cache.groups:
            filled = {part.tier: share(part.ready, part.capacity) for part in group.tiers}
            asked = any(getattr(group, name) for name in _COUNTERS)
            rows.append(
                (
                    cache.name,
                    nonzero(group.window_tokens),
                    count(group.blocks),
                    *(filled.get(tier, "") for tier in TIERS),
                    share(group.found, group.queried) if asked else "",
                    *(_rise(rate, _of_group(cache.cache_id, group.group, field)) for field in ("stored", "removed")),
                    nonzero(cache.waiting),
                    _lookups(cache),
                    cache.device if len(stats.devices) > 1 else "",
                )
            )
    columns = ("cache", "window", "blocks", *map(str, TIERS), "hits", "new/s", "gone/s", "waiting", "lookups", "on")
    return table(columns, rows, left=("cache", "lookups", "on"), clip="on")


def _of_group(cache_id: int, number: int, field: str) -> Counter:
    """Returns a counter of one window group."""
    return lambda cache: getattr(cache.groups[number], field) if cache.cache_id == cache_id else 0


def _lookups(cache: CacheStats) -> str:
    """Formats a cell that is empty if all blocks can be looked up in shared memory."""
    if not cache.index_places:
        return "by calls"
    return f"{cache.unindexed} by calls" if cache.unindexed else ""


def _sessions(sessions: Sequence[SessionStats]) -> Table:
    rows = (
        (
            str(session.session_id),
            str(session.pid),
            str(session.uid),
            nonzero(session.leases),
            nonzero(session.held_slots),
            state(not session.attached),
            session.command,
        )
        for session in sessions
    )
    columns = ("session", "pid", "uid", "leases", "held", "state", "command")
    return table(columns, rows, left=("state", "command"), clip="command")


def state(orphaned: bool) -> RenderableType:
    """Returns the state cell of a session or a lease."""
    return Text("orphaned", style="yellow") if orphaned else ""


def leases_table(found: Sequence[LeaseInfo]) -> Table:
    rows = (
        (
            str(lease.lease_id),
            lease.cache,
            nonzero(lease.group),
            str(lease.tier),
            nonzero(lease.blank_slots),
            nonzero(lease.held_blocks),
            str(timedelta(seconds=lease.age_ns // 10**9)),
            str(lease.session_id),
            str(lease.pid),
            state(lease.orphaned),
            lease.command,
        )
        for lease in found
    )
    columns = ("lease", "cache", "group", "tier", "blank", "held", "age", "session", "pid", "state", "command")
    return table(columns, rows, left=("cache", "tier", "state", "command"), clip="command")
