"""``kvtier bench``: compares kvtier with plain memcpy and the raw disk on this machine."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import click

from kvtier.bench import engine as engine_bench
from kvtier.bench import gpu as gpu_bench
from kvtier.bench import host
from kvtier.bench.host import Result
from kvtier.cli.common import run
from kvtier.cli.options import CommandGroup, output_option
from kvtier.cli.output import progress_bar, show, table
from kvtier.types import size

_SIZES: Final = click.option(
    "--block-bytes",
    type=click.IntRange(min=4096),
    multiple=True,
    default=(64 << 10, 256 << 10, 1 << 20),
    show_default=True,
    help="Repeatable.",
)
_ROUNDS: Final = click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)


@click.group(cls=CommandGroup)
def bench() -> None:
    """Compare kvtier with plain memcpy and the raw disk.

    Every figure is the median of rounds in a private daemon. The floor is the same work without kvtier, measured in
    alternating rounds; the ratio is value / floor. More is better for a rate, less for a time or a size.
    """


def tell(results: Coroutine[Any, Any, list[Result]], form: str) -> None:
    """Runs the measurements behind a bar, and prints all figures at the end."""
    with progress_bar() as bar:
        shown = bar.add_task("bench", total=None)
        host.on_round.set(partial(bar.update, shown))
        found = run(results)
    columns = ("measured", "of", "value", "floor", "ratio", "better is")
    text = table(columns, map(_row, found), left=("measured", "of", "better is"))
    show(form, [{**asdict(result), "ratio": result.ratio} for result in found], text)


def _row(result: Result) -> tuple[str, ...]:
    params = ", ".join(f"{name} {_shown(name, value)}" for name, value in result.params.items())
    row = (result.name, params, f"{_figure(result.value)} {result.unit}")
    if result.floor is None or result.ratio is None:
        return (*row, "", "", "")
    return (*row, _figure(result.floor), f"{result.ratio:.2f}", "more" if result.unit.endswith("/s") else "less")


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
@output_option()
def client(block_bytes: tuple[int, ...], rounds: int, form: str) -> None:
    """Fill, store and get blocks of host memory. Calls store and read 64 blocks, or one block."""
    tell(host.client(block_bytes, rounds), form)


@bench.command()
@_SIZES
@_ROUNDS
@output_option()
def tiers(block_bytes: tuple[int, ...], rounds: int, form: str) -> None:
    """Move 64 blocks between host and disk.

    The disk tier has 2 GiB, in $TMPDIR: a smaller one would measure the disk's caches.
    """
    tell(host.tiers(block_bytes, rounds, 2 << 30), form)


@bench.command()
@_ROUNDS
@output_option()
def events(rounds: int, form: str) -> None:
    """Count block changes a second, with eight watchers. The daemon makes the changes, and the watchers decode them."""
    tell(host.events(8, rounds, puts=200), form)


@bench.command()
@_ROUNDS
@output_option()
def scale(rounds: int, form: str) -> None:
    """Measure many blocks: memory, calls and a restart.

    Blocks have 4 KiB. Calls run among 10^4 and 10^6 blocks, a restart with 10^5. Takes 5 GiB of memory.
    """
    tell(host.scale((10_000, 1_000_000), rounds, 100_000), form)


@bench.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:1 or GPU-<uuid>.")
@_ROUNDS
@output_option()
def gpu(device: str, rounds: int, form: str) -> None:
    """Move blocks between a GPU and host memory. Needs CUDA's bindings (the extra `cuda`)."""
    tell(gpu_bench.gpu(device, gpu_bench.SHAPES, 256 << 20, rounds, settle_s=2.0), form)


@bench.command()
@click.option("--layers", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--block-bytes", type=click.IntRange(min=4096), default=2 << 20, show_default=True, help="In all layers.")
@_ROUNDS
@output_option()
def engine(layers: int, block_bytes: int, rounds: int, form: str) -> None:
    """Time an engine's scheduler and worker.

    A step has a prompt of 1,000 stored blocks; then 16 blocks are saved and loaded.
    """
    tell(engine_bench.engine(1000, layers, block_bytes, rounds), form)
