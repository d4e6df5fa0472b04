"""Real traffic through kvtier and its peers: the same trace, bytes and checks, in turn.

    python -m benchmarks.replay conversation_trace.jsonl [--peers PYTHON --path FOLDER --path FOLDER] [--rounds 5]

A request looks its prefix up, loads what is there and stores the rest. An engine is new in each round and has a
process of its own; the order rotates. Its memory is filled once before, and emptied, unless ``--cold``. Only the three
verbs are timed: rows are filled from a random pattern before a store, and compared with it after a load, outside of the
clock, for all alike. Mooncake tells of blocks that it has no room for: ``mooncake-insisting`` repeats their store for
up to 15 s. ``faults``: page faults that the engine's servers took inside of the clock. ``raw``: a file on the same
disk, written past the page cache just before.

The peers' interpreter, as ``make test-engines`` makes it, wants torch, numpy and beside them in folders of their own:
``pip install --no-deps -t FOLDER mooncake-transfer-engine-non-cuda==0.3.13.post1`` and
``pip install --no-deps -t FOLDER lmcache==0.5.6 sortedcontainers==2.4.0``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from benchmarks.replay_engines import ENGINES, LIMIT_S, Job, Prompt, Record
from kvtier.replay.trace import read

ROOT: Final = Path(__file__).parents[1]
_RAW_BYTES: Final = 1 << 30
_RAW_CALL: Final = 8 << 20


@dataclass(slots=True, frozen=True)
class Row:
    """``memory`` and ``disk`` in blocks; ``share``: of the trace's requests; ``pace``: see :class:`Job`."""

    block_kib: int
    memory: int
    disk: int
    share: float = 1.0
    pace: float = 0.0

    def __str__(self) -> str:
        size = f"{self.block_kib} KiB" if self.block_kib < 1024 else f"{self.block_kib >> 10} MiB"
        place = f"{self.memory:,} blocks over {self.disk:,}" if self.disk else "in memory"
        return f"{size}, {place}" + (f", {self.pace:g} requests a second" if self.pace else "")


ROWS: Final[Mapping[str, Row]] = {
    "64k-disk": Row(64, 2_000, 24_000),
    "256k-disk": Row(256, 2_000, 24_000, 0.5),
    "1m-disk": Row(1024, 800, 9_000, 0.3),
    "256k-disk-20": Row(256, 2_000, 24_000, 0.5, 20.0),
    "256k-disk-40": Row(256, 2_000, 24_000, 0.5, 40.0),
    "64k": Row(64, 28_000, 0),
    "256k": Row(256, 15_500, 0, 0.5),
    "1m": Row(1024, 10_000, 0, 0.3),
}
"""Both peers evict before their memory is full: where all stays in memory, a quarter more than needed is there."""


@dataclass(slots=True, frozen=True)
class Interpreter:
    """``folders``: of packages, before its own."""

    python: str
    folders: Sequence[str]

    def replay(self, job: Job, prompts: Sequence[Prompt]) -> Record:
        """Raises RuntimeError if the engine fails."""
        done = subprocess.run(
            [self.python, ROOT / "benchmarks/replay_engines.py"],
            input=f"{json.dumps(asdict(job))}\n{json.dumps(prompts)}\n",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(self.folders)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{job.engine} failed:\n{done.stderr[-4000:]}")
        return Record(**json.loads(done.stdout))


OURS: Final = Interpreter(sys.executable, [str(ROOT / "client"), str(ROOT / "daemon")])


@dataclass(slots=True, frozen=True)
class Result:
    """One replay. ``raw``: bytes a second that the disk took shortly before, 0 without a disk."""

    requests: int
    record: Record
    raw: float

    def put_ms(self, percent: int) -> float:
        return _percentile([seconds * 1e3 for seconds, _ in self.record.stores], percent)

    def put_ratio(self) -> float:
        """p99 of its median, for the time that a block takes."""
        each = [seconds / blocks for seconds, blocks in self.record.stores]
        return _percentile(each, 99) / _percentile(each, 50)

    def written(self) -> float:
        """Of what the disk takes: bytes to disk from the first ones to the last request."""
        rising = [each for each in self.record.written if each[1] > _RAW_CALL]
        if not self.raw or len(rising) < 2:
            return 0.0
        (began, before), (ended, after) = rising[0], rising[-1]
        return (after - before) / (ended - began) / self.raw


def _percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


COLUMNS: Final[Mapping[str, tuple[Callable[[Result], float], str]]] = {
    "requests a second": (lambda result: result.requests / result.record.seconds, ".0f"),
    "hits": (lambda result: result.record.loaded / result.record.asked, ".3f"),
    "faults": (lambda result: result.record.faults, ",.0f"),
    "request p50, ms": (lambda result: _percentile([each * 1e3 for each in result.record.requests], 50), ".2f"),
    "request p99, ms": (lambda result: _percentile([each * 1e3 for each in result.record.requests], 99), ".1f"),
    "put p50, ms": (lambda result: result.put_ms(50), ".2f"),
    "put p99, ms": (lambda result: result.put_ms(99), ".1f"),
    "a block's p99 of p50": (Result.put_ratio, ".1f"),
    "raw MB/s": (lambda result: result.raw / 1e6, ".0f"),
    "written, of raw": (Result.written, ".2f"),
}


def table(results: Mapping[tuple[Row, str], Sequence[Result]]) -> str:
    """In Markdown: medians, and the wrong blocks of all rounds."""
    titles = ("row", "engine", "rounds", "wrong", *COLUMNS)
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for (row, name), each in results.items():
        figures = (format(median(map(figure, each)), form) for figure, form in COLUMNS.values())
        wrong = sum(result.record.wrong for result in each)
        lines.append(
            f"| {row}, {each[0].requests:,} requests | {name} | {len(each)} | {wrong} | {' | '.join(figures)} |"
        )
    return "\n".join(lines)


def raw_rate(home: Path) -> float:
    """Bytes a second of a sequential write of new blocks, 8 MiB and one ``fdatasync`` at a time."""
    with tempfile.NamedTemporaryFile(dir=home) as file, mmap.mmap(-1, _RAW_CALL) as block:
        os.posix_fallocate(file.fileno(), 0, _RAW_BYTES)
        block[:] = os.urandom(_RAW_CALL)
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        began = time.perf_counter()
        for place in range(0, _RAW_BYTES, _RAW_CALL):
            os.pwrite(fd, block, place)
            os.fdatasync(fd)
        seconds = time.perf_counter() - began
        os.close(fd)
    return _RAW_BYTES / seconds


def measure(
    interpreters: Mapping[str, Interpreter], row: Row, prompts: Sequence[Prompt], home: Path, turn: int, *, warm: bool
) -> dict[str, Result]:
    """One round of one row: each engine once, beginning with the one of that number."""
    prompts = prompts[: max(2, int(len(prompts) * row.share))]
    longest, distinct = max(map(len, prompts)), 1 + max(map(max, prompts))
    raw = raw_rate(home) if row.disk else 0.0
    results = {}
    names = list(interpreters)
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        with tempfile.TemporaryDirectory(dir=home) as own:
            job = Job(name, row.block_kib << 10, row.memory, row.disk, longest, distinct, own, warm, row.pace)
            results[name] = Result(len(prompts), interpreters[name].replay(job, prompts), raw)
        print(table({(row, name): [results[name]]}).splitlines()[-1], file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5, help="Ctrl-C ends them early")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter of the peers; none: kvtier alone")
    parser.add_argument("--path", action="append", default=[], help="a folder of packages for the peers; repeatable")
    parser.add_argument("--cold", action="store_true", help="do not fill an engine's memory before")
    asked = parser.parse_args()
    numbers: dict[int, int] = {}
    requests = asyncio.run(read(asked.trace, asked.requests))
    prompts = [[numbers.setdefault(block, len(numbers)) for block in request.ids] for request in requests]
    theirs = Interpreter(asked.peers, asked.path) if asked.peers else None
    interpreters = {name: OURS if name == "kvtier" else theirs for name in asked.engines}
    chosen = {name: each for name, each in interpreters.items() if each is not None}
    results: dict[tuple[Row, str], list[Result]] = {}
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="kvtier-replay-") as home:
        for turn, row in product(range(asked.rounds), map(ROWS.__getitem__, asked.rows)):
            for name, result in measure(chosen, row, prompts, Path(home), turn, warm=not asked.cold).items():
                results.setdefault((row, name), []).append(result)
    print(table(results))


if __name__ == "__main__":
    main()
