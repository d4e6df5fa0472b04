"""``kvtier cache``: the caches there are."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from kvtier import aio
from kvtier.cli.common import CONNECT_WAIT_S, address_option, console, json_option, run, slim_table
from kvtier.stats import CacheInfo
from kvtier.words import size


@click.group()
def cache() -> None:
    """Look at the caches of a daemon."""


@cache.command("ls")
@address_option
@json_option("One JSON list.")
def list_caches(address: str, as_json: bool) -> None:
    """List the caches, what their bytes mean and what they were given of each tier."""
    found = run(_caches(address))
    if as_json:
        click.echo(json.dumps([as_object(info) for info in found], indent=2))
    else:
        console().print(table(found))


async def _caches(address: str) -> list[CacheInfo]:
    async with await aio.connect(address, wait=CONNECT_WAIT_S) as client:
        return await client.caches()


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
    columns = ("cache", "model", "group", "window", "block", "blocks", "sessions", "device", "host", "disk")
    rows = slim_table(columns, left=("cache", "model"))
    for info in found:
        for group in info.groups:
            tiers = {str(tier.tier): f"{tier.slots} ({size(tier.slots * tier.slot_bytes)})" for tier in group.tiers}
            first = group.group == 0
            rows.add_row(
                info.name if first else "",
                f"{info.spec.model} {info.spec.dtype}" if first else "",
                str(group.group),
                str(group.window_tokens or "full"),
                size(info.spec.block_bytes(group.group)),
                str(info.blocks) if first else "",
                str(info.sessions) if first else "",
                *(tiers.get(tier, "") for tier in ("device", "host", "disk")),
            )
    return rows
