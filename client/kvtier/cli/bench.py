"""``kvtier bench``: compares kvtier with plain memcpy and the raw disk on this machine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table

from kvtier.bench import gpu as gpu_bench
from kvtier.bench import host
from kvtier.bench.host import Result
from kvtier.cli.common import console, json_option, run, slim_table
from kvtier.types import size

_JSON: Final = json_option("One list of {name, params, value, unit, floor, ratio}.")
_ROUNDS: Final = click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
_SIZES: Final = click.option(
    "--block-bytes", type=click.IntRange(min=4096), multiple=True, help="Repeatable.  [default: 64, 256 KiB and 1 MiB]"
)
_DISK_DIR: Final = click.option(
    "--disk-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where disk tiers go.  [default: where temporary files go]",
)
_DEFAULT_SIZES: Final = (64 << 10, 256 << 10, 1 << 20)


@click.group()
def bench() -> None:
    """Compare kvtier with plain memcpy and the raw disk on this machine.

    Every figure is the median of rounds in a private daemon. Its floor, the same work without kvtier, is measured in
    turn with it; the ratio is value / floor.
    """


def _tell(results: AsyncIterator[Result], as_json: bool) -> None:
    async def collect() -> list[Result]:
        return [result async for result in results]

    found = run(collect())
    if as_json:
        click.echo(json.dumps([{**asdict(result), "ratio": result.ratio} for result in found], indent=1))
    else:
        console().print(_table(found))


def _table(results: list[Result]) -> Table:
    rows = slim_table(("measured", "of", "value", "floor", "ratio"), left=("measured", "of"))
    for result in results:
        rows.add_row(
            result.name,
            ", ".join(f"{name} {_shown(name, value)}" for name, value in result.params.items()),
            f"{result.value:,.4g} {result.unit}",
            "" if result.floor is None else f"{result.floor:,.4g}",
            "" if result.ratio is None else f"{result.ratio:.2f}",
        )
    return rows


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return size(value) if name.endswith("_bytes") else f"{value:,}"


@bench.command()
@_SIZES
@_ROUNDS
@click.option("--keys", type=click.IntRange(min=64), default=8192, show_default=True, help="Of the prefix length.")
@_JSON
def client(block_bytes: tuple[int, ...], rounds: int, keys: int, as_json: bool) -> None:
    """Store and get 64 blocks of host memory, and look up a long prefix."""
    _tell(host.client(block_bytes or _DEFAULT_SIZES, rounds, keys), as_json)


@bench.command()
@_SIZES
@_ROUNDS
@click.option(
    "--disk-bytes",
    type=click.IntRange(min=1 << 20),
    default=2 << 30,
    show_default=True,
    help="Of the disk tier, and of the raw file. Less than 2 GiB measures the disk's caches.",
)
@_DISK_DIR
@_JSON
def tiers(block_bytes: tuple[int, ...], rounds: int, disk_bytes: int, disk_dir: Path | None, as_json: bool) -> None:
    """Move 64 blocks between device, host and disk."""
    _tell(host.tiers(block_bytes or _DEFAULT_SIZES, rounds, disk_bytes, disk_dir), as_json)


@bench.command()
@click.option("--watchers", type=click.IntRange(min=1, max=64), default=8, show_default=True)
@_ROUNDS
@click.option("--puts", type=click.IntRange(min=4), default=200, show_default=True, help="Of 256 blocks, a round.")
@_JSON
def events(watchers: int, rounds: int, puts: int, as_json: bool) -> None:
    """Count the block changes a second that a daemon makes and its watchers decode."""
    _tell(host.events(watchers, rounds, puts), as_json)


@bench.command()
@click.option("--blocks", type=click.IntRange(min=10_000), multiple=True, help="Repeatable.  [default: 10^4 and 10^6]")
@_ROUNDS
@click.option("--on-disk", type=click.IntRange(min=1024), default=100_000, show_default=True, help="At the restart.")
@_DISK_DIR
@_JSON
def scale(blocks: tuple[int, ...], rounds: int, on_disk: int, disk_dir: Path | None, as_json: bool) -> None:
    """Measure what a block of 4 KiB costs among how many, and a restart. 10^6 blocks take 5 GiB of memory."""
    _tell(host.scale(sorted(blocks) or (10_000, 1_000_000), rounds, on_disk, disk_dir), as_json)


@bench.command()
@click.option("--device", default="cuda", show_default=True, metavar="NAME", help="cuda, cuda:1 or GPU-<uuid>.")
@click.option("--shape", type=(int, int), multiple=True, metavar="POOLS BYTES", help="Of a block. Repeatable.")
@click.option("--batch-bytes", type=click.IntRange(min=1), default=256 << 20, show_default=True, help="Of a move.")
@_ROUNDS
@click.option("--settle-seconds", type=click.FloatRange(min=0), default=2.0, show_default=True)
@_JSON
def gpu(
    device: str,
    shape: tuple[tuple[int, int], ...],
    batch_bytes: int,
    rounds: int,
    settle_seconds: float,
    as_json: bool,
) -> None:
    """Move blocks between a GPU and host memory. Wants CUDA's bindings (kvtier[cuda])."""
    _tell(gpu_bench.gpu(device, shape or gpu_bench.SHAPES, batch_bytes, rounds, settle_seconds), as_json)
