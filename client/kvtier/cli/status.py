"""``kvtier status``, ``leases`` and ``kick``: what the daemon does, who holds what, and an end for a session."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import click
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import (
    DaemonAt,
    address_option,
    confirmed,
    dry_run_option,
    json_option,
    plain,
    show,
    slim_table,
    yes_option,
)
from kvtier.cli.locate import peer_line
from kvtier.client import AsyncClient
from kvtier.errors import NotFound
from kvtier.types import (
    CacheStats,
    DaemonStats,
    KickReport,
    LeaseInfo,
    RemoteStats,
    SessionStats,
    clean,
    duration,
    size,
)


@click.command()
@address_option
@json_option("One JSON object with everything the daemon says of itself.")
def status(daemon: DaemonAt, as_json: bool) -> None:
    """Show tiers and how full they are, moves, hits, sessions and what they hold, and problems."""
    stats = daemon.ask(lambda client: client.stats())
    show(as_json, plain(stats), report(stats))


@click.command()
@address_option
@click.option("--cache", metavar="NAME", help="Only those of this cache.")
@click.option("--session", "session_id", type=click.IntRange(min=1), metavar="ID", help="Only those of this session.")
@json_option("One JSON list.")
def leases(daemon: DaemonAt, cache: str | None, session_id: int | None, as_json: bool) -> None:
    """Show every lease there is, the oldest first, and whose it is."""
    found = daemon.ask(lambda client: client.leases(cache=cache, session_id=session_id))
    show(as_json, [plain(lease) for lease in found], _leases(found))


@click.command()
@address_option
@click.argument("session_id", type=click.IntRange(min=1), metavar="SESSION")
@dry_run_option
@yes_option
@json_option("One JSON object.")
def kick(daemon: DaemonAt, session_id: int, dry_run: bool, yes: bool, as_json: bool) -> None:
    """End SESSION (a number of `kvtier leases` or `kvtier status`).

    Its leases are taken from it. Its process is not touched: if it lives it finds its leases lost, and slots that it
    may be writing stay out of use until it lets go of them or ends.
    """

    async def kicked(client: AsyncClient, pid: int | None = None) -> tuple[SessionStats, KickReport]:
        """``pid``: only if the session is this process's still; a restarted daemon gives its number to another."""
        sessions = (await client.stats()).sessions
        holder = next((one for one in sessions if one.session_id == session_id and pid in (None, one.pid)), None)
        if holder is None:
            raise NotFound(f"session_id = {session_id}: there is no such session", reason="NO_SUCH_SESSION")
        return holder, await client.kick(session_id, dry_run=pid is None)

    holder, report = daemon.ask(kicked)
    who = f"session {session_id}, pid {holder.pid} {holder.command}"
    if not dry_run:
        confirmed(f"End {who}, which holds {report.slots} slots?", yes)
        _, report = daemon.ask(lambda client: kicked(client, holder.pid))
    value = {"session_id": session_id, "pid": holder.pid, "command": holder.command, **dataclasses.asdict(report)}
    given = "would be taken" if dry_run else "taken"
    show(as_json, {**value, "dry_run": dry_run}, f"{who}: {report.leases} leases, {report.slots} slots {given}")


def report(stats: DaemonStats) -> RenderableType:
    up = timedelta(seconds=stats.uptime_ns // 10**9)
    parts: list[RenderableType] = [
        Text(
            f"kvtierd {stats.version}  pid {stats.pid}  up {up}  epoch {stats.epoch}  boot {stats.boot}  "
            f"last event {stats.last_event_id}  watchers {stats.watchers}"
        ),
        _past_events(stats),
    ]
    for device in stats.devices:
        gpu = f"{device.name} {device.uuid}, {size(device.memory_bytes)}"
        parts.append(Text(f"device: {clean(gpu if device.uuid else device.kind)}"))
    parts += [Text(f"problem: {clean(problem)}", style="bold red") for problem in stats.problems]
    if not stats.problems:
        parts.append(Text("healthy", style="green"))
    parts += map(peer_line, stats.peers)
    if stats.remote.url:
        parts.append(remote_line(stats.remote))
    for cache in stats.caches:
        where = f" on {clean(cache.device)}" if cache.device else ""
        parts += [Text(f"cache {cache.name}: {cache.blocks} blocks{where}", style="bold")]
        parts += [_tiers(cache), _edges(cache)]
        parts.append(_traffic(cache))
    return Group(*parts, Text("sessions", style="bold"), _sessions(stats.sessions))


def remote_line(remote: RemoteStats) -> Text:
    """The store beyond the host in one line: blocks, bytes and the mean time of a call since the daemon's start."""
    blocks = ", ".join(f"{outcome} {remote.blocks.get(outcome, 0)}" for outcome in ("written", "fetched", "damaged"))
    calls = ", ".join(
        f"{each.operation} {size(each.bytes)} ({duration(each.seconds * 1e9 / max(each.calls, 1))})"
        for each in remote.operations
        if each.operation in ("get", "put")
    )
    line = f"remote {remote.url}: {'failing' if remote.problem else 'healthy'}; {blocks}; {calls}"
    return Text(clean(line), style="red" if remote.problem else "")


def _past_events(stats: DaemonStats) -> Text:
    log = stats.event_log
    if not log.max_bytes:
        return Text("past events: in memory alone")
    age = timedelta(seconds=log.oldest_age_ns // 10**9)
    held = f"{size(log.bytes)} on disk, from {log.oldest_id} on, {age} ago" if log.oldest_id else "none on disk yet"
    lost = f"; {log.lost_events} were lost to the log" if log.lost_events else ""
    return Text(f"past events: {held}{lost}")


def _tiers(cache: CacheStats) -> Table:
    states = ("held", "free", "blank", "filling", "retiring", "orphaned", "quarantined")
    rows = slim_table(("group", "tier", "slots", "filled", "", *states), left=("group", "tier", ""))
    for group in cache.groups:
        for tier in group.tiers:
            rows.add_row(
                f"{group.group}: {f'{group.window_tokens} tokens' if group.window_tokens else 'full'}",
                str(tier.tier),
                str(tier.capacity),
                f"{tier.ready / max(tier.capacity, 1):.0%}",
                ProgressBar(total=max(tier.capacity, 1), completed=tier.ready, width=20),
                *(str(getattr(tier, state)) for state in states),
            )
    return rows


def _edges(cache: CacheStats) -> Table:
    columns = ("move", "blocks", "bytes", "queued", "mean queue", "mean copy", "failures")
    rows = slim_table(columns, left=("move",))
    for edge in cache.edges:
        count = max(edge.blocks, 1)
        rows.add_row(
            f"{edge.edge} (degraded)" if edge.degraded else edge.edge,
            str(edge.blocks),
            size(edge.bytes),
            str(edge.queued_blocks),
            duration(edge.queue_ns / count),
            duration(edge.copy_ns / count),
            str(edge.failures),
            style="red" if edge.degraded else None,
        )
    return rows


def _traffic(cache: CacheStats) -> Text:
    hits = cache.hits_device + cache.hits_host + cache.hits_disk
    asked = hits + cache.misses
    share = f" ({hits / asked:.1%} of the chains acquired or read)" if asked else ""
    index = f"{cache.blocks - cache.unindexed} of {cache.index_places} places taken"
    lookups = f"in shared memory, {index}, {cache.unindexed} blocks without" if cache.index_places else "by calls"
    return Text(
        f"lookups {lookups}\n"
        f"hits {hits}{share}: device {cache.hits_device}, host {cache.hits_host}, disk {cache.hits_disk}; "
        f"misses {cache.misses}; stored {cache.stored}, removed {cache.removed}; calls waiting {cache.waiting}\n"
    )


def _sessions(sessions: tuple[SessionStats, ...]) -> Table:
    rows = slim_table(("session", "pid", "uid", "attached", "leases", "held slots"), left=("attached",))
    rows.add_column("command", overflow="ellipsis", no_wrap=True)
    for session in sessions:
        rows.add_row(
            str(session.session_id),
            str(session.pid),
            str(session.uid),
            "yes" if session.attached else "no: its connection broke",
            str(session.leases),
            str(session.held_slots),
            Text(session.command),
            style=None if session.attached else "yellow",
        )
    return rows


def _leases(found: list[LeaseInfo]) -> Table | str:
    if not found:
        return "no leases"
    columns = ("lease", "cache", "group", "tier", "blank", "held", "age", "session", "pid", "uid")
    rows = slim_table(columns, left=("cache", "tier"))
    rows.add_column("command", overflow="ellipsis", no_wrap=True, max_width=24)
    for lease in found:
        rows.add_row(
            str(lease.lease_id),
            lease.cache,
            str(lease.group),
            str(lease.tier),
            str(lease.blank_slots),
            str(lease.held_blocks),
            str(timedelta(seconds=lease.age_ns // 10**9)),
            f"{lease.session_id}{' (detached)' if lease.orphaned else ''}",
            str(lease.pid),
            str(lease.uid),
            Text(lease.command),
            style="yellow" if lease.orphaned else None,
        )
    return rows
