"""A control segment with anything in it: a client is told so, or misses, and touches nothing but its own mappings."""

import asyncio
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.abi import attach
from kvtier.abi.control import EVENT_EPOCH_OFFSET, HEADER_BYTES, ArenaIdentity, ArenaState, read_shown
from kvtier.abi.key_index import ENTRIES_OFFSET, ENTRY, KEY_BYTES, TIERS_OFFSET
from kvtier.abi.layout import BUCKET_BYTES, BUCKET_ENTRIES, DEVICE, DISK, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.arena import MappedArena
from kvtier.chains import Asked
from kvtier.errors import DaemonError
from kvtier.reading import Reader
from kvtier.types import Tier
from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.core.ids import Tier as DaemonTier
from kvtierd.tiers.arena import Arena as DaemonArena
from kvtierd.tiers.key_index import IndexedBlocks

SPEC: Final = CacheSpec(
    "m",
    "uint8",
    16,
    groups=(
        WindowGroupSpec(pools=(PoolSpec(1, 1, 300, 1), PoolSpec(1, 1, 10, 1))),
        WindowGroupSpec(pools=(PoolSpec(1, 1, 100, 1),), window_tokens=32),
    ),
)
SLOTS: Final = 12
KEYS: Final = [Key(hashlib.sha256(bytes([number])).digest()) for number in range(SLOTS + 4)]
PACKED: Final = b"".join(KEYS)
GROUPS: Final = range(len(SPEC.groups))
LAYOUT: Final = ArenaLayout.plan(
    SPEC, {(group, tier): SLOTS for group in GROUPS for tier in (DEVICE, HOST, DISK)}, indexed=True
)
INDEX: Final = slice(LAYOUT.index_offset, LAYOUT.index_offset + LAYOUT.index_bytes)
BUCKETS: Final = LAYOUT.index_bytes // BUCKET_BYTES


class Given:
    """A daemon's arena, and what its control segment should hold."""

    def __init__(self, arena: DaemonArena) -> None:
        self.arena = arena
        self.right = bytes(arena._control.array)


@pytest.fixture(scope="module")
def ours() -> Iterator[Given]:
    """Every slot of the host tier READY, every third block on the device as well; the last four keys are nowhere."""
    arena = DaemonArena.create("garbage", LAYOUT, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=2, pid=3))
    assert arena.index is not None
    for group in map(GroupId, GROUPS):
        for number in range(SLOTS):
            key, at = KEYS[number], {KEYS[number]: SlotId(number)}
            tiers = (DaemonTier.HOST, DaemonTier.DEVICE)[: 1 + (number % 3 == 0)]
            for tier in tiers:
                arena.begin_writes(tier, group, [SlotId(number)])
                arena.end_writes(tier, group, [SlotId(number)])
            places = (arena.at(tier, group, at) for tier in tiers)
            arena.index.put(IndexedBlocks(group, {key: sum(tier.bit for tier in tiers)}, *places))
    arena.set_state(ArenaState.SERVING)
    yield Given(arena)
    arena.close()


@contextmanager
def sent(control: bytes, ours: Given) -> Iterator[Mapping[str, int]]:
    """Descriptors as they would come over the attach socket, with this for ``control``."""
    fd = os.memfd_create("kvtier:garbage:control", os.MFD_CLOEXEC)
    try:
        os.write(fd, control)
        yield ours.arena.shared(write=False).fds | {attach.CONTROL: fd}
    finally:
        os.close(fd)


def reader_of(arena: MappedArena) -> Reader:
    """Reads without calls, and nobody to tell of them."""
    session = SimpleNamespace(reachable=True)
    binding = SimpleNamespace(mapped=arena, info=SimpleNamespace(remote=False))
    binder: Any = SimpleNamespace(spec=SPEC, maps=True, readable=binding, session=session, asked=Asked())

    async def make() -> Reader:
        return Reader(binder)

    return asyncio.run(make())


def use(arena: MappedArena) -> None:
    """Every way to look into an arena. What comes is checked for its form alone: it may be nonsense."""
    reader = reader_of(arena)
    count = len(KEYS)
    for group in GROUPS:
        if (length := reader.prefix_length(PACKED, [group])) is not None:
            assert 0 <= length <= count
        if (match := reader.match(PACKED, [group])) is not None:
            assert 0 <= match.blocks == len(match.residency) <= count
        for keys in (PACKED, PACKED[: 3 * KEY_BYTES]):
            if (places := reader.locate(keys, group)) is not None:
                assert len(list(places)) == len(keys) // KEY_BYTES
        for tier in (None, Tier.HOST, Tier.DEVICE):
            read = reader.begin(PACKED, group, tier, None)
            read.copy()
            assert 0 <= read.blocks == len(read.rows) <= count
            assert read.done in (True, False)
    if (across := reader.match(PACKED, GROUPS)) is not None:
        assert 0 <= across.blocks <= count


def buckets_of(control: bytearray) -> NDArray[np.uint8]:
    """The index, to be spoilt: [buckets, bytes]."""
    return np.frombuffer(control, np.uint8)[INDEX].reshape(-1, BUCKET_BYTES)


def entries_of(control: bytearray) -> NDArray[np.uint8]:
    """[buckets, entries, bytes]"""
    buckets = buckets_of(control)
    shape, strides = (BUCKETS, BUCKET_ENTRIES, ENTRY.size), (BUCKET_BYTES, ENTRY.size, 1)
    return np.lib.stride_tricks.as_strided(buckets[:, ENTRIES_OFFSET:], shape, strides)


def resealed(control: bytearray) -> bytes:
    """With a sum that is right, so that what the sum covers is looked at."""
    struct.pack_into("<I", control, FIXED_BYTES, zlib.crc32(control[:FIXED_BYTES]))
    return bytes(control)


def try_it(control: bytes, ours: Given) -> None:
    """Refused, or used without harm."""
    with sent(control, ours) as fds:
        try:
            arena = MappedArena(fds, write=False, spec=SPEC)
        except DaemonError as error:
            assert error.reason == "BAD_ARENA"
        else:
            use(arena)


def words(start: int, end: int) -> st.SearchStrategy[int]:
    """Where an aligned u32 starts."""
    return st.integers(start // 4, end // 4 - 1).map(lambda word: word * 4)


FIXED_BYTES: Final = 296
HEADER: Final = st.one_of(words(0, FIXED_BYTES + 4), words(EVENT_EPOCH_OFFSET, HEADER_BYTES))
SEQUENCES: Final = st.integers(0, BUCKETS - 1).map(lambda bucket: LAYOUT.index_offset + bucket * BUCKET_BYTES)
THE_REST: Final = st.one_of(
    SEQUENCES, words(INDEX.start, INDEX.stop), words(INDEX.start, INDEX.stop), words(HEADER_BYTES, LAYOUT.control_bytes)
)
SIZES: Final = st.sampled_from((1, 4, 8))
VALUES: Final = st.one_of(
    st.integers(0, 2**64 - 1), st.integers(0, 64), st.integers(0, 63).map(lambda bit: 1 << bit), st.just(2**64 - 1)
)
Change = tuple[int, int, int]
"""Offset, bytes and value."""


def changed(control: bytes, changes: list[Change]) -> bytearray:
    spoilt = bytearray(control)
    for at, size, value in changes:
        spoilt[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return spoilt


@given(st.lists(st.tuples(HEADER, SIZES, VALUES), min_size=1, max_size=4), st.booleans())
def test_garbage_in_the_header(ours: Given, changes: list[Change], sealed: bool) -> None:
    spoilt = changed(ours.right, changes)
    try_it(resealed(spoilt) if sealed else bytes(spoilt), ours)


@given(st.lists(st.tuples(THE_REST, SIZES, VALUES), min_size=1, max_size=40))
def test_garbage_in_index_and_generations(ours: Given, changes: list[Change]) -> None:
    """Slots beyond the last, generations of no slot, tiers that there are not, sequences odd for ever."""
    try_it(bytes(changed(ours.right, changes)), ours)


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_noise_all_over_the_index(ours: Given, seed: int, keeps_keys: bool) -> None:
    """``keeps_keys``: only what stands behind them is noise, so that lookups believe it."""
    rng = np.random.default_rng(seed)
    spoilt = bytearray(ours.right)
    if keeps_keys:
        for part in (entries_of(spoilt)[:, :, KEY_BYTES:], buckets_of(spoilt)[:, TIERS_OFFSET:ENTRIES_OFFSET]):
            part[:] = rng.integers(0, 256, part.shape, dtype=np.uint8)
    else:
        spoilt[INDEX] = rng.bytes(LAYOUT.index_bytes)
    try_it(bytes(spoilt), ours)


def test_a_block_in_a_slot_that_there_is_not_is_asked_for(ours: Given) -> None:
    spoilt = bytearray(ours.right)
    entries_of(spoilt)[:, :, 48:] = 0xFF
    with sent(bytes(spoilt), ours) as fds:
        read = reader_of(MappedArena(fds, write=False, spec=SPEC)).begin(PACKED[:KEY_BYTES], 0, None, None)
        read.copy()
        assert (read.blocks, read.done) == (0, False)


class Restless(list[int]):
    """The header's words, where the epoch is another one each time."""

    def __getitem__(self, at: Any) -> Any:
        if at == EVENT_EPOCH_OFFSET // 8:
            self[at] = super().__getitem__(at) + 1
        return super().__getitem__(at)


def test_an_epoch_that_does_not_stand_still_shows_no_event() -> None:
    words: Any = Restless([7] * (HEADER_BYTES // 8))
    shown = read_shown(words)
    assert shown.epoch > 7
    assert shown.event == 0
