"""``kvtier cache`` and ``kvtier reset``: lists, creates, removes and empties caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.cli.common import DaemonAt, address_option, cache_names, confirmed
from kvtier.cli.options import CommandGroup, command, dry_run_option, output_option, size_of, yes_option
from kvtier.cli.output import KEPT, compact, nonzero, show, table
from kvtier.client import AsyncClient
from kvtier.types import TIERS, CacheInfo, GroupInfo, RemovalReport, Tier, size
from kvtier.wire import ResetReport


@click.group(cls=CommandGroup)
def cache() -> None:
    """List, create, resize or remove caches of a daemon."""


@cache.command("ls")
@address_option
@output_option()
def list_caches(daemon: DaemonAt, form: str) -> None:
    """List the caches and their bytes in each tier."""
    found = daemon.ask(lambda client: client.caches())
    absent = [f"\ncache {info.name} is not served: {info.not_served}" for info in found if info.not_served]
    show(form, [as_object(info) for info in found], Group(_table(found), *absent))


@cache.command("create")
@address_option
@click.argument("name")
@click.option("--block-bytes", type=size_of, metavar="SIZE", default="64KiB", show_default=True, help="Of a block.")
@click.option("--device-bytes", type=size_of, metavar="SIZE", help="Of the device tier.")
@click.option("--host-bytes", type=size_of, metavar="SIZE", help="Of the host tier.")
@click.option("--disk-bytes", type=size_of, metavar="SIZE", help="Of the disk tier.")
@output_option()
def create_cache(daemon: DaemonAt, name: str, block_bytes: int, form: str, **sizes: int | None) -> None:
    """Create a cache of plain blocks, for `kvtier put` and `get`.

    The blocks have no parents. Without sizes the cache gets the daemon's default budgets. Engines create their own
    caches.
    """
    budgets = {tier: nbytes for tier in TIERS if (nbytes := sizes[f"{tier}_bytes"]) is not None}
    group = WindowGroupSpec(pools=(PoolSpec.opaque(block_bytes),), flat=True)
    spec = CacheSpec("kvtier-plain", "uint8", tokens_per_block=1, groups=(group,))

    async def created(client: AsyncClient) -> CacheInfo:
        if any(info.name == name for info in await client.caches()):
            raise click.ClickException(f"cache {name} exists already: see kvtier cache ls, or remove it first")
        return (await client.open_cache(name, spec, budgets=budgets or None)).info

    info = daemon.ask(created)
    slots = ", ".join(f"{tier.slots} in {tier.tier}" for tier in info.groups[0].tiers)
    show(form, as_object(info), f"{name}: room for blocks of {size(block_bytes)}: {slots}")


@cache.command("rm")
@address_option
@click.argument("name", shell_complete=cache_names)
@click.option("--force", is_flag=True, help="Although sessions have it open, or its directory is damaged.")
@dry_run_option
@yes_option
@output_option()
def remove_cache(daemon: DaemonAt, name: str, force: bool, dry_run: bool, yes: bool, form: str) -> None:
    """Remove a cache: its blocks, its budgets and its bytes on disk.

    Refused while any session has the cache open, unless forced. Always refused while a lease in the cache exists.
    """
    report = daemon.ask(lambda client: client.remove_cache(name, force=force, dry_run=True))
    if not dry_run:
        confirmed(f"{_gone(name, report)} would be gone for good. Go on?", yes)
        report = daemon.ask(lambda client: client.remove_cache(name, force=force))
    freed = {str(tier): nbytes for tier, nbytes in report.freed.items()}
    value = {"cache": name, "dry_run": dry_run, "blocks": report.blocks, "freed": freed}
    text = f"{_gone(name, report)} {'would be ' if dry_run else ''}gone"
    show(form, value | {"kept_in_store": report.kept_in_store}, text + KEPT * report.kept_in_store)


@cache.command("resize")
@address_option
@click.argument("name", shell_complete=cache_names)
@click.option("--device", type=size_of, metavar="SIZE", help="Of the device tier.")
@click.option("--host", type=size_of, metavar="SIZE", help="Of the host tier.")
@click.option("--disk", type=size_of, metavar="SIZE", help="Of the disk tier.")
@output_option()
def resize_cache(daemon: DaemonAt, name: str, form: str, **sizes: int | None) -> None:
    """Change the budgets of a cache, without a restart.

    Blocks that still fit stay. Clients of the cache attach again: their calls wait, and their leases are lost.
    """
    budgets = {tier: nbytes for tier in TIERS if (nbytes := sizes[str(tier)]) is not None}
    if not budgets:
        raise click.UsageError("name a size: --device, --host or --disk")
    report = daemon.ask(lambda client: client.resize_cache(name, budgets=budgets))
    text = f"{name}: resized in {report.took_s:.2f} s; calls waited at most {report.stalled_s:.2f} s"
    show(form, {"cache": name, **asdict(report)}, f"{text}; {report.evicted} blocks did not fit")


def _gone(name: str, report: RemovalReport) -> str:
    freed = ", ".join(f"{size(nbytes)} of {tier}" for tier, nbytes in report.freed.items())
    return f"{name}: {report.blocks} blocks and {freed or 'nothing else'}"


@command()
@address_option
@click.argument("name", metavar="CACHE", shell_complete=cache_names)
@click.option("--force", is_flag=True, help="Forget the rest where some blocks are leased or pinned.")
@dry_run_option
@yes_option
@output_option()
def reset(daemon: DaemonAt, name: str, force: bool, dry_run: bool, yes: bool, form: str) -> None:
    """Forget all blocks of a cache, but not the cache.

    Forgets nothing while any block is leased or pinned, unless forced: then these blocks and their ancestors stay.
    """

    async def done(client: AsyncClient, *, dry_run: bool) -> ResetReport:
        return await (await client.open_cache(name, write=False)).reset(force=force, dry_run=dry_run)

    report = daemon.ask(lambda client: done(client, dry_run=True))
    if not dry_run:
        confirmed(f"{name}: forget {report.dropped} blocks ({report.kept} are leased or pinned, or stood on)?", yes)
        report = daemon.ask(lambda client: done(client, dry_run=False))
    value = {"cache": name, "dry_run": dry_run, "dropped": report.dropped, "kept": report.kept}
    text = f"{name}: {report.dropped} blocks{' would be' if dry_run else ''} forgotten, {report.kept} kept"
    show(form, value | {"kept_in_store": report.kept_in_store}, text + KEPT * report.kept_in_store)


def as_object(info: CacheInfo) -> dict[str, Any]:
    """Converts a cache for JSON, with sizes in bytes. Includes the specification's model, dtype and block sizes."""
    own = ("cache_id", "name", "blocks", "sessions", "idle_s", "last_user", "device", "not_served")
    of_spec = ("model", "dtype", "tokens_per_block", "rank", "world_size")
    return {
        **{name: getattr(info, name) for name in own},
        **{name: getattr(info.spec, name) for name in of_spec},
        "fingerprint": info.fingerprint.hex(),
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


def _table(found: list[CacheInfo]) -> Table | str:
    rows: list[Sequence[RenderableType]] = [
        (
            info.name,
            _window(info, group.group),
            str(info.blocks),
            nonzero(info.sessions),
            "" if info.sessions else str(timedelta(seconds=info.idle_s)),
            info.last_user,
            compact(info.spec.block_bytes(group.group)),
            *(_bytes(group, tier) for tier in TIERS),
            f"{info.spec.model} {info.spec.dtype}",
        )
        for info in found
        for group in info.groups
    ]
    columns = ("cache", "window", "blocks", "open", "idle", "last user", "block", *map(str, TIERS), "model")
    return table(columns, rows, left=("cache", "model"), clip="model") if rows else "no served caches that you may see"


def _window(info: CacheInfo, group: int) -> str:
    spec = info.spec.groups[group]
    return "flat" if spec.flat else nonzero(spec.window_tokens)


def _bytes(group: GroupInfo, tier: Tier) -> str:
    return next((compact(each.slots * each.slot_bytes) for each in group.tiers if each.tier is tier), "")
