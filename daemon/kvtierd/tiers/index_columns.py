"""Many blocks of a key index at once, by column: a dozen of numpy's calls instead of as many steps for each block.

What a reader relies on is kept, a few buckets at a time: their sequences are odd before anything else of them is
stored, and even after all of it, each by a store of its own. Where two blocks come into one bucket at once, it turns
odd once and even once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.key_index import ENTRIES_OFFSET, ENTRY, GROUPS_OFFSET, TAGS_OFFSET, TIERS_OFFSET, Buckets
from kvtier.abi.key_mix import I64, U64
from kvtier.abi.layout import BUCKET_BYTES, BUCKET_ENTRIES
from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.tiers.index_rebuild import FILL_FIRST

_HOST: Final = Tier.HOST.bit
_DEVICE: Final = Tier.DEVICE.bit
_SLICE: Final = 32
"""Blocks written at a time: readers find their buckets odd for some 2 us, and look again for 10."""
_WORDS: Final = BUCKET_BYTES // 8
_TIERS_WORD: Final = TIERS_OFFSET // 8
_ENTRY_WORDS: Final = ENTRY.size // 8
_KEY: Final = slice(0, 4)
_PLACES: Final = slice(4, 7)
# Of the part of a bucket that stands before its entries.
_TAGS: Final = slice(TAGS_OFFSET // 4, TAGS_OFFSET // 4 + BUCKET_ENTRIES)
_GROUPS: Final = slice(GROUPS_OFFSET // 2, GROUPS_OFFSET // 2 + BUCKET_ENTRIES)
_TIERS: Final = slice(TIERS_OFFSET, TIERS_OFFSET + BUCKET_ENTRIES)

# Arrays of no dimension: numpy takes half as long with these as with numbers of Python's.
_ONE: Final = np.array(1, np.uint64)
_NUMBER_BITS: Final = np.array(3)
_NUMBER: Final = np.array(BUCKET_ENTRIES - 1)

# Where a place's words, tag, group and tier bits stand among all such, by its bucket and its number there.
_BY_BUCKET: Final = np.array([[BUCKET_BYTES // size] for size in (8, 4, 2, 1)])
_BY_NUMBER: Final = np.array([[_ENTRY_WORDS], [1], [1], [1]])
_FROM: Final = np.array([[ENTRIES_OFFSET // 8], [TAGS_OFFSET // 4], [GROUPS_OFFSET // 2], [TIERS_OFFSET]])
_ENTRY: Final = np.arange(_ENTRY_WORDS)

_EMPTY: Final = bytes(BUCKET_ENTRIES - mask.bit_count() for mask in range(1 << BUCKET_ENTRIES))
"""Of a bucket whose taken places are these bits: how many are empty."""
_FIRST_EMPTY: Final = bytes((~mask & mask + 1).bit_length() - 1 for mask in range(1 << BUCKET_ENTRIES))


class Slots(NamedTuple):
    """Where blocks have got to in one tier, parallel arrays."""

    slots: I64
    generations: U64

    @classmethod
    def of(cls, slots: Sequence[SlotId], generations: memoryview) -> Self:
        """``generations``: of all slots there."""
        at = np.array(slots, np.int64)
        return cls(at, np.frombuffer(generations, np.uint64)[at])


class Found(NamedTuple):
    """Blocks that stand in the index, in parallel arrays: which of those looked for, bucket and number of its place,
    and what stands there. One whose two buckets are the same is there twice."""

    rows: I64
    buckets: I64
    numbers: I64
    entries: U64
    tiers: NDArray[np.uint8]

    def only(self, some: NDArray[np.bool_]) -> Found:
        return Found(self.rows[some], self.buckets[some], self.numbers[some], self.entries[some], self.tiers[some])

    def others(self, count: int) -> list[int]:
        """Rows of those of ``count`` that were looked for that do not stand there."""
        missing = np.ones(count, np.bool_)
        missing[self.rows] = False
        rows: list[int] = missing.nonzero()[0].tolist()
        return rows


def packed(keys: Sequence[Key]) -> U64:
    """[n, 4]."""
    return np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)


class Columns:
    """One thread at a time. Keys are of one group, and distinct."""

    def __init__(self, buckets: Buckets) -> None:
        self._mix: Final = buckets.mix
        self._sequences: Final = buckets.sequences
        self._heads: Final = buckets.head_items
        self._entries: Final = buckets.entry_items
        self._words: Final = buckets.whole.reshape(-1)
        self._tags: Final = self._words.view("<u4")
        self._groups: Final = self._words.view("<u2")
        self._tiers: Final = self._words.view("u1")

    def find(self, keys: U64, group: GroupId) -> Found:
        """Those of them that stand in the index."""
        both, tags = self._mix.buckets_and_tags(keys, int(group))
        heads = self._heads[both]
        equal = heads.view("<u4").reshape(2, len(keys), -1)[:, :, _TAGS] == tags.astype(np.uint32)[:, None]
        (hits,) = equal.reshape(-1).nonzero()
        some, numbers = hits >> _NUMBER_BITS, hits & _NUMBER
        rows, buckets = some % len(keys), both[some]
        entries = self._entries[buckets, numbers].view("<u8").reshape(-1, _ENTRY_WORDS)
        groups = heads.view("<u2").reshape(len(both), -1)[:, _GROUPS].reshape(-1)[hits]
        tiers = heads.view("u1").reshape(len(both), -1)[:, _TIERS].reshape(-1)[hits]
        found = Found(rows, buckets, numbers, entries, tiers)
        if (
            len(hits) == len(keys)
            and entries[:, _KEY].tobytes() == keys[rows].tobytes()
            and groups.tobytes() == int(group).to_bytes(2, "little") * len(hits)
            and 0 not in tiers.tobytes()
        ):
            return found
        right = (entries[:, _KEY] == keys[rows]).all(axis=1)
        right &= groups == group
        right &= tiers != 0
        return found.only(right)

    def remove(self, found: Found) -> None:
        """Each is there until its tier bits are stored as 0."""
        self._tiers[found.buckets * BUCKET_BYTES + found.numbers + TIERS_OFFSET] = 0

    def change(self, found: Found, residency: int, host: Slots | None, device: Slots | None) -> None:
        """All of these are READY in just these tiers. ``host``, ``device``: of all that were looked for; None: these
        have not got there since they were last put."""
        if host is None and device is None:
            found = found.only(found.tiers != residency)
        _say(found.entries, found.rows, residency, host, device)
        at, _, _, tiers_at = _BY_BUCKET * found.buckets + _BY_NUMBER * found.numbers + _FROM
        places_at = at[:, None] + _ENTRY[_PLACES]
        for start in range(0, len(at), _SLICE):
            part = slice(start, start + _SLICE)
            buckets, places = found.buckets[part], found.entries[part, _PLACES]
            odd = self._sequences[buckets] | _ONE
            even = odd + _ONE
            self._sequences[buckets] = odd
            self._words[places_at[part]] = places
            self._tiers[tiers_at[part]] = residency
            self._sequences[buckets] = even

    def put_new(self, keys: U64, group: GroupId, residency: int, host: Slots | None, device: Slots | None) -> list[int]:
        """The same of blocks that stand nowhere. Returns the rows of those for which there is no place."""
        both, tags = self._mix.buckets_and_tags(keys, int(group))
        chosen = self._choose(both)
        entries = np.zeros((len(keys), _ENTRY_WORDS), np.uint64)
        entries[:, _KEY] = keys
        _say(entries, slice(None), residency, host, device)
        left = [row for row, place in enumerate(chosen) if place < 0] if -1 in chosen else []
        places = np.array(chosen, np.int64)
        if left:
            there = places >= 0
            places, tags, entries = places[there], tags[there], entries[there]
        self._fill(places, tags.astype(np.uint32), group, residency, entries)
        return left

    def _choose(self, both: I64) -> list[int]:
        """A place, bucket x 8 + number, for each of the new blocks with these buckets, one after another; -1: both are
        full."""
        taken = np.packbits(self._words[both * _WORDS + _TIERS_WORD].view("u1"), bitorder="little").tobytes()
        buckets: list[int] = both.tolist()
        count = len(buckets) // 2
        masks: dict[int, int] = {}
        chosen: list[int] = []
        for row in range(count):
            bucket = buckets[row]
            mask = masks.get(bucket, taken[row])
            if _EMPTY[mask] <= BUCKET_ENTRIES - FILL_FIRST:
                other = buckets[count + row]
                others = masks.get(other, taken[count + row])
                if _EMPTY[others] > _EMPTY[mask]:
                    bucket, mask = other, others
                elif not _EMPTY[mask]:
                    chosen.append(-1)
                    continue
            number = _FIRST_EMPTY[mask]
            masks[bucket] = mask | 1 << number
            chosen.append(bucket * BUCKET_ENTRIES + number)
        return chosen

    def _fill(self, places: I64, tags: NDArray[np.uint32], group: GroupId, residency: int, entries: U64) -> None:
        """Puts blocks into empty places."""
        buckets, numbers = places >> _NUMBER_BITS, places & _NUMBER
        at, tags_at, groups_at, tiers_at = _BY_BUCKET * buckets + _BY_NUMBER * numbers + _FROM
        entries_at = at[:, None] + _ENTRY
        for start in range(0, len(places), _SLICE):
            part = slice(start, start + _SLICE)
            some = buckets[part]
            odd = self._sequences[some] | _ONE
            even = odd + _ONE
            self._sequences[some] = odd
            self._words[entries_at[part]] = entries[part]
            self._tags[tags_at[part]] = tags[part]
            self._groups[groups_at[part]] = group
            self._tiers[tiers_at[part]] = residency
            self._sequences[some] = even


def _say(entries: U64, rows: I64 | slice, residency: int, host: Slots | None, device: Slots | None) -> None:
    """Writes into entries where their blocks, these rows of ``host`` and ``device``, have got to. What is void is 0."""
    halves = entries.view("<u4")
    for bit, arrived, generation, slot in ((_HOST, host, 4, 12), (_DEVICE, device, 5, 13)):
        if not residency & bit:
            entries[:, generation] = 0
            halves[:, slot] = 0
        elif arrived is not None:
            entries[:, generation] = arrived.generations[rows]
            halves[:, slot] = arrived.slots[rows]
