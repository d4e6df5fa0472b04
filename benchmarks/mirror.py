"""A mirror by itself: what a change of a block costs it, what a look costs, and what a block takes of memory.

    python benchmarks/mirror.py [--blocks 500000] [--rounds 7]

Messages are as the daemon sends them, of up to 256 events or 1 MiB, of so many blocks each; they are parsed, made
events of and applied. Blocks are stored, moved and removed in turn, so the index stays as large as it is. The floor is
what a dict takes for the same changes, whose keys lie there as objects. Rounds of both take turns; medians of the
thread's processor time. ``mixed``: blocks of an event differ in tier and priority.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.events import event_from_wire
from kvtier.mirror.index import ALL_TIERS, MirrorIndex
from kvtier.v1 import common_pb2, events_pb2

MESSAGE_EVENTS = 256
MESSAGE_BYTES = 1 << 20
CHAIN = 1024
CHANGED = 16384
"""Blocks that come, move and go in a round."""
KINDS = (events_pb2.EVENT_TYPE_STORED, events_pb2.EVENT_TYPE_UPDATED, events_pb2.EVENT_TYPE_REMOVED)


def keys_of(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(number.to_bytes(8, "big")).digest() for number in range(first, first + count)]


def event(kind: events_pb2.EventType.ValueType, keys: Sequence[bytes], number: int, mixed: bool) -> events_pb2.Event:
    message = events_pb2.Event(
        id=number, type=kind, cause=common_pb2.CAUSE_COMMIT, cache="c", time_ns=time.time_ns(), keys=b"".join(keys)
    )
    if kind != events_pb2.EVENT_TYPE_REMOVED:
        rng = random.Random(number)
        message.residency = bytes(rng.randint(1, 7) for _ in keys) if mixed else b"\1" * len(keys)
        message.priorities = bytes(rng.randint(0, 100) for _ in keys) if mixed else b"\x23" * len(keys)
    if kind == events_pb2.EVENT_TYPE_STORED:
        message.parents = b"".join(keys)
    return message


def messages(keys: Sequence[bytes], each: int, mixed: bool) -> list[bytes]:
    """Every block stored, then every block moved, then every block removed, ``each`` blocks an event."""
    events = [
        event(kind, keys[start : start + each], number, mixed)
        for kind in KINDS
        for number, start in enumerate(range(0, len(keys), each))
    ]
    most = max(1, min(MESSAGE_EVENTS, MESSAGE_BYTES // (each * 66)))
    return [
        events_pb2.WatchBatch(epoch=1, first_id=1, last_id=most, events=events[at : at + most]).SerializeToString()
        for at in range(0, len(events), most)
    ]


def apply(index: MirrorIndex, packed: Sequence[bytes]) -> None:
    for message in packed:
        batch = events_pb2.WatchBatch.FromString(message)
        for each in batch.events:
            index.apply(event_from_wire(batch.epoch, each))


def floor(blocks: dict[bytes, int], keys: Sequence[bytes]) -> None:
    blocks.update(dict.fromkeys(keys, 1))
    blocks.update(dict.fromkeys(keys, 2))
    for key in keys:
        del blocks[key]


def nanoseconds(call: Callable[[], object], changes: int) -> float:
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / changes


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def filled(count: int) -> Iterator[bytes]:
    """Messages that store so many blocks, one at a time: who takes them keeps nothing of them."""
    for first in range(0, count, CHANGED):
        keys = keys_of(first, min(CHANGED, count - first))
        for start in range(0, len(keys), 256):
            stored = event(events_pb2.EVENT_TYPE_STORED, keys[start : start + 256], start, mixed=False)
            yield events_pb2.WatchBatch(epoch=1, events=[stored]).SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()

    index = MirrorIndex()
    created = events_pb2.Event(
        type=events_pb2.EVENT_TYPE_CREATED, cache="c", tokens_per_block=16, all_window_tokens=[0]
    )
    index.apply(event_from_wire(1, created))
    gc.collect()
    before = resident()
    for message in filled(asked.blocks):
        apply(index, [message])
    gc.collect()
    print(f"{len(index)} blocks take {(resident() - before) / len(index):.0f} bytes each")

    plain = {block.key: 1 for block in index.blocks("c", 0)}
    changing = keys_of(asked.blocks, CHANGED)
    for each, mixed in ((1, False), (4, False), (16, False), (64, False), (256, False), (256, True)):
        packed = messages(changing, each, mixed)
        took: dict[str, list[float]] = {"mirror": [], "floor": []}
        for _ in range(asked.rounds):
            took["mirror"].append(nanoseconds(lambda packed=packed: apply(index, packed), 3 * CHANGED))  # type: ignore[misc]
            took["floor"].append(nanoseconds(lambda: floor(plain, changing), 3 * CHANGED))
        mirror, bare = (statistics.median(took[name]) for name in ("mirror", "floor"))
        what = f"{each:4} blocks an event{', mixed' if mixed else ''}"
        rate = f"{1e3 / mirror:5.2f} million/s"
        print(f"{what:28} {mirror:6.0f} ns a change, {rate}; a dict {bare:4.0f} ns: {mirror / bare:.1f} x")

    rng = random.Random(1)
    stored = [block.key for block in index.blocks("c", 0)]
    for name, present in (("all", CHAIN), ("half", CHAIN // 2), ("none", 0)):
        chains = [b"".join(rng.sample(stored, present) + changing[: CHAIN - present]) for _ in range(100)]
        took_us = [nanoseconds(lambda: index.match("c", chain, ALL_TIERS), 1) / 1e3 for chain in chains]  # noqa: B023
        print(f"match of {CHAIN} blocks, {name:4} there {statistics.median(took_us):8.1f} us")


if __name__ == "__main__":
    main()
