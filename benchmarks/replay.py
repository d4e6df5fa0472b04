"""Replays a trace through kvtier and its peers in turn, with the same bytes and checks.

    python -m benchmarks.replay conversation_trace.jsonl [--peers PYTHON --path FOLDER --path FOLDER] [--rounds 5]

A request looks its prefix up, loads the blocks that are there and stores the rest. An engine is new in each round and
has a process of its own; the order rotates. Its memory is filled once before, and emptied. Only the three verbs are
timed: rows are filled from a random pattern before a store, and compared with it after a load, outside of the clock.
Mooncake reports blocks that it has no room for: ``mooncake-insisting`` repeats their store for up to 15 s. ``faults``:
page faults of the engine's servers inside of the clock.

The peers' interpreter, as ``make test-engines`` makes it, wants torch, numpy and beside them in folders of their own:
``pip install --no-deps -t FOLDER mooncake-transfer-engine-non-cuda==0.3.13.post1`` and
``pip install --no-deps -t FOLDER lmcache==0.5.6 sortedcontainers==2.4.0``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Final, TypeAlias

from benchmarks.replay_engines import ENGINES, LIMIT_S, Job, Prompt, Record
from kvtier.replay.trace import read

ROOT: Final = Path(__file__).parents[1]

Interpreter: TypeAlias = tuple[str, Sequence[str]]
"""A Python, and the folders of packages before its own."""
OURS: Final[Interpreter] = (sys.executable, [str(ROOT / "client"), str(ROOT / "daemon")])


@dataclass(slots=True, frozen=True)
class Row:
    """``memory`` and ``disk`` in blocks; ``share``: of the trace's requests; ``pace``: see :class:`Job`."""

    block_kib: int
    memory: int
    disk: int
    share: float = 1.0
    pace: float = 0.0

    def __str__(self) -> str:
        place = f"{self.memory:,} blocks over {self.disk:,}" if self.disk else "in memory"
        return f"{self.block_kib:,} KiB, {place}" + (f", {self.pace:g} requests a second" if self.pace else "")


ROWS: Final[Mapping[str, Row]] = {
    "256k-disk": Row(256, 2_000, 24_000, 0.5),
    "1m-disk": Row(1024, 800, 9_000, 0.3),
    "256k-disk-40": Row(256, 2_000, 24_000, 0.5, 40.0),
    "64k": Row(64, 28_000, 0),
    "256k": Row(256, 15_500, 0, 0.5),
    "1m": Row(1024, 10_000, 0, 0.3),
}
"""Both peers evict before their memory is full: a row in memory has a quarter more than it needs."""


def replay(interpreter: Interpreter, job: Job, prompts: Sequence[Prompt]) -> Record:
    """Replays in a process of its own. Raises RuntimeError if the engine fails."""
    python, folders = interpreter
    done = subprocess.run(
        [python, ROOT / "benchmarks/replay_engines.py"],
        input=json.dumps([asdict(job), prompts]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{job.engine} failed:\n{done.stderr[-4000:]}")
    return Record(**json.loads(done.stdout))


def _percentile_ms(seconds: Sequence[float], percent: int) -> float:
    return 1e3 * quantiles(seconds, n=100, method="inclusive")[percent - 1]


COLUMNS: Final[Mapping[str, tuple[Callable[[Record], float], str]]] = {
    "requests a second": (lambda record: len(record.requests) / sum(record.requests), ".0f"),
    "hits": (lambda record: record.loaded / record.asked, ".3f"),
    "faults": (lambda record: record.faults, ",.0f"),
    "request p50, ms": (lambda record: _percentile_ms(record.requests, 50), ".2f"),
    "request p99, ms": (lambda record: _percentile_ms(record.requests, 99), ".1f"),
    "put p50, ms": (lambda record: _percentile_ms(record.stores, 50), ".2f"),
    "put p99, ms": (lambda record: _percentile_ms(record.stores, 99), ".1f"),
}


def table(records: Mapping[tuple[Row, str], Sequence[Record]]) -> str:
    """In Markdown: medians, and the wrong blocks of all rounds."""
    lines: list[Sequence[str]] = [("row", "engine", "rounds", "wrong", *COLUMNS), ["---"] * (4 + len(COLUMNS))]
    for (row, name), each in records.items():
        figures = (format(median(map(figure, each)), form) for figure, form in COLUMNS.values())
        wrong = sum(record.wrong for record in each)
        lines.append((f"{row}, {len(each[0].requests):,} requests", name, str(len(each)), str(wrong), *figures))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure(
    interpreters: Mapping[str, Interpreter], row: Row, prompts: Sequence[Prompt], home: Path, turn: int
) -> dict[str, Record]:
    """Measures each engine once on one row, beginning with engine number ``turn``."""
    prompts = prompts[: max(2, int(len(prompts) * row.share))]
    longest, distinct = max(map(len, prompts)), 1 + max(map(max, prompts))
    records, names = dict[str, Record](), list(interpreters)
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        with tempfile.TemporaryDirectory(dir=home) as own:
            job = Job(name, row.block_kib << 10, row.memory, row.disk, longest, distinct, own, row.pace)
            records[name] = replay(interpreters[name], job, prompts)
        print(table({(row, name): [records[name]]}).splitlines()[-1], file=sys.stderr, flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5, help="Ctrl-C ends them early")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter of the peers; none: kvtier alone")
    parser.add_argument("--path", action="append", default=[], help="a folder of packages for the peers; repeatable")
    asked = parser.parse_args()
    numbers: dict[int, int] = {}
    requests = asyncio.run(read(asked.trace, asked.requests))
    prompts = [[numbers.setdefault(block, len(numbers)) for block in request] for request in requests]
    chosen = [name for name in asked.engines if name == "kvtier" or asked.peers]
    interpreters = {name: OURS if name == "kvtier" else (asked.peers, asked.path) for name in chosen}
    records: defaultdict[tuple[Row, str], list[Record]] = defaultdict(list)
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="kvtier-replay-") as home:
        for turn, row in product(range(asked.rounds), map(ROWS.__getitem__, asked.rows)):
            for name, record in measure(interpreters, row, prompts, Path(home), turn).items():
                records[row, name].append(record)
    print(table(records))


if __name__ == "__main__":
    main()
