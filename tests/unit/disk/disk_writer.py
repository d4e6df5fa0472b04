"""A process that writes, retires and says what it does, until it is killed: ``DIRECTORY SEED FIRST_NAME [POINT]``.

One JSON object a line: ``{"try": {"put": [[name, slot, parent], ...], "retire": [name, ...]}}`` before a batch and
``{"done": true}`` once the store has answered. With a point, such as ``torn transfer``, it kills itself there, in its
third batch.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from kvtierd.core.ids import SlotId
from kvtierd.tiers.disk.index import Index
from tests.unit.disk.disk_blocks import GROUP, block, key, open_root, places

SLOTS = 40
MAX_BATCH = 6
CACHE = "crashing"


def say(message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: die()


def after(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> None:
        call(*arguments)
        die()

    return wrapper


def torn(call: Callable[..., Any]) -> Callable[..., Any]:
    """Half of each record, or of each run of them, reaches the slab."""

    def wrapper(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        call(fd, buffers[: len(buffers) // 2], offset)
        die()

    return wrapper


POINTS: Final[Mapping[str, tuple[object, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]] = {
    "before transfer": (os, "pwritev", before),
    "torn transfer": (os, "pwritev", torn),
    "after transfer": (os, "pwritev", after),
    "before fdatasync": (os, "fdatasync", before),
    "after fdatasync": (os, "fdatasync", after),
    "before commit": (Index, "commit", before),
    "after commit": (Index, "commit", after),
}


def arm(point: str) -> None:
    owner, name, how = POINTS[point]
    setattr(owner, name, how(getattr(owner, name)))


def main(directory: Path, seed: int, first_name: int, point: str | None = None) -> None:
    rng = random.Random(seed)
    store = open_root(directory).open_cache(CACHE)
    recovery = store.recover()
    named = {key(name): name for name in range(first_name)}
    held = {named[block]: int(slot) for block, slot in places(recovery).items()}
    parent_of = {named[r.key]: named[r.parent] if r.parent else None for r in recovery.records[GROUP]}
    names = count(first_name)
    for turn in count(1):
        free = sorted(set(range(SLOTS)) - set(held.values()))
        put: list[tuple[int, int, int | None]] = []
        for slot in rng.sample(free, min(len(free), rng.randint(1, MAX_BATCH))):
            parent = rng.choice([None, *held, *(name for name, _, _ in put)])
            put.append((next(names), slot, parent))
        needed = {parent_of[name] for name in held} | {parent for _, _, parent in put}
        leaves = [name for name in held if name not in needed]
        retired = rng.sample(leaves, min(len(leaves), rng.randint(0, MAX_BATCH)))

        say({"try": {"put": put, "retire": retired}})
        if point and turn == 3:
            arm(point)
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
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
