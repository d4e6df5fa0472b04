"""kill -9 while a batch is being written: what was committed is there, the rest is not, and no byte is wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.disk.disk_blocks import GROUP, key, open_root, spec, verdicts
from tests.unit.disk.disk_writer import CACHE, POINTS, SLOTS

REPOSITORY = Path(__file__).parents[3]


@dataclass
class Known:
    """What the writers said: blocks with slot and parent, after the last batch that was answered."""

    blocks: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    next_name: int = 0

    def after(self, batch: dict[str, Any]) -> Known:
        blocks = {name: place for name, place in self.blocks.items() if name not in batch["retire"]}
        for name, slot, parent in batch["put"]:
            blocks[name] = (slot, parent)
        names = [name for name, _, _ in batch["put"]]
        return Known(blocks, max([self.next_name, *(name + 1 for name in names)]))


def live_and_die(directory: Path, known: Known, seed: int, *point: str) -> tuple[Known, Known | None]:
    """Runs a writer until it kills itself at ``point``, or kills it at a random one.

    What was committed for certain, and with the batch that was under way.
    """
    rng = random.Random(seed)
    arguments = [str(directory), str(seed), str(known.next_name), *point]
    command = [sys.executable, "-m", "tests.unit.disk.disk_writer", *arguments]
    batches, under_way = -1 if point else rng.randint(0, 8), None
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            message = json.loads(line)
            if "try" in message:
                under_way = known.after(message["try"])
                if batches == 0:
                    spin(rng.uniform(0, 0.006))
                    writer.kill()
                batches -= 1
            else:
                assert under_way is not None
                known, under_way = under_way, None
    assert writer.returncode == -9
    return known, under_way


def spin(seconds: float) -> None:
    """To hit the middle of a batch: it takes one to two milliseconds, about what a sleep is late by."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def found_on_disk(directory: Path) -> dict[int, tuple[int, int | None]]:
    """What is recovered, after checking every byte of it and that every parent stands before its child."""
    root = open_root(directory)
    store = root.open_cache(CACHE)
    recovery = store.recover()
    assert recovery.dropped == 0
    assert recovery.quarantined == {GROUP: set()}
    named = {key(name): name for name in range(20_000)}
    found: dict[int, tuple[int, int | None]] = {}
    for record in recovery.records[GROUP]:
        parent = None if record.parent is None else named[record.parent]
        assert parent is None or parent in found
        assert record.slot is not None
        found[named[record.key]] = (record.slot, parent)
    places = {name: slot for name, (slot, _) in found.items()}
    assert verdicts(store, places) == dict.fromkeys(places, "ok")
    root.close()
    return found


def create(directory: Path) -> Path:
    root = open_root(directory)
    root.create(CACHE, spec(), {GROUP: SLOTS})
    root.close()
    return directory


def crash(directory: Path, kills: int) -> None:
    known = Known()
    for seed in range(kills):
        before, under_way = live_and_die(directory, known, seed)
        found = found_on_disk(directory)
        if under_way is not None and found == under_way.blocks:
            before = under_way
        assert found == before.blocks, "neither the state before the last batch nor the one after it"
        # A name is used once, whatever became of it.
        known = Known(before.blocks, max(before.next_name, under_way.next_name if under_way else 0))
    assert len(known.blocks) > SLOTS // 4, "the writers got nowhere"


def test_ten_deaths(tmp_path: Path) -> None:
    crash(create(tmp_path), kills=10)


@pytest.mark.long
def test_two_hundred_deaths(tmp_path: Path) -> None:
    crash(create(tmp_path), kills=200)


@pytest.mark.parametrize("point", POINTS)
def test_death_at(tmp_path: Path, point: str) -> None:
    before, under_way = live_and_die(create(tmp_path), Known(), 5, point)
    assert under_way is not None
    assert len(before.blocks) > 2
    assert found_on_disk(tmp_path) == (under_way if point == "after commit" else before).blocks
