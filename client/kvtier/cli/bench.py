"""``kvtier bench``: compares kvtier with plain memcpy and the raw disk on this machine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table

from kvtier.abi.spec import DTYPE_BYTES
from kvtier.bench import engine as engine_bench
from kvtier.bench import gpu as gpu_bench
from kvtier.bench import host
from kvtier.bench import remote as remote_bench
from kvtier.bench.host import Result
from kvtier.cli.common import console, json_option, run, slim_table
from kvtier.types import size

_JSON: Final = json_option("One list of {name, params, value, unit, floor, ratio}.")
_ROUNDS: Final = click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
_SIZES: Final = click.option(
    "--block-bytes",
    type=click.IntRange(min=4096),
    multiple=True,
    default=(64 << 10, 256 << 10, 1 << 20),
    show_default=True,
    help="Repeatable.",
)
_DISK_DIR: Final = click.option(
    "--disk-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where disk tiers go.  [default: where temporary files go]",
)


@click.group()
def bench() -> None:
    """Compare kvtier with plain memcpy and the raw disk on this machine.

    Every figure is the median of rounds in a private daemon. Its floor, the same work without kvtier, is measured in
    turn with it; the ratio is value / floor.
    """


def tell(results: AsyncIterator[Result], as_json: bool) -> None:
    """Measures, and prints all figures at the end."""

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
@_JSON
def client(block_bytes: tuple[int, ...], rounds: int, as_json: bool) -> None:
    """Fill fresh slots, store and get 64 blocks of host memory, and look up a prefix of 8,192 keys."""
    tell(host.client(block_bytes, rounds, keys=8192), as_json)


@bench.command()
@_SIZES
@_ROUNDS
@_DISK_DIR
@_JSON
def tiers(block_bytes: tuple[int, ...], rounds: int, disk_dir: Path | None, as_json: bool) -> None:
    """Move 64 blocks between host and a disk tier of 2 GiB; a smaller one would measure the disk's caches."""
    tell(host.tiers(block_bytes, rounds, 2 << 30, disk_dir), as_json)


@bench.command()
@_ROUNDS
@_JSON
def events(rounds: int, as_json: bool) -> None:
    """Count the block changes a second that a daemon makes and eight watchers decode."""
    tell(host.events(8, rounds, puts=200), as_json)


@bench.command()
@_ROUNDS
@_DISK_DIR
@_JSON
def scale(rounds: int, disk_dir: Path | None, as_json: bool) -> None:
    """Measure what a block of 4 KiB costs among 10^4 and 10^6, and a restart with 10^5. Takes 5 GiB of memory."""
    tell(host.scale((10_000, 1_000_000), rounds, 100_000, disk_dir), as_json)


@bench.command()
@click.option("--device", default="cuda", show_default=True, metavar="NAME", help="cuda, cuda:1 or GPU-<uuid>.")
@_ROUNDS
@_JSON
def gpu(device: str, rounds: int, as_json: bool) -> None:
    """Move blocks between a GPU and host memory. Wants CUDA's bindings (kvtier[cuda])."""
    tell(gpu_bench.gpu(device, gpu_bench.SHAPES, 256 << 20, rounds, settle_s=2.0), as_json)


@bench.command()
@click.option("--url", help="A store as --remote of kvtierd names it.  [default: a temporary directory]")
@click.option(
    "--block-bytes",
    type=click.IntRange(4096, 64 << 20),
    multiple=True,
    default=(1 << 20, 4 << 20),
    show_default=True,
    help="Repeatable.",
)
@_ROUNDS
@_JSON
def remote(url: str | None, block_bytes: tuple[int, ...], rounds: int, as_json: bool) -> None:
    """Write 64 MiB of blocks through to a store, and read them by another daemon."""
    tell(remote_bench.remote(url, block_bytes, rounds), as_json)


@bench.command()
@click.option("--layers", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--kv-heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--head-size", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Of a block.")
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True)
@click.option("--blocks", type=click.IntRange(min=1), default=1000, show_default=True, help="Of the prompt of a step.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    default=(1_000, 10_000, 100_000),
    show_default=True,
    help="That the model computes of a prompt.  Repeatable.",
)
@_ROUNDS
@_JSON
def engine(blocks: int, rounds: int, as_json: bool, **shape: Any) -> None:
    """Time an engine's scheduler and worker: a step, saves and loads, and the prefix from which on a load wins."""

    async def results() -> AsyncIterator[Result]:
        async for result in engine_bench.steps(blocks, rounds):
            yield result
        async for result in engine_bench.copies(**shape, rounds=rounds):
            yield result

    tell(results(), as_json)
