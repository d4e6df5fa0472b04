"""A process that writes, retires and says what it does, until it is killed: ``DIRECTORY SEED FIRST_NAME``.

One JSON object a line: ``{"try": {"put": [[name, slot, parent], ...], "retire": [name, ...]}}`` before a batch and
``{"done": true}`` once the store has answered.
"""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import count
from pathlib import Path

from kvtierd.core.ids import SlotId
from tests.unit.disk.disk_blocks import GROUP, block, key, open_root, places

SLOTS = 40
MAX_BATCH = 6
CACHE = "crashing"


def say(message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def main(directory: Path, seed: int, first_name: int) -> None:
    rng = random.Random(seed)
    store = open_root(directory).open_cache(CACHE)
    recovery = store.recover()
    named = {key(name): name for name in range(first_name)}
    held = {named[block]: int(slot) for block, slot in places(recovery).items()}
    parent_of = {named[r.key]: named[r.parent] if r.parent else None for r in recovery.records[GROUP]}
    names = count(first_name)
    while True:
        free = sorted(set(range(SLOTS)) - set(held.values()))
        put: list[tuple[int, int, int | None]] = []
        for slot in rng.sample(free, min(len(free), rng.randint(1, MAX_BATCH))):
            parent = rng.choice([None, *held, *(name for name, _, _ in put)])
            put.append((next(names), slot, parent))
        needed = {parent_of[name] for name in held} | {parent for _, _, parent in put}
        leaves = [name for name in held if name not in needed]
        retired = rng.sample(leaves, min(len(leaves), rng.randint(0, MAX_BATCH)))

        say({"try": {"put": put, "retire": retired}})
        failed = store.write(
            [block(name, slot, parent) for name, slot, parent in put],
            [(GROUP, key(name), SlotId(held[name])) for name in retired],
            [(GROUP, b"".join(key(name) for name in rng.sample(sorted(held), min(len(held), 3))))],
        )
        assert not failed
        say({"done": True})
        for name in retired:
            del held[name], parent_of[name]
        for name, slot, parent in put:
            held[name] = slot
            parent_of[name] = parent


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
