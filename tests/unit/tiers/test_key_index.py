import hashlib
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.abi.control import ArenaIdentity, Segment
from kvtier.abi.key_index import ABSENT, GROUPS_OFFSET, TAGS_OFFSET, Buckets, IndexEntry, IndexReader
from kvtier.abi.layout import BUCKET_ENTRIES, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.tiers.key_index import At, IndexedBlocks, KeyIndex

POOLS = (PoolSpec(1, 1, 8),)
SPEC = CacheSpec("m", "uint8", 1, groups=(WindowGroupSpec(0, POOLS), WindowGroupSpec(64, POOLS)))
FULL, SLIDING = GroupId(0), GroupId(1)
HOST_BIT, DEVICE_BIT, DISK_BIT = Tier.HOST.bit, Tier.DEVICE.bit, Tier.DISK.bit


def key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest())


def place(slot: int, generation: int) -> At:
    return SlotId(slot), generation


def packed(numbers: Iterator[int] | range | list[int]) -> bytes:
    return b"".join(key(number) for number in numbers)


class Index:
    """A control segment with its writer and a reader. ``buckets``: how large the index is."""

    def __init__(self, buckets: int, seed: bytes = bytes(range(32))) -> None:
        slots = buckets * 16 // 3
        self.layout = ArenaLayout.plan(SPEC, {(0, HOST): slots}, indexed=True)
        assert self.layout.index_bytes == buckets * 512
        self.control: Segment = np.zeros(self.layout.control_bytes, np.uint8)
        self.layout.initialise(self.control, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=1, pid=1), seed)
        self.writer = KeyIndex(self.layout, self.control, epoch=1)
        self.reader = IndexReader(self.layout, self.control)

    def put(self, group: GroupId, name: Key, residency: int, host: At | None = None, device: At | None = None) -> None:
        at_host, at_device = ({} if at is None else {name: at} for at in (host, device))
        self.writer.put(IndexedBlocks(group, {name: residency}, at_host, at_device))

    def residency(self, number: int) -> int | None:
        entry = self.reader.entry(key(number), FULL)
        return None if entry is None else entry.residency

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.layout, self.control)

    @property
    def unindexed(self) -> int:
        return int(self.control[4048:4056].view("<u8")[0])


def test_as_many_blocks_as_there_are_slots_all_find_a_place_however_often_they_change() -> None:
    """Keys that come and go at random leave buckets far less even than those that only come."""
    index = Index(375)
    slots = list(range(2000))
    for number in slots:
        index.put(FULL, key(number), HOST_BIT, host=place(number, 2))
    random = Random(5)
    for number in range(2000, 12_000):
        slot = random.randrange(2000)
        index.put(FULL, key(slots[slot]), 0)
        slots[slot] = number
        index.put(FULL, key(number), HOST_BIT, host=place(slot, 2))
        assert index.unindexed == 0
    found = index.reader.find(packed(slots), FULL)
    assert found.host_slots.tolist() == list(range(2000))
    assert found.sure.all()
    assert len(index.writer.contents()) == 2000


@pytest.mark.parametrize("count", [0, 1, 2, 11, 12, 13, 300, 5000])
def test_the_length_of_a_prefix(count: int) -> None:
    index = Index(2000)
    for number in range(count):
        index.put(FULL, key(number), DISK_BIT)
    for asked in {0, 1, count, count + 1, count + 17, 2 * count, max(0, count - 1)}:
        assert index.reader.prefix_length(packed(range(asked)), FULL) == min(asked, count)
        assert index.reader.prefix_length(memoryview(packed(range(asked))), FULL) == min(asked, count)
        found = index.reader.find(memoryview(packed(range(asked))), FULL)
        assert found.residency.tolist() == [DISK_BIT] * min(asked, count) + [0] * (asked - min(asked, count))
        assert found.sure.all()


def test_a_bucket_that_is_being_written_is_unsure_and_no_other() -> None:
    index = Index(50)
    for number in range(200):
        index.put(FULL, key(number), HOST_BIT, host=place(number, 2))
    torn = 17
    index.buckets.sequences[torn] += np.uint64(1)
    mix = index.buckets.mix
    there = [number for number in range(200) if torn in mix.one(key(number), FULL)[:2]]
    unsure = [number for number in there if index.reader.entry(key(number), FULL) is None]
    assert 0 < len(unsure) < 20
    found = index.reader.find(packed(range(200)), FULL)
    assert np.flatnonzero(~found.sure).tolist() == unsure
    assert index.reader.prefix_length(packed([*range(100), unsure[0]]), FULL) is None
    unsure = [number for number in range(3000) if index.reader.entry(key(number), FULL) is None]
    assert np.flatnonzero(~index.reader.find(packed(range(3000)), FULL).sure).tolist() == unsure
    with pytest.raises(AssertionError, match="17"):
        index.writer.contents()


def test_an_equal_tag_is_no_equal_key() -> None:
    index = Index(1)
    index.put(FULL, key(1), HOST_BIT, host=place(1, 2))
    index.put(FULL, key(2), HOST_BIT, host=place(2, 2))
    mix = index.buckets.mix
    head = index.buckets.whole[0]
    tags = head.view("<u4")[TAGS_OFFSET // 4 :][:BUCKET_ENTRIES]
    tags[:] = mix.one(key(3), FULL)[2]
    assert index.reader.entry(key(3), FULL) is ABSENT
    for count in (20, 600):
        assert not index.reader.find(packed([3] * count), FULL).residency.any()
    tags[:] = mix.one(key(2), FULL)[2]
    assert index.reader.entry(key(2), FULL) == IndexEntry(HOST_BIT, 2, 2)
    for count in (20, 600):
        assert index.reader.find(packed([2] * count), FULL).host_slots.tolist() == [2] * count
    head.view("<u2")[GROUPS_OFFSET // 2 :][:BUCKET_ENTRIES] = SLIDING
    assert index.reader.entry(key(2), FULL) is ABSENT
    for count in (20, 600):
        assert not index.reader.find(packed([2] * count), FULL).residency.any()


def standing(blocks: dict[GroupId, dict[int, int]]) -> list[IndexedBlocks]:
    """By group, the residency of each numbered block."""
    found = []
    for group, some in blocks.items():
        host = {key(n): place(3 * n + 1, 6 * n + 10**6) for n, bits in some.items() if bits & HOST_BIT}
        device = {key(n): place(3 * n, 6 * n + 2) for n, bits in some.items() if bits & DEVICE_BIT}
        found.append(IndexedBlocks(group, {key(number): bits for number, bits in some.items()}, host, device))
    return found


def expected(blocks: dict[GroupId, dict[int, int]]) -> dict[tuple[GroupId, Key], IndexEntry]:
    return {
        (group, name): IndexEntry(bits, *host.get(name, (0, 0)), *device.get(name, (0, 0)))
        for group, some, host, device in standing(blocks)
        for name, bits in some.items()
    }


def assert_holds(index: Index, blocks: dict[tuple[GroupId, Key], IndexEntry]) -> None:
    """These blocks, some of them without a place."""
    contents = index.writer.contents()
    assert contents.keys() == blocks.keys()
    assert {name: entry for name, entry in contents.items() if entry is not None}.items() <= blocks.items()
    assert list(contents.values()).count(None) == index.unindexed


SOME = st.dictionaries(st.integers(0, 60), st.integers(1, 7))
BLOCKS = st.fixed_dictionaries({FULL: SOME, SLIDING: SOME})


@given(st.integers(1, 20), BLOCKS, BLOCKS, st.lists(st.integers(0, 19)))
def test_a_rebuild_leaves_just_the_blocks_there_are_whatever_stood_there(
    buckets: int, before: dict[GroupId, dict[int, int]], after: dict[GroupId, dict[int, int]], torn: list[int]
) -> None:
    index = Index(buckets)
    index.writer.rebuild(standing(before))
    assert_holds(index, expected(before))
    for bucket in torn:
        if bucket < buckets:
            index.buckets.sequences[bucket] |= np.uint64(1)
            index.buckets.whole[bucket, 9] ^= np.uint64(1 << bucket)
    index.writer = KeyIndex(index.layout, index.control, epoch=1)
    index.writer.rebuild(standing(after))
    assert_holds(index, expected(after))
    for (group, name), entry in expected(after).items():
        assert index.reader.entry(name, group) == entry or index.unindexed


NUMBERS = 201
NUMBER = st.integers(0, NUMBERS - 1)
GROUP = st.sampled_from([FULL, SLIDING])
CHANGE = st.tuples(st.integers(0, 7), st.integers(0, 2**31), st.integers(0, 2**31))


class AgainstADict(RuleBasedStateMachine):
    """Whatever is put, in an index that is often too small for it."""

    @initialize(buckets=st.integers(1, 60))
    def make(self, buckets: int) -> None:
        self.index = Index(buckets)
        self.model: dict[tuple[GroupId, Key], IndexEntry] = {}

    @rule(group=GROUP, changes=st.dictionaries(NUMBER, CHANGE, min_size=1, max_size=200))
    def put(self, group: GroupId, changes: dict[int, tuple[int, int, int]]) -> None:
        """A block that comes into a tier has got to a slot there; others have got nowhere."""
        arrived: tuple[dict[Key, At], dict[Key, At]] = {}, {}
        for number, (residency, *slots) in changes.items():
            name = key(number)
            old = self.model.pop((group, name), ABSENT)
            for at, bit, slot in zip(arrived, (HOST_BIT, DEVICE_BIT), slots, strict=True):
                if residency & ~old.residency & bit:
                    at[name] = place(slot, 2 * slot)
            if residency:
                host = arrived[0].get(name, old[1:3]) if residency & HOST_BIT else (0, 0)
                device = arrived[1].get(name, old[3:5]) if residency & DEVICE_BIT else (0, 0)
                self.model[group, name] = IndexEntry(residency, *host, *device)
        residencies = {key(number): residency for number, (residency, _, _) in changes.items()}
        self.index.writer.put(IndexedBlocks(group, residencies, *arrived))

    @rule(group=GROUP, numbers=st.sets(NUMBER, max_size=200))
    def put_new(self, group: GroupId, numbers: set[int]) -> None:
        """Blocks of which the caller knows that they are not there."""
        at = {key(n): place(n, 2 * n) for n in sorted(numbers) if (group, key(n)) not in self.model}
        self.model |= {(group, name): IndexEntry(HOST_BIT, *where, 0, 0) for name, where in at.items()}
        self.index.writer.put(IndexedBlocks(group, dict.fromkeys(at, HOST_BIT), at), new=True)

    @invariant()
    def agrees(self) -> None:
        assert_holds(self.index, self.model)
        for group in (FULL, SLIDING):
            found = self.index.reader.find(packed(range(NUMBERS)), group)
            for number in range(NUMBERS):
                name = group, key(number)
                entry = self.index.reader.entry(key(number), group)
                row = (
                    found.residency[number],
                    found.host_slots[number],
                    found.host_generations[number],
                    found.device_slots[number],
                    found.device_generations[number],
                )
                assert bool(found.sure[number]) == (entry is not None)
                assert IndexEntry(*map(int, row)) == (entry or ABSENT)
                if entry is None:
                    assert self.index.unindexed
                else:
                    assert entry == self.model.get(name, ABSENT)


def test_whatever_is_put_is_what_everybody_reads() -> None:
    run_state_machine_as_test(AgainstADict, settings=settings(max_examples=15, stateful_step_count=30))
