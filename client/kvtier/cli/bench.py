"""``kvtier bench``: what a daemon costs on this machine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.table import Table

from kvtier.bench import client as client_bench
from kvtier.bench import events as events_bench
from kvtier.bench import gpu as gpu_bench
from kvtier.bench import latency as latency_bench
from kvtier.bench import reads as reads_bench
from kvtier.bench import restart as restart_bench
from kvtier.bench import scale as scale_bench
from kvtier.bench import tiers as tiers_bench
from kvtier.bench.gpu_place import SETTLED_S, Shape
from kvtier.bench.result import Result
from kvtier.bench.writer import TRAFFIC
from kvtier.cli.common import Seconds, console, json_option, run, slim_table
from kvtier.words import size

Command = TypeVar("Command", bound=Callable[..., Any])

_JSON = json_option("One list of {name, params, value, unit, floor, ratio}.")
_LEFT_OUT: Final = frozenset({"rounds", "spread", "floor_spread", "slow"})
"""Of a table: they stand in the JSON."""
_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_DISK_DIR: Final = click.option(
    "--disk-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where disk tiers go.  [default: where temporary files go]",
)


class SizeType(click.ParamType[int]):
    """Bytes, or text such as ``64KiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        digits = value.strip().rstrip("BKMGibkmg")
        factor = _UNITS.get(value.strip()[len(digits) :].upper())
        if factor is None or not digits.strip().isdigit():
            self.fail(f"{value!r} is not a size: bytes, or such as 64KiB, 1MiB, 2GiB", param, ctx)
        return int(digits) * factor


@click.group()
def bench() -> None:
    """Measure what a daemon costs on this machine, beside what the machine could do without it.

    Every figure has its floor: the same work without kvtier, measured in turn with it. The ratio is of the medians; of
    a rate the more the better, of a time the less. A private daemon is started where no address is given.
    """


def _tell(results: AsyncIterator[Result], as_json: bool) -> None:
    """What was measured before a failure is told, too: it may have taken minutes."""
    found: list[Result] = []
    try:
        run(_collect(results, found))
    finally:
        if as_json:
            click.echo(json.dumps([result.to_json() for result in found], indent=1))
        elif found:
            console().print(table(found))


async def _collect(results: AsyncIterator[Result], found: list[Result]) -> None:
    """A terminal is told what was measured last."""
    with Console(stderr=True).status("measuring") as status:
        async for result in results:
            found.append(result)
            status.update(f"{result.name}: {result.value:,.4g} {result.unit}")


def table(results: list[Result]) -> Table:
    rows = slim_table(("measured", "value", "floor", "ratio", "spread"), left=("measured",))
    rows.add_column("of")
    for result in results:
        rows.add_row(
            result.name,
            f"{result.value:,.4g} {result.unit}",
            "" if result.floor is None else f"{result.floor:,.4g}",
            "" if result.ratio is None else f"{result.ratio:.2f}",
            f"{result.params['spread']:.0%}" if "spread" in result.params else "",
            ", ".join(_shown(name, value) for name, value in result.params.items() if name not in _LEFT_OUT),
        )
    return rows


def _shown(name: str, value: Any) -> str:
    return f"{name[:-6]} {size(value)}" if name.endswith("_bytes") else f"{name} {value}"


@bench.command()
@click.option("--address", metavar="DIR", help="Of a daemon that runs, instead of a private one.")
@click.option("--block-bytes", "block_bytes", type=SizeType(), multiple=True, metavar="SIZE", help="Repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), default=40, show_default=True)
@click.option(
    "--entries", type=click.IntRange(min=reads_bench.BLOCKS), default=reads_bench.ENTRIES, help="[default: 10^6]"
)
@_JSON
def client(address: str | None, block_bytes: tuple[int, ...], rounds: int, entries: int, as_json: bool) -> None:
    """Match, store and load through the client library, 64 blocks at a time, and reads without a call.

    8,192 keys are looked up in an index of so many ENTRIES. Reads without a call want daemons of their own: none are
    measured where an address is given.
    """
    sizes = block_bytes or client_bench.Options().block_bytes
    calls = client_bench.run(client_bench.Options(sizes, rounds, address))
    reads = reads_bench.run(reads_bench.Options(sizes, rounds, entries))
    _tell(calls if address else _one_after_another(calls, reads), as_json)


async def _one_after_another(*parts: AsyncIterator[Result]) -> AsyncIterator[Result]:
    for part in parts:
        async for result in part:
            yield result


@bench.command()
@click.option("--block-bytes", "block_bytes", type=SizeType(), multiple=True, metavar="SIZE", help="Repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--disk-bytes",
    type=SizeType(),
    default=2 << 30,
    metavar="SIZE",
    help="Size of the disk tier, and of the bare file beside it. [default: 2GiB; less measures caches]",
)
@_DISK_DIR
@_JSON
def tiers(block_bytes: tuple[int, ...], rounds: int, disk_bytes: int, disk_dir: Path | None, as_json: bool) -> None:
    """Every edge of a private daemon: device, host and disk, each to each."""
    sizes = block_bytes or tiers_bench.Options().block_bytes
    _tell(tiers_bench.run(tiers_bench.Options(sizes, rounds, disk_bytes, disk_dir)), as_json)


@bench.command()
@click.option("--device", default="cuda", show_default=True, metavar="NAME", help="cuda, cuda:1 or GPU-<uuid>.")
@click.option(
    "--block-bytes", type=SizeType(), multiple=True, metavar="SIZE", help="Of blocks in one pool. Repeatable."
)
@click.option(
    "--fragment-bytes",
    type=SizeType(),
    multiple=True,
    metavar="SIZE",
    help="Of each part of blocks in 16 pools. Repeatable.",
)
@click.option(
    "--batch-bytes",
    type=SizeType(),
    default=256 << 20,
    metavar="SIZE",
    help="Moved by one call, in 8 to 1,024 blocks. [default: 256MiB]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--swaps", type=click.IntRange(min=1), default=500, show_default=True, help="Of one block of 1 MiB.")
@click.option(
    "--settle-seconds",
    "settled_s",
    type=Seconds(min=0),
    default=SETTLED_S,
    show_default=True,
    help="How long each cache is used before it is measured: its host memory is page-locked meanwhile.",
)
@_JSON
def gpu(
    device: str,
    block_bytes: tuple[int, ...],
    fragment_bytes: tuple[int, ...],
    batch_bytes: int,
    rounds: int,
    swaps: int,
    settled_s: float,
    as_json: bool,
) -> None:
    """Copies between a device tier on a GPU and the host tier of a private daemon, and what they cost kernels.

    Wants a GPU and CUDA's bindings (kvtier[cuda]); for kernels, torch with CUDA. Where pieces are small, the floor is
    as many copies as Python can ask for; bus_mib_s in the JSON is the same bytes in one piece.
    """
    chosen = [
        *(Shape(1, size) for size in block_bytes),
        *(Shape(gpu_bench.POOLS, size) for size in fragment_bytes),
    ]
    left_out: list[str] = []
    shapes = chosen or gpu_bench.SHAPES
    options = gpu_bench.Options(device, shapes, batch_bytes, rounds, swaps, settled_s, say=left_out.append)
    _tell(gpu_bench.run(options), as_json)
    for line in left_out:
        click.echo(line, err=True)


@bench.command()
@click.option(
    "--blocks",
    type=click.IntRange(min=4096),
    multiple=True,
    metavar="N",
    help="Repeatable. [default: 10^4, 10^5, 10^6]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--no-disk", is_flag=True, help="Leave out what needs a disk tier: most of the time it takes.")
@_DISK_DIR
@_JSON
def scale(blocks: tuple[int, ...], rounds: int, no_disk: bool, disk_dir: Path | None, as_json: bool) -> None:
    """What a block of 4 KiB costs among how many: in the core, through the client, in memory, and at a restart.

    The memory of a daemon is looked at once it has worked, by 30 times 1,024 blocks; what it took for that by itself,
    however many blocks come after them, is a result of its own.

    10^6 blocks take some minutes, 5 GiB of memory and as much of disk.
    """
    counts = tuple(sorted(blocks)) or scale_bench.Options().blocks
    _tell(scale_bench.run(scale_bench.Options(counts, rounds, not no_disk, disk_dir)), as_json)


@bench.command()
@click.option("--blocks", type=click.IntRange(min=64), default=100_000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@_JSON
def restart(blocks: int, rounds: int, as_json: bool) -> None:
    """Kill a supervised daemon with so many blocks of 4 KiB in host memory under a reader who looks at every byte.

    How soon the next daemon answers a call, and one about the cache; how fast was read meanwhile, and before.
    """
    _tell(restart_bench.run(restart_bench.Options(blocks, rounds)), as_json)


@bench.command()
@click.option(
    "--block-bytes", "block_bytes", type=SizeType(), default=256 << 10, metavar="SIZE", help="[default: 256KiB]"
)
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--seconds", type=Seconds(min=0.1), default=3.0, show_default=True, help="Of a round.")
@_DISK_DIR
@_JSON
def latency(block_bytes: int, rounds: int, seconds: float, disk_dir: Path | None, as_json: bool) -> None:
    """What a match waits while every edge of a private daemon is busy, and how long callbacks keep its loop."""
    _tell(latency_bench.run(latency_bench.Options(block_bytes, rounds, seconds, disk_dir)), as_json)


@bench.command()
@click.option("--watchers", type=click.IntRange(min=1, max=256), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--seconds", type=Seconds(min=0.1), default=3.0, show_default=True, help="Of half a round.")
@click.option("--chain", type=click.IntRange(1, 1024), default=256, show_default=True, help="Blocks of a put.")
@click.option(
    "--traffic",
    type=click.Choice(list(TRAFFIC)),
    multiple=True,
    help="Blocks leave by calls, and some or all of them move before; or both because tiers are full. Repeatable.  "
    "[default: each in turn]",
)
@_JSON
def events(watchers: int, rounds: int, seconds: float, chain: int, traffic: tuple[str, ...], as_json: bool) -> None:
    """What events cost a private daemon, and watchers that decode every change of blocks of 4 KiB.

    Floors are the same without watchers. It fails where a watcher misses an event, or two are told different things.
    """
    kinds = traffic or events_bench.Options().traffic
    _tell(events_bench.run(events_bench.Options(watchers, rounds, seconds, chain, kinds)), as_json)
