from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.abi.control import ArenaIdentity, Segment
from kvtier.abi.key_index import ABSENT, Buckets, Entry, IndexReader
from kvtier.abi.layout import DEVICE, DISK, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.ids import EventId, GroupId, Key, SlotId, Tier
from kvtierd.core.manager import Recovered
from kvtierd.core.traits import Traits
from kvtierd.tiers.index_rebuild import Many
from kvtierd.tiers.key_index import KeyIndex, Place

POOLS = (PoolSpec(1, 1, 8),)
SPEC = CacheSpec("m", "uint8", 1, groups=(WindowGroupSpec(0, POOLS), WindowGroupSpec(64, POOLS)))
FULL, SLIDING = GroupId(0), GroupId(1)
GENERATIONS = np.arange(1 << 10, dtype=np.uint64) * np.uint64(2) + np.uint64(1 << 40)
"""Of the slots of one tier."""
HOST_BIT, DEVICE_BIT, DISK_BIT = Tier.HOST.bit, Tier.DEVICE.bit, Tier.DISK.bit


def key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest())


def place(slot: int, generation: int) -> Place:
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

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.layout, self.control)

    @property
    def unindexed(self) -> int:
        return int(self.control[4048:4056].view("<u8")[0])


def test_what_is_put_is_found_until_it_is_gone() -> None:
    index = Index(64)
    index.writer.put(FULL, key(1), HOST_BIT, host=place(7, 22))
    assert index.reader.entry(key(1), FULL) == Entry(HOST_BIT, 7, 22, 0, 0)
    assert index.reader.entry(key(1), SLIDING) is ABSENT
    assert index.reader.entry(key(2), FULL) is ABSENT
    index.writer.put(FULL, key(1), HOST_BIT | DEVICE_BIT | DISK_BIT, device=place(3, 40))
    assert index.reader.entry(key(1), FULL) == Entry(7, 7, 22, 3, 40)
    index.writer.put(FULL, key(1), DEVICE_BIT | DISK_BIT)
    assert index.reader.entry(key(1), FULL) == Entry(DEVICE_BIT | DISK_BIT, 0, 0, 3, 40)
    index.writer.put(FULL, key(1), DISK_BIT)
    index.writer.put(FULL, key(1), DISK_BIT | HOST_BIT, host=place(8, 50))
    assert index.reader.entry(key(1), FULL) == Entry(DISK_BIT | HOST_BIT, 8, 50, 0, 0)
    index.writer.put(FULL, key(1), 0)
    assert index.reader.residency(key(1), FULL) == 0
    assert index.writer.contents() == {}


def test_a_change_that_changes_nothing_writes_nothing() -> None:
    index = Index(4)
    index.writer.put(FULL, key(1), HOST_BIT, host=place(7, 22))
    before = index.control.copy()
    index.writer.put(FULL, key(1), HOST_BIT)
    index.writer.put(FULL, key(2), 0)
    assert np.array_equal(index.control, before)


def test_as_many_blocks_as_there_are_slots_all_find_a_place_however_often_they_change() -> None:
    """Keys that come and go at random leave buckets far less even than those that only come."""
    index = Index(375)
    slots = list(range(2000))
    for number in slots:
        index.writer.put(FULL, key(number), HOST_BIT, host=place(number, 2))
    random = Random(5)
    for number in range(2000, 12_000):
        slot = random.randrange(2000)
        index.writer.put(FULL, key(slots[slot]), 0)
        slots[slot] = number
        index.writer.put(FULL, key(number), HOST_BIT, host=place(slot, 2))
        assert index.unindexed == 0
    found = index.reader.find(packed(slots), FULL)
    assert found.host_slots.tolist() == list(range(2000))
    assert found.sure.all()
    assert len(index.writer.contents()) == 2000


def test_a_block_without_a_place_makes_absence_unsure_and_comes_in_when_there_is_one() -> None:
    index = Index(3)
    for number in range(30):
        index.writer.put(FULL, key(number), HOST_BIT, host=place(number, 2))
    inside = [number for number in range(30) if index.reader.residency(key(number), FULL)]
    outside = [number for number in range(30) if number not in inside]
    assert len(inside) <= 24
    assert index.unindexed == len(outside) >= 6
    assert index.reader.entry(key(99), FULL) is None
    found = index.reader.find(packed([*range(30), 99]), FULL)
    assert np.flatnonzero(found.sure).tolist() == inside
    assert index.reader.prefix_length(packed([*inside, 99]), FULL) is None
    assert index.reader.prefix_length(packed(inside), FULL) == len(inside)
    index.writer.put(FULL, key(outside[0]), HOST_BIT | DISK_BIT)
    index.writer.put(FULL, key(outside[1]), 0)
    for number in inside:
        index.writer.put(FULL, key(number), 0)
    assert index.unindexed == 0
    left = {(FULL, key(n)): Entry(HOST_BIT, n, 2) for n in outside if n != outside[1]}
    left[FULL, key(outside[0])] = Entry(HOST_BIT | DISK_BIT, outside[0], 2)
    assert index.writer.contents() == left
    assert index.reader.entry(key(outside[0]), FULL) == left[FULL, key(outside[0])]
    assert index.reader.entry(key(99), FULL) is ABSENT


def test_many_at_once_stand_where_they_would_have_come_one_by_one() -> None:
    """Two in three places are taken in the end, so most buckets get several of a call."""
    together, alone = Index(100), Index(100)
    for start in range(0, 530, 53):
        slots = {key(number): SlotId(number) for number in range(start, start + 53)}
        together.writer.put_many(FULL, dict.fromkeys(slots, HOST_BIT), (slots, GENERATIONS.data), new=True)
        for name, slot in slots.items():
            alone.writer.put(FULL, name, HOST_BIT, (slot, int(GENERATIONS[slot])))
        assert np.array_equal(together.buckets.whole[:, 1:], alone.buckets.whole[:, 1:])
        assert not (together.buckets.sequences % 2).any()
    assert together.unindexed == 0
    assert np.count_nonzero(together.buckets.tiers) == 530


def test_of_many_at_once_those_without_a_place_wait_for_one() -> None:
    index = Index(3)
    slots = {key(number): SlotId(number) for number in range(60)}
    index.writer.put_many(FULL, dict.fromkeys(slots, HOST_BIT), (slots, GENERATIONS.data), new=True)
    inside = [name for name in slots if index.reader.residency(name, FULL)]
    assert len(inside) == 24
    assert index.unindexed == 36
    index.writer.remove_many(FULL, inside)
    assert index.unindexed == 12
    stored = {(FULL, name): Entry(HOST_BIT, slot, int(GENERATIONS[slot])) for name, slot in slots.items()}
    assert index.writer.contents() == {name: entry for name, entry in stored.items() if name[1] not in inside}


@pytest.mark.parametrize("buckets", [1, 100])
def test_of_many_that_change_at_once_some_are_new(buckets: int) -> None:
    """With one bucket, both that a key may stand in are the same."""
    index = Index(buckets)
    index.writer.put(FULL, key(0), DISK_BIT)
    index.writer.put(FULL, key(39), DISK_BIT)
    index.writer.put_many(FULL, {key(number): HOST_BIT | DISK_BIT for number in range(40)})
    assert index.writer.contents() == {(FULL, key(number)): Entry(HOST_BIT | DISK_BIT) for number in range(40)}


def test_a_change_of_many_that_changes_nothing_writes_nothing() -> None:
    index = Index(100)
    slots = {key(number): SlotId(number) for number in range(40)}
    index.writer.put_many(FULL, dict.fromkeys(slots, HOST_BIT), (slots, GENERATIONS.data), new=True)
    before = index.control.copy()
    index.writer.put_many(FULL, dict.fromkeys(slots, HOST_BIT))
    index.writer.remove_many(FULL, [key(number) for number in range(100, 140)])
    index.writer.remove_many(SLIDING, list(slots))
    assert np.array_equal(index.control, before)


@pytest.mark.parametrize("count", [0, 1, 2, 11, 12, 13, 300, 5000])
def test_the_length_of_a_prefix(count: int) -> None:
    index = Index(2000)
    for number in range(count):
        index.writer.put(FULL, key(number), DISK_BIT)
    for asked in {0, 1, count, count + 1, count + 17, 2 * count, max(0, count - 1)}:
        assert index.reader.prefix_length(packed(range(asked)), FULL) == min(asked, count)
        assert index.reader.prefix_length(memoryview(packed(range(asked))), FULL) == min(asked, count)
        found = index.reader.find(memoryview(packed(range(asked))), FULL)
        assert found.residency.tolist() == [DISK_BIT] * min(asked, count) + [0] * (asked - min(asked, count))
        assert found.sure.all()


def test_a_bucket_that_is_being_written_is_unsure_and_no_other() -> None:
    index = Index(50)
    for number in range(200):
        index.writer.put(FULL, key(number), HOST_BIT, host=place(number, 2))
    torn = 17
    index.buckets.sequences[torn] += np.uint64(1)
    mix = index.buckets.mix
    there = [number for number in range(200) if torn in mix.one(key(number), FULL)[:2]]
    unsure = [number for number in there if index.reader.entry(key(number), FULL) is None]
    assert 0 < len(unsure) < 20
    found = index.reader.find(packed(range(200)), FULL)
    assert np.flatnonzero(~found.sure).tolist() == unsure
    assert [number for number in there if index.reader.residency(key(number), FULL) is None] == unsure
    assert index.reader.prefix_length(packed([*range(100), unsure[0]]), FULL) is None
    unsure = [number for number in range(3000) if index.reader.entry(key(number), FULL) is None]
    assert np.flatnonzero(~index.reader.find(packed(range(3000)), FULL).sure).tolist() == unsure
    with pytest.raises(AssertionError, match="17"):
        index.writer.contents()


def test_an_equal_tag_is_no_equal_key() -> None:
    index = Index(1)
    index.writer.put(FULL, key(1), HOST_BIT, host=place(1, 2))
    index.writer.put(FULL, key(2), HOST_BIT, host=place(2, 2))
    mix = index.buckets.mix
    tags = index.buckets.tags
    tags[0, :] = mix.one(key(3), FULL)[2]
    assert index.reader.entry(key(3), FULL) is ABSENT
    assert index.reader.residency(key(3), FULL) == 0
    for count in (20, 600):
        assert not index.reader.find(packed([3] * count), FULL).residency.any()
    tags[0, :] = mix.one(key(2), FULL)[2]
    assert index.reader.entry(key(2), FULL) == Entry(HOST_BIT, 2, 2)
    assert index.reader.residency(key(2), FULL) == HOST_BIT
    for count in (20, 600):
        assert index.reader.find(packed([2] * count), FULL).host_slots.tolist() == [2] * count
    index.buckets.groups[0, :] = SLIDING
    assert index.reader.entry(key(2), FULL) is ABSENT
    assert index.reader.residency(key(2), FULL) == 0
    for count in (20, 600):
        assert not index.reader.find(packed([2] * count), FULL).residency.any()


@pytest.mark.parametrize("gone", [False, True])
def test_the_length_of_a_prefix_where_the_tags_lie(gone: bool) -> None:
    """Others stand there, whose tags are those of blocks that are not there, or the tag of one that is stands there
    twice, for it was somewhere else before."""
    index = Index(1)
    for number in (100, 1, 2, 3, 101, 102, 103, 104):
        index.writer.put(FULL, key(number), DISK_BIT)
    mix, tags = index.buckets.mix, index.buckets.tags
    if gone:
        index.writer.put(FULL, key(100), 0)
        tags[0, 0] = mix.one(key(2), FULL)[2]
    for place, absent in ((4, 4), (5, 5), (6, 6), (7, 7)):
        tags[0, place] = mix.one(key(absent), FULL)[2]
    for length in range(1, 9):
        assert index.reader.prefix_length(packed(range(1, length + 1)), FULL) == min(length, 3)


def test_a_bucket_that_was_being_written_is_looked_at_again_for_the_length_of_a_prefix() -> None:
    class Interrupted(IndexReader):
        unsure = True

        def residency(self, key: bytes, group: int) -> int | None:
            unsure, self.unsure = self.unsure, False
            return None if unsure else super().residency(key, group)

    index = Index(50)
    for number in range(20):
        index.writer.put(FULL, key(number), DISK_BIT)
    assert Interrupted(index.layout, index.control).prefix_length(packed(range(20)), FULL) == 20
    assert Interrupted(index.layout, index.control).prefix_length(packed(range(1)), FULL) is None
    assert Interrupted(index.layout, index.control).prefix_length(packed(range(30)), FULL) == 20


def recovered(number: int, residency: int) -> Recovered:
    slots = [SlotId(number * 3 + tier) if residency & 1 << tier else None for tier in (DEVICE, HOST, DISK)]
    return Recovered(slots[DISK], key(number), None, Traits(35), device=slots[DEVICE], host=slots[HOST])


def many(blocks: dict[GroupId, dict[int, int]]) -> Many:
    """By group, the residency of each numbered block."""
    generations = {
        (tier, group): np.arange(100_000, dtype=np.uint64) * np.uint64(2) + np.uint64(int(tier) * 10**6)
        for tier in (Tier.HOST, Tier.DEVICE)
        for group in (FULL, SLIDING)
    }
    found = {group: [recovered(*one) for one in some.items()] for group, some in blocks.items()}
    return Many.of(found, generations)


def expected(blocks: dict[GroupId, dict[int, int]]) -> dict[tuple[GroupId, Key], Entry]:
    entries = {}
    for group, some in blocks.items():
        for number, residency in some.items():
            host = (number * 3 + HOST, (number * 3 + HOST) * 2 + 10**6) if residency & HOST_BIT else (0, 0)
            device = (number * 3, number * 6) if residency & DEVICE_BIT else (0, 0)
            entries[group, key(number)] = Entry(residency, *host, *device)
    return entries


SOME = st.dictionaries(st.integers(0, 60), st.integers(1, 7))
BLOCKS = st.fixed_dictionaries({FULL: SOME, SLIDING: SOME})


@given(st.integers(1, 20), BLOCKS, BLOCKS, st.lists(st.integers(0, 19)))
def test_a_rebuild_leaves_just_the_blocks_there_are_whatever_stood_there(
    buckets: int,
    before: dict[GroupId, dict[int, int]],
    after: dict[GroupId, dict[int, int]],
    torn: list[int],
) -> None:
    index = Index(buckets)
    index.writer.rebuild(many(before))
    assert index.writer.contents() == expected(before)
    for bucket in torn:
        if bucket < buckets:
            index.buckets.sequences[bucket] |= np.uint64(1)
            index.buckets.whole[bucket, 9] ^= np.uint64(1 << bucket)
    successor = KeyIndex(index.layout, index.control, epoch=1)
    successor.rebuild(many(after))
    assert successor.contents() == expected(after)
    for (group, name), entry in expected(after).items():
        assert index.reader.entry(name, group) == entry or index.unindexed
    places = int(np.count_nonzero(index.buckets.tiers))
    assert places + index.unindexed == len(expected(after))


def test_a_rebuild_touches_no_bucket_that_is_right() -> None:
    index = Index(400)
    blocks = {FULL: dict.fromkeys(range(1500), HOST_BIT)}
    index.writer.rebuild(many(blocks))
    assert index.unindexed == 0
    sequences = index.buckets.sequences.copy()
    KeyIndex(index.layout, index.control, epoch=1).rebuild(many(blocks))
    assert np.array_equal(index.buckets.sequences, sequences)
    index.writer.put(FULL, key(77), 0)
    index.writer.put(FULL, key(5000), DISK_BIT)
    sequences = index.buckets.sequences.copy()
    KeyIndex(index.layout, index.control, epoch=1).rebuild(many(blocks))
    assert np.count_nonzero(index.buckets.sequences != sequences) <= 2
    assert index.writer.contents() == expected(blocks)


def test_shown_events_count_in_their_epoch() -> None:
    index = Index(1)
    assert index.reader.shown() == (1, 0)
    index.writer.show(EventId(17))
    assert index.reader.shown() == (1, 17)
    KeyIndex(index.layout, index.control, epoch=2).show(EventId(3))
    assert index.reader.shown() == (2, 3)


NUMBERS = 201
NUMBER = st.integers(0, NUMBERS - 1)
GROUP = st.sampled_from([FULL, SLIDING])
CHANGE = st.tuples(st.integers(0, 7), st.integers(0, 2**31), st.integers(0, 2**31))
CHANGES = st.dictionaries(NUMBER, CHANGE, min_size=1, max_size=60)


def _place(slot: SlotId) -> Place:
    return slot, int(GENERATIONS[slot])


def _where(slot: SlotId | None) -> Place | None:
    return None if slot is None else _place(slot)


class AgainstADict(RuleBasedStateMachine):
    """Whatever is put, in an index that is often too small for it."""

    @initialize(buckets=st.integers(1, 60))
    def make(self, buckets: int) -> None:
        self.index = Index(buckets)
        self.model: dict[tuple[GroupId, Key], Entry] = {}

    @rule(group=GROUP, changes=CHANGES, at_once=st.booleans())
    def put(self, group: GroupId, changes: dict[int, tuple[int, int, int]], at_once: bool) -> None:
        """Each as its own number says, and where it has got to."""
        residencies = {key(number): residency for number, (residency, _, _) in changes.items()}
        places = {key(number): places for number, (_, *places) in changes.items()}
        self._put(group, residencies, places, at_once=at_once)

    @rule(
        group=GROUP,
        numbers=st.sets(NUMBER, min_size=3, max_size=200),
        residency=st.integers(1, 7),
        at_once=st.booleans(),
    )
    def put_alike(self, group: GroupId, numbers: set[int], residency: int, at_once: bool) -> None:
        """All to the same tiers, wherever they were."""
        residencies = {key(number): residency for number in sorted(numbers)}
        places = {name: [slot, slot + 1] for slot, name in enumerate(residencies)}
        self._put(group, residencies, places, at_once=at_once)

    @rule(group=GROUP, residency=st.integers(1, 7))
    def put_all(self, group: GroupId, residency: int) -> None:
        """All there are, to the same tiers: often with nothing new about where they are."""
        residencies = dict.fromkeys([name for its, name in self.model if its == group], residency)
        if residencies:
            self._put(group, residencies, {name: [1, 2] for name in residencies}, at_once=True)

    def _put(self, group: GroupId, residencies: dict[Key, int], places: dict[Key, list[int]], *, at_once: bool) -> None:
        """``places``: host and device slots of those that get there."""
        slots: tuple[dict[Key, SlotId], dict[Key, SlotId]] = {}, {}
        for name, residency in residencies.items():
            old = self.model.pop((group, name), ABSENT)
            for its, bit, slot in zip(slots, (HOST_BIT, DEVICE_BIT), places[name], strict=True):
                if residency & ~old.residency & bit:
                    its[name] = SlotId(slot % len(GENERATIONS))
            where = [_where(its.get(name)) for its in slots]
            if residency:
                at_host = (where[0] or old[1:3]) if residency & HOST_BIT else (0, 0)
                at_device = (where[1] or old[3:5]) if residency & DEVICE_BIT else (0, 0)
                self.model[group, name] = Entry(residency, *at_host, *at_device)
        host, device = slots
        if at_once:
            self.index.writer.put_many(group, residencies, (host, GENERATIONS.data), (device, GENERATIONS.data))
        else:
            for name, residency in residencies.items():
                self.index.writer.put(group, name, residency, _where(host.get(name)), _where(device.get(name)))

    @rule(group=GROUP, numbers=st.sets(NUMBER, max_size=200))
    def put_new(self, group: GroupId, numbers: set[int]) -> None:
        """Blocks of which the caller knows that they are not there."""
        names = [key(number) for number in sorted(numbers) if (group, key(number)) not in self.model]
        slots = {name: SlotId(slot) for slot, name in enumerate(names)}
        self.model |= {(group, name): Entry(HOST_BIT, *_place(slot), 0, 0) for name, slot in slots.items()}
        residencies = dict.fromkeys(names, HOST_BIT)
        self.index.writer.put_many(group, residencies, (slots, GENERATIONS.data), new=True)

    @rule(group=GROUP, numbers=st.sets(NUMBER, max_size=200))
    def remove(self, group: GroupId, numbers: set[int]) -> None:
        """Some of which were not there."""
        for number in numbers:
            self.model.pop((group, key(number)), None)
        self.index.writer.remove_many(group, [key(number) for number in numbers])

    @invariant()
    def agrees(self) -> None:
        assert self.index.writer.contents() == self.model
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
                assert Entry(*map(int, row)) == (entry or ABSENT)
                if entry is None:
                    assert self.index.unindexed
                else:
                    assert entry == self.model.get(name, ABSENT)


def test_whatever_is_put_is_what_everybody_reads() -> None:
    run_state_machine_as_test(AgainstADict, settings=settings(max_examples=15, stateful_step_count=30))
