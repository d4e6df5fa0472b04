"""``kvtier replay``: a request trace against a daemon, every byte and every event checked."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtier import aio
from kvtier.abi.spec import CacheSpec
from kvtier.cache import Cache
from kvtier.cli.common import DaemonAt, address_option, console, json_option, run
from kvtier.errors import InvalidArgument
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.replay.runner import Report
from kvtier.replay.runner import replay as run_replay
from kvtier.replay.trace import Request, read
from kvtier.words import size

_BLOCK_BYTES_STEP = 16
_LIMITS = {"tokens_per_block": 65536, "head_size": 65536, "layers": 4096}


@dataclass(slots=True, frozen=True)
class Job:
    """What the command line asked for."""

    trace: Path
    requests: int | None
    concurrency: int
    seed: int
    cache: str
    block_bytes: int


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@address_option
@click.option("--spawn", is_flag=True, help="Start a private daemon for this replay, and stop it afterwards.")
@click.option("--device-blocks", type=click.IntRange(min=0), metavar="N", default=500, show_default=True)
@click.option("--host-blocks", type=click.IntRange(min=0), metavar="N", default=2000, show_default=True)
@click.option("--disk-blocks", type=click.IntRange(min=0), metavar="N", default=7500, show_default=True)
@click.option(
    "--block-bytes",
    type=click.IntRange(min=_BLOCK_BYTES_STEP),
    metavar="BYTES",
    default=65536,
    show_default=True,
    help=f"Size of a block, a multiple of {_BLOCK_BYTES_STEP}.",
)
@click.option(
    "--keep-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="State and disk tier of the private daemon, kept afterwards.",
)
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="Only the first N requests of the trace.")
@click.option("--concurrency", type=click.IntRange(min=1), metavar="C", default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the back-off when a tier is full.")
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
    keep_dir: Path | None,
    requests: int | None,
    concurrency: int,
    seed: int,
    cache: str,
    as_json: bool,
) -> None:
    """Replay the request TRACE: match, acquire and verify the hits, store the misses, release.

    The bytes of a block follow from its key, so every hit is verified whole. A watch rebuilds where each block is
    from the event stream alone; at the end that is compared with the daemon's own listing. Tier sizes are for
    --spawn; a daemon that runs already has its own.

    Exit status 1 where a byte was wrong, an event was lost or a residency differed.
    """
    job = Job(trace, requests, concurrency, seed, cache, block_bytes)
    sizes = TierSlots(device_blocks, host_blocks, disk_blocks) if spawn else None
    try:
        report = run(_replay(job, daemon, sizes, keep_dir))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        console().print(table(report))
    if not report.flawless:
        raise SystemExit(1)


async def _replay(job: Job, daemon: DaemonAt, sizes: TierSlots | None, keep: Path | None) -> Report:
    _end_on_sigterm()
    spec = replay_spec(job.block_bytes)
    requests = await read(job.trace, job.requests)
    async with AsyncExitStack() as stack:
        if sizes is not None:
            own = await stack.enter_async_context(PrivateDaemon(sizes.as_bytes(spec), keep=keep))
            daemon = DaemonAt(own.address)
        client = await stack.enter_async_context(await daemon.connect())
        cache = await client.open_cache(job.cache, spec)
        return await _with_progress(job, client, cache, requests)


async def _with_progress(job: Job, client: aio.AsyncClient, cache: Cache, requests: list[Request]) -> Report:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=len(requests))
        return await run_replay(
            client,
            cache,
            requests,
            concurrency=job.concurrency,
            seed=job.seed,
            progress=lambda done: bar.update(task, completed=done),
        )


def _end_on_sigterm() -> None:
    """SIGTERM unwinds like Ctrl-C, so that a private daemon never stays behind."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def replay_spec(block_bytes: int) -> CacheSpec:
    """A specification whose blocks have exactly so many bytes. Raises :class:`InvalidArgument` where there is none."""
    if block_bytes < 1 or block_bytes % _BLOCK_BYTES_STEP:
        raise InvalidArgument("block_bytes", block_bytes, f"a positive multiple of {_BLOCK_BYTES_STEP}")
    rest, factors = block_bytes, {}
    for name, limit in _LIMITS.items():
        factors[name] = next(factor for factor in range(min(rest, limit), 0, -1) if rest % factor == 0)
        rest //= factors[name]
    if rest != 1:
        raise InvalidArgument("block_bytes", block_bytes, "a size without large prime factors")
    return CacheSpec.single("kvtier-replay", "uint8", kv_heads=1, kv_factor=1, **factors)


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
    rows.add_row("", f"{report.hits_besides_first} of them on other blocks than the most asked-for one")
    rows.add_row("misses", f"{report.misses}, of which {report.stored} were stored")
    if report.unstored:
        rows.add_row("", f"{report.unstored} were not: the block before them had been evicted")
    for edge, moved in report.moves.items():
        rows.add_row(f"moved {edge.replace('>', ' → ')}", f"{moved['blocks']} blocks, {size(moved['bytes'])}")
    rows.add_row("removed", f"{report.removed} blocks")
    rows.add_row("retries", f"{report.retries} while the tier was full")
    rows.add_row("events", f"{report.events_seen} seen")
    checks = {
        "blocks with wrong bytes": report.verify_failures,
        "gaps in the events": report.event_gaps,
        "blocks not where the events say": report.residency_mismatches,
    }
    for name, count in checks.items():
        rows.add_row(name, str(count), style="bold red" if count else "green")
    return rows
