"""``kvtier bench``: compares kvtier with plain memcpy and the raw disk on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import wraps
from typing import Any, Final, TypeAlias

import click

from kvtier.abi.spec import DTYPE_BYTES
from kvtier.bench import engine as engine_bench
from kvtier.bench import gpu as gpu_bench
from kvtier.bench import host
from kvtier.bench.host import Result
from kvtier.cli.common import run
from kvtier.cli.options import CommandGroup, output_option
from kvtier.cli.output import show, table
from kvtier.types import size

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

_COUNT: Final = click.IntRange(min=1)
_SIZES: Final = click.option(
    "--block-bytes",
    type=click.IntRange(min=4096),
    multiple=True,
    default=(64 << 10, 256 << 10, 1 << 20),
    show_default=True,
    help="Repeatable.",
)


@click.group(cls=CommandGroup)
def bench() -> None:
    """Compare kvtier with plain memcpy and the raw disk.

    Every figure is the median of rounds in a private daemon. The floor is the same work without kvtier, measured in
    alternating rounds; the ratio is value / floor. More is better for a rate, less for a time or a size.
    """


def measurement(*options: Option) -> Callable[[Callable[..., AsyncIterator[Result]]], click.Command]:
    """Makes a command of the group with these options, ``--rounds`` and ``--output``."""
    rounds = click.option("--rounds", type=_COUNT, default=20, show_default=True)
    added: list[Option] = [output_option(), rounds, *reversed(options)]

    def decorate(measure: Callable[..., AsyncIterator[Result]]) -> click.Command:
        @wraps(measure)
        def measured(form: str, **given: Any) -> None:
            tell(measure(**given), form)

        command: Callable[..., Any] = measured
        for option in added:
            command = option(command)
        return bench.command()(command)

    return decorate


def tell(results: AsyncIterator[Result], form: str) -> None:
    """Runs the measurements, and prints all figures at the end."""

    async def collect() -> list[Result]:
        return [result async for result in results]

    found = run(collect())
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


@measurement(_SIZES)
def client(block_bytes: tuple[int, ...], rounds: int) -> AsyncIterator[Result]:
    """Fill, store, get and look up blocks of host memory.

    Calls store and read 64 blocks, or one block; the prefix looked up has 8,192 keys.
    """
    return host.client(block_bytes, rounds, keys=8192)


@measurement(_SIZES)
def tiers(block_bytes: tuple[int, ...], rounds: int) -> AsyncIterator[Result]:
    """Move 64 blocks between host and disk.

    The disk tier has 2 GiB, in $TMPDIR: a smaller one would measure the disk's caches.
    """
    return host.tiers(block_bytes, rounds, 2 << 30)


@measurement()
def events(rounds: int) -> AsyncIterator[Result]:
    """Count block changes a second, with eight watchers. The daemon makes the changes, and the watchers decode them."""
    return host.events(8, rounds, puts=200)


@measurement()
def scale(rounds: int) -> AsyncIterator[Result]:
    """Measure many blocks: memory, calls and a restart.

    Blocks have 4 KiB. Calls run among 10^4 and 10^6 blocks, a restart with 10^5. Takes 5 GiB of memory.
    """
    return host.scale((10_000, 1_000_000), rounds, 100_000)


@measurement(click.option("--device", default="cuda", show_default=True, help="cuda, cuda:1 or GPU-<uuid>."))
def gpu(device: str, rounds: int) -> AsyncIterator[Result]:
    """Move blocks between a GPU and host memory. Needs CUDA's bindings (kvtier[cuda])."""
    return gpu_bench.gpu(device, gpu_bench.SHAPES, 256 << 20, rounds, settle_s=2.0)


@measurement(
    click.option("--layers", type=_COUNT, default=32, show_default=True),
    click.option("--kv-heads", type=_COUNT, default=8, show_default=True),
    click.option("--head-size", type=_COUNT, default=128, show_default=True),
    click.option("--tokens", type=_COUNT, default=16, show_default=True, help="Tokens of a block."),
    click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True),
    click.option("--blocks", type=_COUNT, default=1000, show_default=True, help="Blocks of the prompt of a step."),
    click.option(
        "--tokens-per-second",
        type=click.FloatRange(min=0, min_open=True),
        multiple=True,
        default=(1_000, 10_000, 100_000),
        show_default=True,
        help="Prompt tokens that the model computes in a second.  Repeatable.",
    ),
)
async def engine(blocks: int, rounds: int, **shape: Any) -> AsyncIterator[Result]:
    """Time an engine's scheduler and worker. Measures a step, saves, loads, and the shortest prefix worth a load."""
    for results in (engine_bench.steps(blocks, rounds), engine_bench.copies(**shape, rounds=rounds)):
        async for result in results:
            yield result
