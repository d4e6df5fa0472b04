"""One process changes slots, generations and the key index as fast as it can; another reads, and must never be told
what is not so. With each of three faults planted, the reader's own checks find it out."""

import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import DISK, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.tiers import key_index
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.key_index import At, IndexedBlocks, KeyIndex
from tests.unit.tiers.arena_helpers import finish_client, start_client

SPEC = CacheSpec.single("m", "uint8", 1, 1, 1, 32 << 10)
"""64 KiB a block: copies and writes are sure to meet."""
GROUP = GroupId(0)
CHANGING, STANDING, SLOTS = 64, 16, 32
"""Keys 0 to 63 take turns in slots 0 to 15; 100 to 115 keep slots 16 to 31 and are now and then on disk alone."""
SHORTEST, LONGEST = 16, 64
"""A chain of keys from 1000 on, on disk, is never shorter and never longer."""
TOGETHER = range(200, 248)
"""Blocks that change all at once: on disk alone, in the host tier too, or gone."""
HOST_BIT, DISK_BIT = Tier.HOST.bit, Tier.DISK.bit
LONG_S = 120.0

READER = """
import hashlib
from kvtier.abi.key_index import KEY_BYTES, IndexEntry, IndexReader
from kvtier.abi.layout import *
from tests.unit.tiers.test_index_concurrency import SPEC

control, host = (np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8) for fd in fds)
layout = ArenaLayout.read(control, SPEC)
reader, generations = IndexReader(layout, control), layout.generations(control, HOST, 0)
slots = layout.pool_view(host, HOST, 0, 0)
numbers = [*range(64), *range(100, 116), *range(200, 248)]
keys = {n: hashlib.sha256(n.to_bytes(8, "big")).digest() for n in [*numbers, *range(1000, 1064)]}
packed = b"".join(keys[n] for n in numbers)
chain = b"".join(keys[n] for n in range(1000, 1064))
accepted = reused = unsure = 0
stood = {}

def wrong(*what):
    print("wrong:", *what)
    sys.exit()

def check(n, entry):
    global accepted, reused, unsure
    if entry is None:
        unsure += 1
    elif entry.residency & 2 == 0:
        if n >= 100 and entry != IndexEntry(4) and (n < 200 or entry != IndexEntry()):
            wrong("a block that is on disk alone", n, entry)
    elif n >= 100:
        if entry.host_slot != n - 84 or stood.setdefault(n, entry.host_generation) != entry.host_generation:
            wrong("a block that stands still has moved", n, entry)
    else:
        copy = slots[entry.host_slot].copy().view("<u8")
        if int(generations[entry.host_slot]) != entry.host_generation:
            reused += 1
            return
        accepted += 1
        if (copy != (n << 48 | entry.host_generation)).any():
            wrong("the bytes of", n, entry, [hex(int(one)) for one in np.unique(copy)])

print("reading", flush=True)
turn = 0
while turn < TURNS or accepted < 500 or reused < 10:
    turn += 1
    for n in numbers[turn % 7 :: 7]:
        check(n, reader.entry(keys[n], 0))
    found = reader.find(packed, 0)
    for row in range(turn % 7, len(numbers), 7):
        entry = IndexEntry(*(int(column[row]) for column in (
            found.residency, found.host_slots, found.host_generations, found.device_slots, found.device_generations)))
        check(numbers[row], entry if found.sure[row] else None)
    for length in (10, 16, 40, 64):
        present = reader.prefix_length(chain[: length * KEY_BYTES], 0)
        if present is not None and not min(length, 16) <= present <= length:
            wrong("a prefix of", length, "is", present)
print("right", accepted, reused, unsure)
"""


def key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest())


class Writer:
    """The daemon's side, in the daemon's order. ``no_generation``: a slot that is written again keeps its generation.
    ``late_odd``: its bytes change before the generation turns odd."""

    def __init__(self, arena: Arena, *, no_generation: bool = False, late_odd: bool = False) -> None:
        assert arena.index is not None
        self._arena = arena
        self._index = arena.index
        self._bytes = arena.layout.pool_view(arena.data(Tier.HOST), HOST, 0, 0)
        self._no_generation = no_generation
        self._late_odd = late_odd
        self._holds: dict[SlotId, int] = {}
        self._random = Random(7)
        self._length = SHORTEST
        self._changes = 0
        for number in range(STANDING):
            self._store(SlotId(SLOTS - STANDING + number), 100 + number)
        for number in range(SHORTEST):
            self._put(1000 + number, DISK_BIT)

    def change(self) -> None:
        free = [number for number in range(CHANGING) if number not in self._holds.values()]
        slot = SlotId(self._random.randrange(SLOTS - STANDING))
        if slot in self._holds:
            self._forget(slot)
        self._store(slot, self._random.choice(free))
        standing = self._random.randrange(STANDING)
        where = (SlotId(SLOTS - STANDING + standing), self._generation(SlotId(SLOTS - STANDING + standing)))
        self._put(100 + standing, DISK_BIT)
        self._put(100 + standing, DISK_BIT | HOST_BIT, host=where)
        grow = self._length == SHORTEST or (self._length < LONGEST and self._random.random() < 0.5)
        self._put(1000 + self._length - (not grow), DISK_BIT if grow else 0)
        self._length += 1 if grow else -1
        self._changes += 1
        if self._changes % 4 == 0:
            self._change_together()

    def _change_together(self) -> None:
        keys = [key(number) for number in TOGETHER]
        at = {key(number): (SlotId(number - 84), 8) for number in TOGETHER}
        on_disk, on_both = dict.fromkeys(keys, DISK_BIT), dict.fromkeys(keys, DISK_BIT | HOST_BIT)
        self._index.put(IndexedBlocks(GROUP, on_disk), new=True)
        for _ in range(3):
            self._index.put(IndexedBlocks(GROUP, on_both, at))
            self._index.put(IndexedBlocks(GROUP, on_disk))
        self._index.put(IndexedBlocks(GROUP, dict.fromkeys(keys, 0)))

    def _put(self, number: int, residency: int, host: At | None = None) -> None:
        self._index.put(IndexedBlocks(GROUP, {key(number): residency}, {} if host is None else {key(number): host}))

    def _forget(self, slot: SlotId) -> None:
        if not self._no_generation and not self._late_odd:
            self._arena.begin_writes(Tier.HOST, GROUP, [slot])
        self._put(self._holds.pop(slot), 0)

    def _store(self, slot: SlotId, number: int) -> None:
        fresh = self._generation(slot) % 2 == 1
        generation = self._generation(slot) + (1 if fresh else 0 if self._no_generation else 2)
        self._bytes[slot].view("<u8")[:] = number << 48 | generation
        if self._late_odd:  # on one core, too, the reader meets new bytes under the old generation
            time.sleep(0.001)
        if not self._no_generation or fresh:
            self._arena.begin_writes(Tier.HOST, GROUP, [slot])
            self._arena.end_writes(Tier.HOST, GROUP, [slot])
        if number < 100:
            self._holds[slot] = number
        self._put(number, HOST_BIT, host=(slot, self._generation(slot)))

    def _generation(self, slot: SlotId) -> int:
        return self._arena.generation(Tier.HOST, GROUP, slot)


class Slowly:
    """Takes its time between an entry's places and its tier bits."""

    def __init__(self, code: Any) -> None:
        self._code = code
        self.unpack_from = code.unpack_from

    def pack_into(self, *arguments: Any) -> None:
        self._code.pack_into(*arguments)
        until = time.perf_counter_ns() + 20_000
        while time.perf_counter_ns() < until:
            pass


class NeverOdd:
    """The header's and the buckets' words, where sequences stay what they are."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, at: int) -> int:
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        """All that is written so in this test is sequences."""


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(key_index, "_PLACES", Slowly(key_index._PLACES))
    layout = ArenaLayout.plan(SPEC, {(0, HOST): SLOTS, (0, DISK): 200}, indexed=True)
    arena = Arena.create("concurrent", layout, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=3, pid=1))
    yield arena
    arena.close()


def report(arena: Arena, writer: Writer, turns: int) -> list[str]:
    """What the reader says in the end, who reads while the writer writes."""
    reader = start_client(READER.replace("TURNS", str(turns)), *arena.shared(write=False).fds.values())
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reading\n"
    _write_until(lambda: reader.poll() is not None, writer, reader)
    return finish_client(reader).split()


def _write_until(over: Callable[[], bool], writer: Writer, reader: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONG_S
    while not over():
        for _ in range(50):
            writer.change()
        if time.monotonic() > deadline:
            reader.kill()
            pytest.fail("the reader does not end")


def test_a_reader_is_never_told_what_is_not_so(arena: Arena) -> None:
    verdict, accepted, reused, _ = report(arena, Writer(arena), turns=400)
    assert verdict == "right"
    assert int(accepted) >= 500
    assert int(reused) >= 10


def no_generation(arena: Arena) -> Writer:
    return Writer(arena, no_generation=True)


def late_odd(arena: Arena) -> Writer:
    return Writer(arena, late_odd=True)


def never_odd(arena: Arena) -> Writer:
    index: KeyIndex | None = arena.index
    assert index is not None
    writer = Writer(arena)
    object.__setattr__(index, "_words", NeverOdd(index._words))
    return writer


@pytest.mark.parametrize(
    ("fault", "found_out"), [(no_generation, "the bytes of"), (late_odd, "the bytes of"), (never_odd, "a block that")]
)
def test_the_reader_finds_out(arena: Arena, fault: Callable[[Arena], Writer], found_out: str) -> None:
    said = " ".join(report(arena, fault(arena), turns=1_000_000))
    assert said.startswith(f"wrong: {found_out}"), said
