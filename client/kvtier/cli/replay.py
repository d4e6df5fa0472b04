"""``kvtier replay``: a request trace against a daemon, with every byte and every event checked."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.cli.common import DaemonAt, address_option, console, json_option, run
from kvtier.replay.private import PrivateDaemon, TierSlots
from kvtier.replay.runner import Report
from kvtier.replay.runner import replay as run_replay
from kvtier.replay.trace import read, replay_spec
from kvtier.types import size


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@address_option
@click.option("--spawn", is_flag=True, help="Start a private daemon for this replay, and stop it afterwards.")
@click.option("--device-blocks", type=click.IntRange(min=0), metavar="N", default=500, show_default=True)
@click.option("--host-blocks", type=click.IntRange(min=0), metavar="N", default=2000, show_default=True)
@click.option("--disk-blocks", type=click.IntRange(min=0), metavar="N", default=7500, show_default=True)
@click.option(
    "--block-bytes",
    type=click.IntRange(min=256),
    metavar="BYTES",
    default=65536,
    show_default=True,
    help="Size of a block, a multiple of 256.",
)
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="Only the first N requests of the trace.")
@click.option("--concurrency", type=click.IntRange(min=1), metavar="C", default=1, show_default=True)
@click.option("--cache", metavar="NAME", default="replay", show_default=True, help="The cache to use.")
@json_option("One JSON object on standard output.")
def replay(
    trace: Path,
    daemon: DaemonAt,
    spawn: bool,
    device_blocks: int,
    host_blocks: int,
    disk_blocks: int,
    block_bytes: int,
    requests: int | None,
    concurrency: int,
    cache: str,
    as_json: bool,
) -> None:
    """Replay the request TRACE: acquire and verify the hits, store the misses, release.

    The bytes of a block follow from its key, so every hit is verified whole. A mirror follows the events; at the end
    it is compared with the daemon's own listing. Tier sizes are for --spawn; a running daemon has its own.

    Exit status 1 if a byte was wrong, an event was lost or a residency differed.
    """
    slots = TierSlots(device_blocks, host_blocks, disk_blocks) if spawn else None
    try:
        report = run(_replay(trace, daemon, slots, requests, concurrency, cache, block_bytes))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        console().print(table(report))
    if not report.flawless:
        raise SystemExit(1)


async def _replay(
    trace: Path,
    daemon: DaemonAt,
    slots: TierSlots | None,
    limit: int | None,
    concurrency: int,
    name: str,
    block_bytes: int,
) -> Report:
    task = asyncio.current_task()
    if task is not None:  # SIGTERM ends the private daemon, as Ctrl-C does
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    spec = replay_spec(block_bytes)
    requests = await read(trace, limit)
    async with AsyncExitStack() as stack:
        if slots is not None:
            own = await stack.enter_async_context(PrivateDaemon(slots.as_bytes(spec)))
            daemon = DaemonAt(own.address)
        client = await stack.enter_async_context(await daemon.connect())
        bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        shown = bar.add_task("replay", total=len(requests))
        return await run_replay(
            client,
            await client.open_cache(name, spec),
            requests,
            concurrency=concurrency,
            progress=lambda done: bar.update(shown, completed=done),
        )


def table(report: Report) -> Table:
    """The report as a person reads it."""
    rows = Table(show_header=False, box=None, padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column()
    speed = report.requests / report.seconds if report.seconds else 0.0
    rows.add_row("requests", f"{report.requests} in {report.seconds:.1f} s ({speed:.0f}/s)")
    hits = sum(report.hits.values())
    places = ", ".join(f"{tier} {count}" for tier, count in report.hits.items())
    rows.add_row("hits", f"{hits} of {report.block_refs} blocks asked for ({report.hit_ratio:.1%}): {places}")
    rows.add_row("misses", f"{report.misses}, of which {report.stored} were stored")
    for edge, moved in report.moves.items():
        rows.add_row(f"moved {edge.replace('>', ' → ')}", f"{moved['blocks']} blocks, {size(moved['bytes'])}")
    rows.add_row("removed", f"{report.removed} blocks")
    rows.add_row("retries", f"{report.retries} while the tier was full")
    checks = {
        "blocks with wrong bytes": report.verify_failures,
        "gaps in the events": report.event_gaps,
        "blocks not where the events say": report.residency_mismatches,
    }
    for name, count in checks.items():
        rows.add_row(name, str(count), style="bold red" if count else "green")
    return rows
