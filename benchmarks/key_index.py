"""The key index by itself: what a look costs a reader, and what a change costs the daemon.

    python benchmarks/key_index.py [--blocks 1000000] [--rounds 200]

Prints medians and 99th percentiles of the thread's processor time.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable

import numpy as np

from kvtier.abi.key_index import IndexReader
from kvtier.abi.layout import HOST, ArenaIdentity, ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.core.manager import Recovered
from kvtierd.core.traits import Traits
from kvtierd.tiers.index_rebuild import Many
from kvtierd.tiers.key_index import KeyIndex

SPEC = CacheSpec.single("m", "uint8", 1, 1, 1, 8)
GROUP = GroupId(0)
CHAIN = 8192


def key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest())


def timed(what: str, rounds: int, call: Callable[[int], object], each: int = 1) -> None:
    """``each``: how many things one call does."""
    took = []
    for number in range(rounds):
        start = time.thread_time_ns()
        call(number)
        took.append((time.thread_time_ns() - start) / 1e3 / each)
    median, slow = np.percentile(took, [50, 99])
    print(f"{what:34} p50 {median:10.2f} us   p99 {slow:10.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    asked = parser.parse_args()
    blocks, rounds = asked.blocks, asked.rounds

    layout = ArenaLayout.plan(SPEC, {(0, HOST): blocks})
    control = np.zeros(layout.control_bytes, np.uint8)
    layout.initialise(control, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=1, pid=1), bytes(range(32)))
    writer = KeyIndex(layout, control, epoch=1)
    traits = Traits(35)
    recovered = [Recovered(None, key(number), None, traits, host=SlotId(number)) for number in range(blocks)]
    generations = {(Tier.HOST, GROUP): np.full(blocks, 4, np.uint64)}
    start = time.thread_time()
    many = Many.of({GROUP: recovered}, generations)
    middle = time.thread_time()
    writer.rebuild(many)
    print(f"{'rebuild':34} {1e3 * (time.thread_time() - start):.0f} ms, {1e3 * (middle - start):.0f} of them arrays")
    start = time.thread_time()
    writer.rebuild(many)
    print(f"{'rebuild of what is right':34} {1e3 * (time.thread_time() - start):.0f} ms")

    reader = IndexReader(layout, control)
    keys = [one.key for one in recovered]
    random = np.random.default_rng(1)
    spread = random.permutation(blocks)

    def chain(number: int, present: int) -> bytes:
        """Another one in each round, so that none of it is in the processor's caches."""
        rows = np.take(spread, range(number * 61, number * 61 + present), mode="wrap").tolist()
        return b"".join([keys[row] for row in rows] + [key(blocks + n) for n in range(CHAIN - present)])

    for name, present in (("all", CHAIN), ("half", CHAIN // 2), ("none", 0)):
        chains = [chain(number, present) for number in range(min(rounds, 40))]
        assert reader.prefix_length(chains[0], GROUP) == present
        assert int(np.count_nonzero(reader.find(chains[0], GROUP).residency)) == present
        timed(f"prefix_length of {CHAIN}, {name}", rounds, lambda n, c=chains: reader.prefix_length(c[n % len(c)], 0))  # type: ignore[misc]
        timed(f"find {CHAIN}, {name}", rounds, lambda n, c=chains: reader.find(c[n % len(c)], 0))  # type: ignore[misc]
    few = [b"".join(keys[row] for row in spread[n * 64 : n * 64 + 64].tolist()) for n in range(rounds)]
    timed("find 64", rounds, lambda n: reader.find(few[n], GROUP))
    timed("find 10", rounds, lambda n: reader.find(few[n][:320], GROUP))
    some = [keys[row] for row in spread[-rounds * 50 :].tolist()]
    timed("entry, there", rounds, lambda n: [reader.entry(one, GROUP) for one in some[n * 50 : n * 50 + 50]], 50)
    absent = [key(-n % 2**64) for n in range(1, rounds * 50 + 1)]
    timed("entry, not there", rounds, lambda n: [reader.entry(one, GROUP) for one in absent[n * 50 : n * 50 + 50]], 50)

    def puts(residency: int) -> Callable[[int], object]:
        def call(number: int) -> None:
            for slot, one in enumerate(some[number * 50 : number * 50 + 50]):
                writer.put(GROUP, one, residency, (SlotId(slot), 6) if residency == 2 else None)

        return call

    timed("put, gone", rounds, puts(0), 50)
    timed("put, new", rounds, puts(2), 50)
    timed("put, one tier more", rounds, puts(6), 50)
    timed("put, the same", rounds, puts(6), 50)


if __name__ == "__main__":
    main()
