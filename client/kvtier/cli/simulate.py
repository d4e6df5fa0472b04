"""``kvtier simulate``: runs a request trace through the daemon's core, without a daemon and without bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table

from kvtier.cli.common import run
from kvtier.cli.options import CommandGroup, output_option, requests_option, trace_argument
from kvtier.cli.output import progress_bar, show, table
from kvtier.errors import InvalidArgument
from kvtier.replay.trace import arrivals, key_of, read
from kvtier.types import Tier, size

if TYPE_CHECKING:
    from kvtierd.simulate.fleet import FleetReport

_MOST_HOSTS: Final = 64


@click.group(cls=CommandGroup)
def simulate() -> None:
    """Run a request trace through the daemon's core alone.

    Starts no daemon and copies no bytes. A run takes seconds.
    """


def _counts(text: str, most: int | None = None) -> tuple[int, ...]:
    """Numbers separated by commas. A type of options."""
    within: click.ParamType[int] = click.IntRange(1, most)
    return tuple(within(part) for part in text.split(","))


def _shares(text: str) -> dict[str, float]:
    """Shares of requests by the kind of hint. A type of options."""
    pairs = [part.partition("=") for part in text.split(",")]
    if unknown := sorted({kind for kind, _, _ in pairs} - {"ends", "returns"}):
        raise click.BadParameter(f"{unknown[0]!r} is no kind of hint: ends or returns")
    within: click.ParamType[float] = click.FloatRange(0, 1)
    return {kind: within(number) for kind, _, number in pairs}


@simulate.command()
@trace_argument
@click.option(
    "--hosts",
    type=lambda text: _counts(text, _MOST_HOSTS),
    metavar="N,...",
    default="1,2,4,8,16,32,64",
    show_default=True,
    help=f"Sizes of the fleet, each up to {_MOST_HOSTS}.",
)
@click.option("--slots", type=click.IntRange(min=1), default=2000, show_default=True, help="Host blocks of each host.")
@click.option("--disk-slots", type=click.IntRange(min=0), default=0, show_default=True, help="Disk blocks likewise.")
@click.option("--router", type=click.Choice(["prefix", "round-robin"]), default="prefix", show_default=True)
@click.option(
    "--remote",
    type=click.Choice(["none", "evict", "second_use", "through"]),
    default="none",
    show_default=True,
    help="What goes to a remote store: what leaves a host, what a host found again, or everything.",
)
@click.option("--peers/--no-peers", default=False, show_default=True, help="Hosts fetch blocks from each other.")
@click.option(
    "--block-bytes", type=click.IntRange(min=1), metavar="BYTES", default=1 << 20, show_default=True, help="Of a block."
)
@requests_option
@output_option()
def fleet(
    trace: Path,
    hosts: tuple[int, ...],
    slots: int,
    disk_slots: int,
    router: str,
    remote: str,
    peers: bool,
    block_bytes: int,
    requests: int | None,
    form: str,
) -> None:
    """Send the request TRACE through a router to fleets of several sizes.

    Each host is a real core with its own tiers. A request acquires the blocks that its host has, fetches the next ones
    from peers and the remote store, and stores the rest. A second row shows one host with the memory of all hosts and
    no store.

    A prompt longer than --slots is cut. The prefix router takes the host with the longest known prefix, unless this
    host has much more load than the least loaded host.
    """
    from kvtierd.simulate.fleet import FleetShape, policy_of, simulate  # nothing else here needs the daemon

    chains = run(_chains(trace, requests))
    tiers = {Tier.HOST: slots} | ({Tier.DISK: disk_slots} if disk_slots else {})
    reports: dict[str, FleetReport] = {}
    with progress_bar() as bar:
        for count in hosts:
            shape = FleetShape(count, tiers, router, policy_of(remote), peers)
            reports[str(count)] = simulate(shape, bar.track(chains, description=f"hosts: {count}"))
            if count > 1:
                name = f"one with the memory of {count}"
                reports[name] = simulate(shape.pooled(), bar.track(chains, description=f"hosts: {name}"))
    rows = [
        {
            "hosts": name,
            **asdict(report),
            "put_bytes": report.put * block_bytes,
            "read_bytes": report.remote * block_bytes,
        }
        for name, report in reports.items()
    ]
    show(form, rows, _table(reports, block_bytes))


@simulate.command()
@trace_argument
@click.option(
    "--slots",
    type=_counts,
    metavar="N,...",
    default="1000,2000,5000,10000,20000",
    show_default=True,
    help="Host blocks, of one host after another.",
)
@click.option(
    "--hints",
    type=_shares,
    metavar="ends=SHARE,returns=SHARE",
    help="After this share of the requests, tell the ends of blocks and when others return, wrong by a factor up to e.",
)
@requests_option
@output_option()
def policy(
    trace: Path, slots: tuple[int, ...], hints: dict[str, float] | None, requests: int | None, form: str
) -> None:
    """Send the request TRACE to one host under each eviction policy.

    The policy belady knows the future: no other policy finds more. A prompt longer than the host is cut.
    """
    from kvtierd.simulate.policy import POLICIES, Oracle, blocks_found  # nothing else here needs the daemon

    chains, oracle = run(_chains(trace, requests)), Oracle(**hints) if hints else None
    times = run(arrivals(trace, requests))
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        for count, name in bar.track(list(product(slots, POLICIES)), description="hosts"):
            found = blocks_found(name, {Tier.HOST: count}, chains, times, oracle)
            asked = sum(min(len(chain), count) for chain in chains)
            rows.append({"slots": count, "policy": name, "asked": asked, "found": found})
    shown = []
    for row in rows:
        lru = next(other["found"] for other in rows if (other["slots"], other["policy"]) == (row["slots"], "lru"))
        ratio, to_lru = row["found"] / (row["asked"] or 1), row["found"] / (lru or 1) - 1
        shown.append((f"{row['slots']:,}", row["policy"], f"{ratio:.3f}", f"{to_lru:+.1%}" if lru else ""))
    show(form, rows, table(("slots", "policy", "hit ratio", "to lru"), shown, left=("policy",)))


async def _chains(trace: Path, limit: int | None) -> list[list[bytes]]:
    """Returns the keys of every request's blocks. Raises InvalidArgument if a line cannot be read, or a block follows
    different blocks in different places."""
    requests = await read(trace, limit)
    parents: dict[int, int | None] = {}
    for line, request in enumerate(requests, start=1):
        for block, parent in zip(request, (None, *request), strict=False):
            if parents.setdefault(block, parent) != parent:
                raise InvalidArgument(f"{trace}:{line}: hash_ids", block, "an id that always follows the same id")
    keys = {block: key_of(block) for block in parents}
    return [[keys[block] for block in request] for request in requests]


def _table(reports: Mapping[str, FleetReport], block_bytes: int) -> Table:
    """Ratios are shares of the blocks asked for. ``busiest``: requests of the busiest host divided by the mean."""
    columns = ("hosts", "hit ratio", "local", "peers", "remote", "put", "read", "evictions", "busiest")
    rows = []
    for name, report in reports.items():
        places = (report.local, report.peers, report.remote)
        shares = [f"{blocks / (report.asked or 1):.3f}" for blocks in (sum(places), *places)]
        moved = [size(blocks * block_bytes) for blocks in (report.put, report.remote)]
        rows.append((name, *shares, *moved, f"{report.evicted:,}", f"{report.busiest:.2f}"))
    return table(columns, rows, left=("hosts",))
