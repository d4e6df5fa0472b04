"""``kvtier replay``: replays a request trace against a daemon, and checks every byte and every event."""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
from rich.table import Table

from kvtier.cli.common import DaemonAt, address_option, cache_option, run
from kvtier.cli.options import command, output_option, requests_option, trace_argument
from kvtier.cli.output import progress_bar, show
from kvtier.errors import NotFound
from kvtier.replay.runner import ReplayReport
from kvtier.replay.runner import replay as run_replay
from kvtier.replay.trace import read, replay_spec


@command()
@trace_argument
@address_option
@click.option(
    "--block-bytes",
    type=click.IntRange(min=256),
    metavar="BYTES",
    default=65536,
    show_default=True,
    help="Size of a block, a multiple of 256.",
)
@requests_option
@cache_option(help="Use this cache, and keep it.  [default: a new cache]")
@click.option("--keep", is_flag=True, help="Do not remove the new cache at the end.")
@output_option()
def replay(
    trace: Path, daemon: DaemonAt, block_bytes: int, requests: int | None, cache: str | None, keep: bool, form: str
) -> None:
    """Replay a request trace: acquire, verify, store, release.

    Hits are acquired, misses are stored. The bytes of a block follow from its key, so every hit is verified whole. A
    mirror follows the events; at the end it is compared with the daemon's own listing. The replay has a cache of its
    own, which it removes at the end, also after Ctrl-C.

    Exit status 1 if a byte was wrong, an event was lost or a residency differed.
    """
    name = cache or f"replay-{secrets.token_hex(4)}"
    report = run(_replay(trace, daemon, requests, name, block_bytes, removed=not (cache or keep)))
    show(form, report.to_json(), table(report))
    if not report.flawless:
        raise SystemExit(1)


async def _replay(
    trace: Path, daemon: DaemonAt, limit: int | None, name: str, block_bytes: int, *, removed: bool
) -> ReplayReport:
    spec = replay_spec(block_bytes)
    requests = await read(trace, limit)
    async with await daemon.connect() as remover:
        try:
            async with await daemon.connect() as client:
                cache = await client.open_cache(name, spec)
                with progress_bar() as bar:
                    step = partial(bar.update, bar.add_task("replay", total=len(requests)))
                    return await run_replay(client, cache, requests, progress=lambda done: step(completed=done))
        finally:  # an interrupted call may have a lease, which ends with its client
            if removed:
                with suppress(NotFound):
                    await remover.remove_cache(name, force=True)
            else:
                click.echo(f"cache {name} is kept: see kvtier cache rm", err=True)


def table(report: ReplayReport) -> Table:
    rows = Table(show_header=False, box=None, padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column()
    speed = report.requests / report.seconds if report.seconds else 0.0
    rows.add_row("requests", f"{report.requests} in {report.seconds:.1f} s ({speed:.0f}/s)")
    hits = sum(report.hits.values())
    places = ", ".join(f"{tier} {count}" for tier, count in report.hits.items())
    rows.add_row("hits", f"{hits} of {report.block_refs} blocks asked for ({report.hit_ratio:.1%}): {places}")
    rows.add_row("misses", f"{report.misses}, of which {report.stored} were stored")
    checks = {
        "blocks with wrong bytes": report.verify_failures,
        "gaps in the events": report.event_gaps,
        "blocks not where the events say": report.residency_mismatches,
    }
    for name, count in checks.items():
        rows.add_row(name, str(count), style="bold red" if count else "green")
    return rows
