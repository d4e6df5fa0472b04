"""``python -m kvtier.bench.reader ADDRESS BLOCK_BYTES CHAINS``: a client that reads all the time and sees every byte.

In a process of its own, so that nothing else keeps it from reading. It prints a line when it has read every chain once,
and at the end of its standard input one JSON object, see :class:`Told`.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.bench.place import CACHE, chains, spec_of
from kvtier.errors import KvtierError
from kvtier.sync.client import Client
from kvtier.types import Tier

CHAIN: Final = 64
"""Blocks of a read."""


@dataclass(slots=True)
class Told:
    """``ends``: when each read that counts was done, by the monotonic clock of the machine. ``calls``: how often the
    daemon had to be asked."""

    ends: list[float] = field(default_factory=list)
    short: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    calls: int = 0


def content(chain: list[bytes], block_bytes: int) -> NDArray[np.uint8]:
    """The bytes of a chain's blocks, [blocks, bytes]: each its key, over and over."""
    keys = np.frombuffer(b"".join(chain), np.uint8).reshape(len(chain), -1)
    return np.tile(keys, -(-block_bytes // keys.shape[1]))[:, :block_bytes]


def run(address: str, block_bytes: int, count: int) -> None:
    stored = list(islice(chains(CHAIN), count))
    told = Told()
    out = np.empty((CHAIN, block_bytes), np.uint8)
    ended = threading.Event()

    def hear() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=hear, daemon=True).start()
    with Client(address, timeout=60) as client:
        cache = client.open_cache(CACHE, spec_of(block_bytes))
        for chain in stored:
            cache.get(chain, out, tier=Tier.HOST)
        before = cache.reads.calls
        print("reading", flush=True)
        order = random.Random(1)
        while not ended.is_set():
            chain = order.choice(stored)
            try:
                found = len(cache.get(chain, out, tier=Tier.HOST))
            except KvtierError as error:
                told.errors.append(str(error))
                continue
            told.short += found < CHAIN
            told.wrong += int((out[:found] != content(chain, block_bytes)[:found]).any(axis=1).sum())
            told.ends.append(time.monotonic())
        told.calls = cache.reads.calls - before
    print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
