"""``kvtier remote``: maintenance of the remote store."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import click

from kvtier.cli.common import DaemonAt, address_option, confirmed
from kvtier.cli.options import CommandGroup, dry_run_option, output_option, seconds_of, size_of, yes_option
from kvtier.cli.output import show
from kvtier.client import AsyncClient
from kvtier.types import RemoteGcReport, size


@click.group(cls=CommandGroup)
def remote() -> None:
    """Clean up the shared store, like S3 or a directory."""


@remote.command()
@address_option
@click.option("--cache", "caches", multiple=True, metavar="NAME", help="Only blocks of this cache. Repeatable.")
@click.option("--older-than", type=seconds_of, metavar="AGE", help="Delete what was written longer ago, such as 7d.")
@click.option(
    "--keep-bytes",
    type=size_of,
    metavar="SIZE",
    help="Of the rest, delete the least recently used beyond this size.",
)
@dry_run_option
@yes_option
@output_option()
def gc(daemon: DaemonAt, dry_run: bool, yes: bool, form: str, **wanted: Any) -> None:
    """Delete blocks of the store by age and by use.

    Deletes blocks of every daemon. The last use of a block is its write, by any daemon, or a later fetch by this
    daemon. The daemon remembers fetches of 32,768 blocks, until it restarts. Objects whose names are not kvtier's
    stay.
    """
    if wanted["older_than"] is None and wanted["keep_bytes"] is None:
        raise click.UsageError("say what goes: --older-than, --keep-bytes, or both")

    async def done(client: AsyncClient, *, dry_run: bool) -> RemoteGcReport:
        return await client.remote_gc(**wanted, dry_run=dry_run)

    if not dry_run and not yes:  # a dry run takes time: only the question needs it
        report = daemon.ask(partial(done, dry_run=True))
        confirmed(f"{_blocks(report.objects, report.bytes)} would be gone for good. Go on?", yes)
    report = daemon.ask(partial(done, dry_run=dry_run))
    value = {"caches": list(wanted["caches"]), "dry_run": dry_run, **dataclasses.asdict(report)}
    gone = f"{_blocks(report.objects, report.bytes)} {'would be ' if dry_run else ''}gone"
    show(form, value, f"{gone}, {_blocks(report.kept_objects, report.kept_bytes)} kept")


def _blocks(count: int, nbytes: int) -> str:
    return f"{count} blocks ({size(nbytes)})"
