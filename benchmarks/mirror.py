"""Measures a mirror by itself: the time of a change and of a match, and the memory of a block.

    python -m benchmarks.mirror

The messages are the daemon's, with events of one block or of 256; they are parsed, turned into events and applied.
Blocks are stored, moved and removed in turn, so the index keeps its size. Medians of the thread's processor time.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from kvtier.bench.host import new_chain
from kvtier.events import event_from_wire
from kvtier.mirror.index import ALL_TIERS, MirrorIndex
from kvtier.v1 import common_pb2, events_pb2
from kvtier.v1.events_pb2 import EVENT_TYPE_CREATED, EVENT_TYPE_REMOVED, EVENT_TYPE_STORED, EVENT_TYPE_UPDATED

BLOCKS: Final = 500_000
CHANGED: Final = 16_384
"""Blocks that are stored, moved and removed in a round."""
ROUNDS: Final = 7
CHAIN: Final = 1024


def messages(kind: events_pb2.EventType.ValueType, keys: Sequence[bytes], each: int) -> Iterator[bytes]:
    """Events of one kind, of ``each`` blocks, about 256 blocks a message."""
    for start in range(0, len(keys), 256):
        batch = events_pb2.WatchBatch(epoch=1)
        for first in range(start, start + 256, each):
            few = keys[first : first + each]
            told = batch.events.add(type=kind, cause=common_pb2.CAUSE_COMMIT, cache="c", keys=b"".join(few))
            if kind != EVENT_TYPE_REMOVED:
                told.residency, told.priorities = b"\1" * len(few), b"\x23" * len(few)
            if kind == EVENT_TYPE_STORED:
                told.parents = told.keys
        yield batch.SerializeToString()


def apply(index: MirrorIndex, packed: Iterable[bytes]) -> None:
    for message in packed:
        batch = events_pb2.WatchBatch.FromString(message)
        for each in batch.events:
            index.apply(event_from_wire(batch.epoch, each))


def nanoseconds(call: Callable[..., object], *arguments: object) -> int:
    start = time.thread_time_ns()
    call(*arguments)
    return time.thread_time_ns() - start


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    index, before = MirrorIndex(), resident()
    created = events_pb2.Event(type=EVENT_TYPE_CREATED, cache="c", tokens_per_block=16, all_window_tokens=[0])
    index.apply(event_from_wire(1, created))
    for first in range(0, BLOCKS, CHANGED):
        apply(index, messages(EVENT_TYPE_STORED, new_chain(min(CHANGED, BLOCKS - first)), 256))
    print(f"{len(index)} blocks take {(resident() - before) / len(index):.0f} bytes each")
    stored, changing = [block.key for block in index.blocks(0)], new_chain(CHANGED)
    kinds = EVENT_TYPE_STORED, EVENT_TYPE_UPDATED, EVENT_TYPE_REMOVED
    for each in (1, 256):
        packed = [message for kind in kinds for message in messages(kind, changing, each)]
        took = median(nanoseconds(apply, index, packed) for _ in range(ROUNDS)) / len(kinds) / CHANGED
        print(f"{each:4} blocks an event: {took:5.0f} ns a change")
    chains = [b"".join(random.sample(stored, CHAIN)) for _ in range(100)]
    took = median(nanoseconds(index.match, chain, ALL_TIERS) for chain in chains)
    print(f"match of {CHAIN} blocks: {took / 1e3:.0f} µs")


if __name__ == "__main__":
    main()
