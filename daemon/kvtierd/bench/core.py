"""What a block costs the core: ``python -m kvtierd.bench.core --blocks 1000000`` prints one JSON object.

A bare core with a mover that completes every move at once. Times are of the thread's CPU, of 64 blocks at a time, and
per block; memory is what the process has grown by, per block. Garbage collection is off, as nearly so in a daemon (see
``service/collector.py``).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, GroupId, Key, LeaseId, SessionId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, MoveResult, Outcome
from kvtierd.core.policy import DEFAULT_PRIORITY, GroupShape
from kvtierd.core.verbs import ChainRequest, CommitItem

CHAIN: Final = 64
SAMPLES: Final = 300
"""Chains of which each operation is measured."""

_GROUP: Final = GroupId(0)
_SESSION: Final = SessionId(1)
_SLOT_BYTES: Final = 4096
_HOST_PART: Final = 16
"""With a disk, the host has this part of its slots."""


class Rig:
    """A core full of chains. ``disk``: a host and a disk tier of ``blocks`` slots; else a host tier of so many."""

    def __init__(self, blocks: int, *, disk: bool) -> None:
        slots = {Tier.HOST: max(blocks // _HOST_PART, 4 * CHAIN), Tier.DISK: blocks} if disk else {Tier.HOST: blocks}
        self.host_slots = slots[Tier.HOST]
        shape = GroupShape(_GROUP, slots, dict.fromkeys(slots, _SLOT_BYTES))
        self._core = BlockManager(CacheId(1), [shape], EventSequencer())
        self._grants: dict[int, Grant] = {}
        self._clock = 0
        self._run(self._core.open({}, {}, unclean=False, now=0, restarted=False))

    def store(self, keys: Sequence[Key]) -> None:
        """A new chain, let go of; makes room for it where there is none."""
        ticket, outcome = self._core.reserve(_SESSION, _GROUP, Tier.HOST, CHAIN, self._now())
        self._run(outcome)
        grant = self._grants.pop(ticket)
        lease = self._lease(grant)
        items = [
            CommitItem(slot, key, parent, DEFAULT_PRIORITY)
            for slot, key, parent in zip(grant.slots, keys, [None, *keys[:-1]], strict=True)
        ]
        self._run(self._core.commit(_SESSION, lease, items, self._now())[1])
        self._run(self._core.release(_SESSION, [lease], self._now()))

    def match(self, keys: Sequence[Key]) -> None:
        found = self._core.match(_GROUP, keys)
        if found.blocks != CHAIN:
            raise RuntimeError(f"{found.blocks} of {CHAIN} blocks found")

    def hold(self, keys: Sequence[Key]) -> None:
        """Acquires and releases."""
        request = ChainRequest(keys, CHAIN)
        (ticket,), outcome = self._core.acquire(_SESSION, _GROUP, Tier.HOST, [request], self._now())
        self._run(outcome)
        self._run(self._core.release(_SESSION, [self._lease(self._grants.pop(ticket))], self._now()))

    def _run(self, outcome: Outcome) -> None:
        """Everything that an outcome asks for, and what that begets."""
        while True:
            self._grants.update((grant.ticket, grant) for grant in outcome.grants)
            if outcome.refusals:
                raise RuntimeError(f"refused: {outcome.refusals[0]}")
            if outcome.moves:
                results = [MoveResult(move.id, copy_ns=1) for move in outcome.moves]
                outcome = self._core.completed(results, self._now())
            elif outcome.again:
                outcome = self._core.tick(self._now())
            else:
                return

    def _lease(self, grant: Grant) -> LeaseId:
        if grant.lease is None:
            raise RuntimeError("nothing was granted")
        return grant.lease

    def _now(self) -> int:
        self._clock += 1_000
        return self._clock


def measure(blocks: int, *, disk: bool) -> dict[str, Any]:
    """CPU microseconds a block by operation, and bytes a block."""
    gc.collect()
    gc.disable()
    before = anonymous_bytes()
    rig = Rig(blocks, disk=disk)
    chains = blocks // CHAIN
    fresh = _times(rig.store, range(chains))[-SAMPLES:]
    grown = anonymous_bytes() - before
    # What was stored first may have left a full disk for what came last.
    present = random.Random(1).choices(range(chains // 2, chains), k=SAMPLES)
    times = {
        "commit": fresh,
        "match": _times(rig.match, present),
        "acquire_release": _times(rig.hold, present),
    }
    # With a disk, what the host holds besides it must be stored before every further chain costs one.
    full = chains + rig.host_slots // CHAIN
    _times(rig.store, range(chains, full))
    times["evict"] = _times(rig.store, range(full, full + SAMPLES))
    return {
        "blocks": blocks,
        "tiers": "host, disk" if disk else "host",
        "us": {name: 1e6 * statistics.median(each) / CHAIN for name, each in times.items()},
        "bytes": grown / blocks,
    }


def _times(work: Callable[[Sequence[Key]], None], chains: Iterable[int]) -> list[float]:
    """CPU seconds for each chain; making its keys is not the core's work."""
    times = []
    for chain in chains:
        keys = [Key(hashlib.sha256(b"%d/%d" % (chain, position)).digest()) for position in range(CHAIN)]
        started = time.thread_time()
        work(keys)
        times.append(time.thread_time() - started)
    return times


def anonymous_bytes() -> int:
    """Resident memory that is no file's and nobody else's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not tell RssAnon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--disk", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.blocks, disk=options.disk)))


if __name__ == "__main__":
    main()
