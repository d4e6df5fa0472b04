"""``kvtier status``: what the daemon is doing, on one screen."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import DaemonAt, address_option, console, json_option, run
from kvtier.stats import CacheStats, DaemonStats, DeviceStats, EventLogStats, SessionStats
from kvtier.words import clean, duration, size


@click.command()
@address_option
@json_option("One JSON object with everything the daemon says of itself.")
def status(daemon: DaemonAt, as_json: bool) -> None:
    """Show tiers and how full they are, moves, hits, sessions and what they hold, and problems."""
    stats = run(_stats(daemon))
    if as_json:
        click.echo(json.dumps(as_object(stats), indent=2))
    else:
        console().print(report(stats))


async def _stats(daemon: DaemonAt) -> DaemonStats:
    async with await daemon.connect() as client:
        return await client.stats()


def as_object(stats: DaemonStats) -> dict[str, Any]:
    """Field names as in :class:`kvtier.stats.DaemonStats`; tiers by name."""
    values = dataclasses.asdict(stats)
    for cache in values["caches"]:
        for tier in (tier for part in (cache, *cache["groups"]) for tier in part["tiers"]):
            tier["tier"] = str(tier["tier"])
    return values


def report(stats: DaemonStats) -> RenderableType:
    up = timedelta(seconds=stats.uptime_ns // 10**9)
    head = Text(
        f"kvtierd {stats.version}  pid {stats.pid}  up {up}  epoch {stats.epoch}  boot {stats.boot}  "
        f"last event {stats.last_event_id}  watchers {stats.watchers}"
    )
    parts: list[RenderableType] = [head, _log(stats.event_log)]
    if stats.device is not None:
        parts.append(_device(stats.device))
    parts.append(_problems(stats.problems))
    for cache in stats.caches:
        parts += [_tiers(cache), _edges(cache), _traffic(cache)]
    parts.append(_sessions(stats.sessions))
    return Group(*parts)


def _log(log: EventLogStats) -> RenderableType:
    if not log.max_bytes:
        return Text("past events: in memory alone")
    age = timedelta(seconds=log.oldest_age_ns // 10**9)
    held = f"{size(log.bytes)} on disk, from {log.oldest_id} on, {age} ago" if log.oldest_id else "none on disk yet"
    lost = f"; {log.lost_events} were lost to the log" if log.lost_events else ""
    return Text(f"past events: {held}{lost}")


def _device(device: DeviceStats) -> RenderableType:
    if not device.uuid:
        return Text(f"device tier: {clean(device.kind)}, in shared memory")
    return Text(f"device tier: {clean(device.name)} {clean(device.uuid)}, {size(device.memory_bytes)}")


def _problems(problems: tuple[str, ...]) -> RenderableType:
    if not problems:
        return Text("healthy", style="green")
    return Text("\n".join(f"problem: {problem}" for problem in problems), style="bold red")


def _tiers(cache: CacheStats) -> RenderableType:
    table = Table(title=f"cache {cache.name}: {cache.blocks} blocks", title_justify="left", title_style="bold")
    columns = (
        "group",
        "tier",
        "slots",
        "filled",
        "",
        "held",
        "free",
        "blank",
        "filling",
        "retiring",
        "orphaned",
        "quarantined",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("group", "tier", "") else "right")
    for group, tier in ((one, tier) for one in cache.groups for tier in one.tiers):
        share = tier.ready / tier.capacity if tier.capacity else 0.0
        table.add_row(
            f"{group.group}: {f'{group.window_tokens} tokens' if group.window_tokens else 'full'}",
            str(tier.tier),
            str(tier.capacity),
            f"{share:.0%}",
            ProgressBar(total=max(tier.capacity, 1), completed=tier.ready, width=20),
            *map(str, (tier.held, tier.free, tier.blank, tier.filling, tier.retiring, tier.orphaned, tier.quarantined)),
        )
    return table


def _edges(cache: CacheStats) -> RenderableType:
    table = Table()
    for column in ("move", "blocks", "bytes", "queued", "mean queue", "mean copy", "failures"):
        table.add_column(column, justify="left" if column == "move" else "right")
    for edge in cache.edges:
        count = max(edge.blocks, 1)
        table.add_row(
            f"{edge.edge} (degraded)" if edge.degraded else edge.edge,
            str(edge.blocks),
            size(edge.bytes),
            str(edge.queued_blocks),
            duration(edge.queue_ns / count),
            duration(edge.copy_ns / count),
            str(edge.failures),
            style="red" if edge.degraded else None,
        )
    return table


def _traffic(cache: CacheStats) -> RenderableType:
    hits = cache.hits_device + cache.hits_host + cache.hits_disk
    asked = hits + cache.misses
    share = f" ({hits / asked:.1%} of the chains acquired or read)" if asked else ""
    index = f"{cache.blocks - cache.unindexed} of {cache.index_places} places taken"
    lookups = f"in shared memory, {index}, {cache.unindexed} blocks without" if cache.index_places else "by calls"
    return Text(
        f"lookups {lookups}\n"
        f"hits {hits}{share}: device {cache.hits_device}, host {cache.hits_host}, disk {cache.hits_disk}; "
        f"misses {cache.misses}; stored {cache.stored}, removed {cache.removed}; calls waiting {cache.waiting}"
    )


def _sessions(sessions: tuple[SessionStats, ...]) -> RenderableType:
    table = Table(title="sessions", title_justify="left", title_style="bold")
    for column in ("session", "pid", "uid", "attached", "leases", "held slots"):
        table.add_column(column, justify="left" if column == "attached" else "right")
    table.add_column("command", overflow="ellipsis", no_wrap=True)
    for session in sessions:
        table.add_row(
            str(session.session_id),
            str(session.pid),
            str(session.uid),
            "yes" if session.attached else "no: its connection broke",
            str(session.leases),
            str(session.held_slots),
            Text(session.command),
            style=None if session.attached else "yellow",
        )
    return table
