"""``kvtier bench``: compares kvtier with plain memcpy and the raw disk on this machine."""

from __future__ import annotations

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
from kvtier.bench.host import Result
from kvtier.cli.common import run
from kvtier.cli.options import Group, output_option
from kvtier.cli.output import show, table
from kvtier.types import size

_OUTPUT: Final = output_option()
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


@click.group(cls=Group)
def bench() -> None:
    """Compare kvtier with plain memcpy and the raw disk.

    Every figure is the median of rounds in a private daemon. The floor is the same work without kvtier, measured in
    alternating rounds; the ratio is value / floor. More is better for a rate, less for a time or a size.
    """


def tell(results: AsyncIterator[Result], form: str) -> None:
    """Runs the measurements, and prints all figures at the end."""

    async def collect() -> list[Result]:
        return [result async for result in results]

    found = run(collect())
    show(form, [{**asdict(result), "ratio": result.ratio} for result in found], _table(found))


def _table(results: list[Result]) -> Table:
    rows = (
        (
            result.name,
            ", ".join(f"{name} {_shown(name, value)}" for name, value in result.params.items()),
            f"{_figure(result.value)} {result.unit}",
            "" if result.floor is None else _figure(result.floor),
            "" if result.ratio is None else f"{result.ratio:.2f}",
            "" if result.ratio is None else "more" if result.unit.endswith("/s") else "less",
        )
        for result in results
    )
    columns = ("measured", "of", "value", "floor", "ratio", "better is")
    return table(columns, rows, left=("measured", "of", "better is"))


def _figure(number: float) -> str:
    """Formats a number to four significant digits, or to a whole number from 1000 up."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return size(value) if name.endswith("_bytes") else f"{value:,}"


@bench.command()
@_SIZES
@_ROUNDS
@_OUTPUT
def client(block_bytes: tuple[int, ...], rounds: int, form: str) -> None:
    """Fill, store, get and look up blocks of host memory.

    Calls store and read 64 blocks, or one block; the prefix looked up has 8,192 keys.
    """
    tell(host.client(block_bytes, rounds, keys=8192), form)


@bench.command()
@_SIZES
@_ROUNDS
@_DISK_DIR
@_OUTPUT
def tiers(block_bytes: tuple[int, ...], rounds: int, disk_dir: Path | None, form: str) -> None:
    """Move 64 blocks between host and disk. The disk tier has 2 GiB: a smaller tier would measure the disk's caches."""
    tell(host.tiers(block_bytes, rounds, 2 << 30, disk_dir), form)


@bench.command()
@_ROUNDS
@_OUTPUT
def events(rounds: int, form: str) -> None:
    """Count block changes a second, with eight watchers. The daemon makes the changes, and the watchers decode them."""
    tell(host.events(8, rounds, puts=200), form)


@bench.command()
@_ROUNDS
@_DISK_DIR
@_OUTPUT
def scale(rounds: int, disk_dir: Path | None, form: str) -> None:
    """Measure many blocks: memory, calls and a restart.

    Blocks have 4 KiB. Calls run among 10^4 and 10^6 blocks, a restart with 10^5. Takes 5 GiB of memory.
    """
    tell(host.scale((10_000, 1_000_000), rounds, 100_000, disk_dir), form)


@bench.command()
@click.option("--device", default="cuda", show_default=True, metavar="NAME", help="cuda, cuda:1 or GPU-<uuid>.")
@_ROUNDS
@_OUTPUT
def gpu(device: str, rounds: int, form: str) -> None:
    """Move blocks between a GPU and host memory. Needs CUDA's bindings (kvtier[cuda])."""
    tell(gpu_bench.gpu(device, gpu_bench.SHAPES, 256 << 20, rounds, settle_s=2.0), form)


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
@_OUTPUT
def engine(blocks: int, rounds: int, form: str, **shape: Any) -> None:
    """Time an engine's scheduler and worker. Measures a step, saves, loads, and the shortest prefix worth a load."""

    async def results() -> AsyncIterator[Result]:
        async for result in engine_bench.steps(blocks, rounds):
            yield result
        async for result in engine_bench.copies(**shape, rounds=rounds):
            yield result

    tell(results(), form)
