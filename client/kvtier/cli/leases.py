"""``kvtier leases`` and ``kvtier kick``: who holds what, and an end for a client that hangs."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import (
    DaemonAt,
    address_option,
    confirmed,
    console,
    dry_run_option,
    json_option,
    run,
    slim_table,
    yes_option,
)
from kvtier.errors import NotFound
from kvtier.stats import KickReport, LeaseInfo, SessionStats
from kvtier.words import clean


@click.command()
@address_option
@click.option("--cache", metavar="NAME", help="Only those of this cache.")
@click.option("--session", "session_id", type=click.IntRange(min=1), metavar="ID", help="Only those of this session.")
@json_option("One JSON list.")
def leases(daemon: DaemonAt, cache: str | None, session_id: int | None, as_json: bool) -> None:
    """Show every lease there is, the oldest first, and whose it is."""
    found = run(_leases(daemon, cache, session_id))
    if as_json:
        click.echo(json.dumps([as_object(lease) for lease in found], indent=2))
    else:
        console().print(table(found))


@click.command()
@address_option
@click.argument("session_id", type=click.IntRange(min=1), metavar="SESSION")
@dry_run_option
@yes_option
@json_option("One JSON object.")
def kick(daemon: DaemonAt, session_id: int, dry_run: bool, yes: bool, as_json: bool) -> None:
    """End SESSION (a number of `kvtier leases` or `kvtier status`) as if its process were gone.

    All that it holds is given back. Its process is not touched: if it lives it finds its leases lost, and the
    generations changed of whatever it still copies.
    """
    holder, report = run(_kick(daemon, session_id, dry_run=True))
    if not dry_run:
        confirmed(f"End {_who(holder)}, which holds {report.slots} slots?", yes)
        holder, report = run(_kick(daemon, session_id, dry_run=False, pid=holder.pid))
    if as_json:
        whose = {"session_id": session_id, "pid": holder.pid, "command": holder.command}
        click.echo(json.dumps({**whose, **dataclasses.asdict(report), "dry_run": dry_run}))
    else:
        given = "would be given back" if dry_run else "given back"
        click.echo(f"{_who(holder)}: {report.leases} leases, {report.slots} slots {given}")


async def _leases(daemon: DaemonAt, cache: str | None, session_id: int | None) -> list[LeaseInfo]:
    async with await daemon.connect() as client:
        return await client.leases(cache=cache, session_id=session_id)


async def _kick(
    daemon: DaemonAt, session_id: int, *, dry_run: bool, pid: int | None = None
) -> tuple[SessionStats, KickReport]:
    """``pid``: only if the session is this process's still; a restarted daemon gives its number to another."""
    async with await daemon.connect() as client:
        sessions = (await client.stats()).sessions
        holder = next((one for one in sessions if one.session_id == session_id and pid in (None, one.pid)), None)
        if holder is None:
            raise NotFound(f"session_id = {session_id}: there is no such session", reason="NO_SUCH_SESSION")
        return holder, await client.kick(session_id, dry_run=dry_run)


def _who(holder: SessionStats) -> str:
    return f"session {holder.session_id}, pid {holder.pid} {clean(holder.command)}"


def as_object(lease: LeaseInfo) -> dict[str, Any]:
    """Field names as in :class:`kvtier.stats.LeaseInfo`; the tier by name."""
    return {**dataclasses.asdict(lease), "tier": str(lease.tier)}


def table(found: list[LeaseInfo]) -> Table | str:
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
            Text(clean(lease.command)),
            style="yellow" if lease.orphaned else None,
        )
    return rows
