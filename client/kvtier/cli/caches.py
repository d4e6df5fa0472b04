"""``kvtier cache`` and ``kvtier reset``: the caches there are, and an end for one or for its blocks."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from kvtier.cli.common import (
    DaemonAt,
    address_option,
    confirmed,
    dry_run_option,
    json_option,
    show,
    slim_table,
    yes_option,
)
from kvtier.client import AsyncClient
from kvtier.types import CacheInfo, RemovalReport, size
from kvtier.wire import ResetReport


@click.group()
def cache() -> None:
    """List the caches of a daemon, or remove one."""


@cache.command("ls")
@address_option
@json_option("One JSON list.")
def list_caches(daemon: DaemonAt, as_json: bool) -> None:
    """List the caches, what their bytes mean and what they were given of each tier."""
    found = daemon.ask(lambda client: client.caches())
    show(as_json, [as_object(info) for info in found], table(found))


@cache.command("rm")
@address_option
@click.argument("name")
@click.option("--force", is_flag=True, help="Although sessions have it open, or its directory is damaged.")
@dry_run_option
@yes_option
@json_option("One JSON object.")
def remove_cache(daemon: DaemonAt, name: str, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Forget the cache NAME: its blocks, its budgets and its bytes on disk.

    Refused while any session has it open, unless forced; in any case while anybody holds a lease there.
    """
    report = daemon.ask(lambda client: client.remove_cache(name, force=force, dry_run=True))
    if not dry_run:
        confirmed(f"{_gone(name, report)} would be gone for good. Go on?", yes)
        report = daemon.ask(lambda client: client.remove_cache(name, force=force))
    freed = {str(tier): nbytes for tier, nbytes in report.freed.items()}
    value = {"cache": name, "dry_run": dry_run, "blocks": report.blocks, "freed": freed}
    show(as_json, value, f"{_gone(name, report)} {'would be ' if dry_run else ''}gone")


def _gone(name: str, report: RemovalReport) -> str:
    freed = ", ".join(f"{size(nbytes)} of {tier}" for tier, nbytes in report.freed.items())
    return f"{name}: {report.blocks} blocks and {freed or 'nothing else'}"


@click.command()
@address_option
@click.argument("name", metavar="CACHE")
@click.option("--force", is_flag=True, help="Forget the rest where some blocks are leased or pinned.")
@dry_run_option
@yes_option
@json_option("One JSON object.")
def reset(daemon: DaemonAt, name: str, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Forget all blocks of CACHE, in every tier. The cache stays.

    While any block is leased or pinned nothing is forgotten, unless forced: then those stay, and what they stand on.
    """

    async def done(client: AsyncClient, *, dry_run: bool) -> ResetReport:
        return await (await client.open_cache(name, write=False)).reset(force=force, dry_run=dry_run)

    report = daemon.ask(lambda client: done(client, dry_run=True))
    if not dry_run:
        confirmed(f"{name}: forget {report.dropped} blocks ({report.kept} are leased or pinned, or stood on)?", yes)
        report = daemon.ask(lambda client: done(client, dry_run=False))
    value = {"cache": name, "dry_run": dry_run, "dropped": report.dropped, "kept": report.kept}
    would = " would be" if dry_run else ""
    show(as_json, value, f"{name}: {report.dropped} blocks{would} forgotten, {report.kept} kept")


def as_object(info: CacheInfo) -> dict[str, Any]:
    """Sizes in bytes; the specification as `model`, `dtype`, tokens a block and bytes a block of each group."""
    return {
        "cache_id": info.cache_id,
        "name": info.name,
        "model": info.spec.model,
        "dtype": info.spec.dtype,
        "tokens_per_block": info.spec.tokens_per_block,
        "rank": info.spec.rank,
        "world_size": info.spec.world_size,
        "fingerprint": info.fingerprint.hex(),
        "blocks": info.blocks,
        "sessions": info.sessions,
        "device": info.device,
        "groups": [
            {
                "group": group.group,
                "window_tokens": group.window_tokens,
                "block_bytes": info.spec.block_bytes(group.group),
                "tiers": [
                    {"tier": str(tier.tier), "slots": tier.slots, "bytes": tier.slots * tier.slot_bytes}
                    for tier in group.tiers
                ],
            }
            for group in info.groups
        ],
    }


def table(found: list[CacheInfo]) -> Table | str:
    if not found:
        return "no caches"
    columns = ("cache", "model", "group", "window", "block", "blocks", "open", "device", "host", "disk")
    rows = slim_table(columns, left=("cache", "model"))
    for info in found:
        for group in info.groups:
            tiers = {str(tier.tier): f"{tier.slots} ({size(tier.slots * tier.slot_bytes)})" for tier in group.tiers}
            rows.add_row(
                info.name,
                f"{info.spec.model} {info.spec.dtype}",
                str(group.group),
                str(group.window_tokens or ("flat" if info.spec.groups[group.group].flat else "full")),
                size(info.spec.block_bytes(group.group)),
                str(info.blocks),
                str(info.sessions),
                *(tiers.get(tier, "") for tier in ("device", "host", "disk")),
            )
    return rows
