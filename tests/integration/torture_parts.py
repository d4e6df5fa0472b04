"""The parts of the torture test: clients in processes of their own, which read or write until they are told to stop.

A part counts on the board that it inherits, and tells on standard output, in the end, what went wrong.
"""

import asyncio
import json
import mmap
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier import (
    BlockResult,
    Client,
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseLost,
    TierFull,
    TooShort,
    buffers,
    connect,
)
from kvtier.buffers import Rows
from kvtier.reading import Read
from kvtier.types import Tier
from kvtier.wire import ReadCounts
from tests.integration.torture_blocks import CHAIN_BLOCKS, CHAINS, GARBAGE, SPEC, block, chain, fault_in
from tests.integration.touching import bytes_in, scribble_into, write_into

COUNTERS: Final = (
    "turns",  # operations that have ended, one way or another
    "reads",  # gets
    "repeats",  # chains that were asked for once more at once, since the last get had them whole
    "blocks",  # blocks that gets returned; each has been compared
    "hits",  # of those, copied without a call
    "calls",  # gets and lookups that asked the daemon
    "reuses",  # copies thrown away, since the slot was given away meanwhile
    "verified",  # gets whose bytes the daemon has been asked about besides
    "misses",  # gets that found less than they asked for
    "leases",  # chains read in place, under a lease
    "puts",  # chains put, or committed in reserved slots
    "stored",  # blocks that this stored anew
    "refused",  # operations that the daemon had no room or no time for
    "died",  # leases that were lost with a daemon
    "wrong",  # anything that must not be
)
CALL_S: Final = 15.0
_SHOWN: Final = 5
_DAWDLE_S: Final = 0.006
_HOLD_S: Final = 0.01
_PAUSE_S: Final = 0.001
"""After each read: who reads without calls would leave the others no time on a small machine."""
_AGAIN: Final = 0.9
"""Of chains that were read whole are read again at once."""
_PRIORITIES: Final = (20, 35)
"""What gives way first is dropped, and the others are written to the disk."""


class Board:
    """Counters of all parts, in memory that they share: [parts, counters], and a word that ends it all."""

    def __init__(self, fd: int, parts: int) -> None:
        words = np.frombuffer(mmap.mmap(fd, board_bytes(parts)), np.uint64)
        self._stop = words[:1]
        self.rows = words[1:].reshape(parts, len(COUNTERS))

    @property
    def stopping(self) -> bool:
        return bool(self._stop[0])

    def stop(self) -> None:
        self._stop[0] = 1

    def sums(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self.rows.sum(axis=0).tolist(), strict=True))


def board_bytes(parts: int) -> int:
    return 8 * (1 + parts * len(COUNTERS))


@dataclass(slots=True, frozen=True)
class Script:
    """What a part is told. ``verifies``: whether some gets have the daemon check them, too."""

    address: str
    fd: int
    parts: int
    number: int
    seed: int
    verifies: bool


class Part:
    """One process's side: its row of the board, and what it found wrong."""

    def __init__(self, script: Script) -> None:
        self.address = script.address
        self.rng = random.Random(script.seed)
        self.verifies = script.verifies
        self.faults: list[str] = []
        self._whole: list[bytes] = []
        """What was read last, if all of it was there."""
        self._board = Board(script.fd, script.parts)
        self._row = self._board.rows[script.number]
        self._lock = threading.Lock()

    @property
    def goes_on(self) -> bool:
        return not self._board.stopping

    def count(self, **counts: int) -> None:
        with self._lock:
            for name, more in counts.items():
                self._row[COUNTERS.index(name)] += np.uint64(more)

    def note(self, counts: ReadCounts) -> None:
        """What the client itself says of its reads."""
        with self._lock:
            for name in ("hits", "calls", "reuses"):
                self._row[COUNTERS.index(name)] = getattr(counts, name)

    def wrong(self, what: str) -> None:
        self.count(wrong=1)
        if len(self.faults) < _SHOWN:
            self.faults.append(what)

    @contextmanager
    def turn(self, *, holds: bool = False) -> Iterator[None]:
        """One operation. What may happen to it is counted, anything else is wrong. ``holds``: it has a lease, which may
        be lost with the daemon; get and put never are."""
        try:
            yield
        except LeaseLost:
            if holds:
                self.count(died=1)
            else:
                self.wrong(traceback.format_exc())
        except (DaemonUnavailable, DeadlineExceeded, TierFull, TooShort):
            self.count(refused=1)
        except Exception:  # noqa: BLE001  it is what the test is about
            self.wrong(traceback.format_exc())
        self.count(turns=1)

    def some_chain(self) -> list[bytes]:
        if self._whole and self.rng.random() < _AGAIN:
            self.count(repeats=1)
            return self._whole
        return chain(self.rng.randrange(CHAINS))[: self.rng.randint(1, CHAIN_BLOCKS)]

    def compare(self, how: str, keys: Sequence[bytes], found: Sequence[Any]) -> None:
        """``found``: the first blocks of the chain."""
        for index, (key, bytes_) in enumerate(zip(keys, found, strict=False)):
            if fault := fault_in(key, bytes_):
                self.wrong(f"{how}: block {index} of {len(keys)}: {fault}")

    def has_read(self, keys: Sequence[bytes], found: Sequence[Any], counts: ReadCounts) -> None:
        self.compare("get", keys, found)
        self._whole = list(keys) if len(found) == len(keys) else []
        self.count(reads=1, blocks=len(found), misses=len(found) < len(keys))
        self.note(counts)

    def has_put(self, results: Sequence[BlockResult]) -> None:
        allowed = {BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING, BlockResult.NO_ROOM}
        if not set(results) <= allowed:
            self.wrong(f"a put answers {results}")
        self.count(puts=1, stored=results.count(BlockResult.OK))


def dawdle(rng: random.Random, most_s: float = _DAWDLE_S) -> None:
    """Copies of this process take their time now and then: before them, when their slots are known, and after them,
    before anybody has looked whether the slots still are those blocks'."""
    copy = buffers.out_of_slots

    def slow(*arguments: Any) -> None:
        for step in (None, copy, None):
            if step is not None:
                step(*arguments)
            elif rng.random() < 0.5:
                time.sleep(rng.uniform(0, most_s))

    setattr(buffers, "out_of_slots", slow)  # noqa: B010  a Final for all others


# -- the parts ---------------------------------------------------------------------------------------------------------


def read_in_threads(part: Part) -> None:
    """The synchronous client, in two threads."""
    dawdle(part.rng)
    with Client(part.address, timeout=CALL_S, wait=CALL_S) as client:
        cache = client.open_cache("c", SPEC, write=False)

        def read() -> None:
            while part.goes_on:
                with part.turn():
                    keys = part.some_chain()
                    part.has_read(keys, cache.get(keys), cache.reads)
                time.sleep(_PAUSE_S)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def _read_and_hold(part: Part) -> None:
    async with await connect(part.address, timeout=CALL_S, wait=CALL_S) as client:
        cache = await client.open_cache("c", SPEC, write=False)

        async def read() -> None:
            while part.goes_on:
                with part.turn():
                    keys, verify = part.some_chain(), part.verifies and part.rng.random() < 0.2
                    part.has_read(keys, await cache.get(keys, verify=verify), cache.reads)
                    part.count(verified=verify)
                await asyncio.sleep(_PAUSE_S)

        async def hold() -> None:
            while part.goes_on:
                with part.turn(holds=True):
                    async with cache.acquire(part.some_chain()) as lease:
                        await asyncio.sleep(part.rng.uniform(0, _HOLD_S))
                        seen = [bytes_in(lease.view(index)) for index in range(len(lease))]
                        part.compare("a read lease", lease.keys, seen)
                        if not lease.unchanged():
                            part.wrong("a slot under a read lease has changed")
                        part.count(leases=1)

        await asyncio.gather(read(), hold())


def read_and_hold(part: Part) -> None:
    """The asynchronous client: gets, and leases that are held for a while, over a death of the daemon perhaps."""
    dawdle(part.rng)
    asyncio.run(_read_and_hold(part))


async def _put(part: Part) -> None:
    async with await connect(part.address, timeout=CALL_S, wait=CALL_S) as client:
        cache = await client.open_cache("c", SPEC)
        while part.goes_on:
            keys, priority = chain(part.rng.randrange(CHAINS)), part.rng.choice(_PRIORITIES)
            if part.rng.random() < 0.1:
                with part.turn():
                    await cache.drop(keys[part.rng.randrange(CHAIN_BLOCKS) :])
            step = part.rng.randint(1, 2)
            for start in range(0, CHAIN_BLOCKS, step):
                with part.turn():
                    some = keys[start : start + step]
                    parent = keys[start - 1] if start else None
                    blocks = [block(key) for key in some]
                    part.has_put(await cache.put(some, blocks, parent=parent, priorities=priority))


def put(part: Part) -> None:
    """The asynchronous client: chains, piece by piece."""
    asyncio.run(_put(part))


def fill(part: Part) -> None:
    """The synchronous client: reserved slots, written by hand, garbage first, then committed or given back as they
    are."""
    with Client(part.address, timeout=CALL_S, wait=CALL_S) as client:
        cache = client.open_cache("c", SPEC)
        while part.goes_on:
            with part.turn(holds=True):
                keys = part.some_chain()
                with cache.reserve(len(keys)) as lease:
                    for index, key in enumerate(keys):
                        scribble_into(lease.view(index), GARBAGE)
                        write_into(lease.view(index), block(key))
                    if part.rng.random() < 0.8:
                        part.has_put(lease.commit(keys, priorities=part.rng.choice(_PRIORITIES)))


def read_blindly(part: Part) -> None:
    """A fault, planted: what is copied is taken for right, whatever has become of its slots meanwhile."""
    copy = Read._copy_from

    def blindly(read: Read, tier: Tier, rows: Rows, places: slice | NDArray[np.intp]) -> NDArray[np.intp]:
        copy(read, tier, rows, places)
        return np.empty(0, np.intp)

    setattr(Read, "_copy_from", blindly)  # noqa: B010  mypy would have it that a method is for ever
    dawdle(part.rng, 10 * _DAWDLE_S)
    asyncio.run(_read_and_hold(part))


PARTS: Final[Mapping[str, Callable[[Part], None]]] = {
    play.__name__: play for play in (read_in_threads, read_and_hold, read_blindly, put, fill)
}


def _play() -> None:
    part = Part(Script(**json.loads(sys.argv[2])))
    try:
        PARTS[sys.argv[1]](part)
    except Exception:  # noqa: BLE001  told as everything else is
        part.wrong(traceback.format_exc())
    print(json.dumps(part.faults))


if __name__ == "__main__":
    _play()
