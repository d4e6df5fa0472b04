"""Fills a key index with all the blocks there are, at once: for a cache that is opened with what it had.

The index may be looked at meanwhile, by clients that outlived the daemon before. So what is right stays where it is, a
bucket that is right is not touched, and the others are written a few at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.key_index import ENTRIES_OFFSET, GROUPS_OFFSET, TAGS_OFFSET, TIERS_OFFSET, Buckets, Entry
from kvtier.abi.key_mix import U32, U64, Homes
from kvtier.abi.layout import BUCKET_BYTES, BUCKET_ENTRIES
from kvtierd.core.ids import GroupId, Tier
from kvtierd.core.manager import Recovered

FILL_FIRST: Final = 6
"""Blocks in a bucket from which on a new one looks at its other bucket, too."""
_TAGS: Final = slice(TAGS_OFFSET // 4, TAGS_OFFSET // 4 + BUCKET_ENTRIES)
_SLICE: Final = 256
"""Buckets written at a time: readers find these odd for some 20 us."""

_FIELDS: Final = {name: itemgetter(place) for place, name in enumerate(Recovered._fields)}
_SLOT: Final = {Tier.DEVICE: _FIELDS["device"], Tier.HOST: _FIELDS["host"], Tier.DISK: _FIELDS["slot"]}

Places = NDArray[np.int64]
"""Of each block, its bucket x 8 + its number there; -1: none."""


@dataclass(slots=True, frozen=True)
class Many:
    """Blocks, parallel arrays: ``keys`` [n, 4], ``places`` [n, 3] as the last 24 bytes of an entry."""

    keys: U64
    groups: U64
    residency: NDArray[np.uint8]
    places: U64

    @classmethod
    def of(
        cls,
        recovered: Mapping[GroupId, Sequence[Recovered]],
        generations: Mapping[tuple[Tier, GroupId], NDArray[np.uint64]],
    ) -> Self:
        """``generations``: of each memory tier's slots."""
        parts = [_of_group(group, blocks, generations) for group, blocks in recovered.items()]
        parts.append((np.empty((0, 4), np.uint64), *(np.empty(0, np.uint64),) * 2, np.empty((0, 3), np.uint64)))
        keys, groups, residency, places = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return cls(keys, groups, residency.astype(np.uint8), places)

    def entry(self, row: int) -> Entry:
        host_generation, device_generation, slots = self.places[row].tolist()
        return Entry(int(self.residency[row]), slots % 2**32, host_generation, slots >> 32, device_generation)


def _of_group(
    group: GroupId,
    blocks: Sequence[Recovered],
    generations: Mapping[tuple[Tier, GroupId], NDArray[np.uint64]],
) -> tuple[U64, U64, U64, U64]:
    keys = np.frombuffer(b"".join(map(_FIELDS["key"], blocks)), "<u8").reshape(-1, 4)
    residency = np.where(_slots(blocks, Tier.DISK) >= 0, np.uint64(Tier.DISK.bit), np.uint64(0))
    places = np.zeros((len(blocks), 3), np.uint64)
    for column, tier, shift in ((0, Tier.HOST, 0), (1, Tier.DEVICE, 32)):
        slots = _slots(blocks, tier)
        there = np.flatnonzero(slots >= 0)
        if there.size:
            residency[there] |= np.uint64(tier.bit)
            places[there, column] = generations[tier, group][slots[there]]
            places[there, 2] |= slots[there].astype(np.uint64) << np.uint64(shift)
    return keys, np.full(len(blocks), group, np.uint64), residency, places


def _slots(blocks: Sequence[Recovered], tier: Tier) -> NDArray[np.int64]:
    """Of each block, -1 where it is not in the tier."""
    slots = list(map(_SLOT[tier], blocks))
    if slots.count(None) == len(slots):
        return np.full(len(slots), -1, np.int64)
    return np.array([-1 if slot is None else slot for slot in slots], np.int64)


def plan(buckets: Buckets, blocks: Many, homes: Homes) -> Places:
    """Where each block goes: where it is, if it is in the index, else by the rule for new ones."""
    places = np.full(len(blocks.keys), -1, np.int64)
    if buckets.tiers.any():
        for home in (homes.first, homes.second):
            left = np.flatnonzero(places < 0)
            _find(buckets, blocks, home[left], homes.tags[left], left, places)
    taken = np.zeros((buckets.count, BUCKET_ENTRIES), np.bool_)
    taken.reshape(-1)[places[places >= 0]] = True
    new = np.flatnonzero(places < 0)
    chosen = _choose(taken.sum(axis=1), homes.first[new], homes.second[new])
    new, chosen = new[chosen >= 0], chosen[chosen >= 0]
    free = np.argsort(taken, axis=1, kind="stable")  # each bucket's empty places come first
    places[new] = chosen * BUCKET_ENTRIES + free[chosen, _ranks(chosen)]
    return places


def _find(
    buckets: Buckets, blocks: Many, home: NDArray[np.int64], tags: U32, rows: NDArray[np.intp], places: Places
) -> None:
    """Fills in the places of those of ``rows`` that stand in the bucket ``home`` of each."""
    some, numbers = np.nonzero((buckets.tags[home] == tags[:, None]) & (buckets.tiers[home] != 0))
    at, found = home[some], rows[some]
    same = (buckets.entries[at, numbers][:, :4] == blocks.keys[found]).all(axis=1)
    same &= buckets.groups[at, numbers] == blocks.groups[found]
    places[found[same]] = at[same] * BUCKET_ENTRIES + numbers[same]


def _choose(held: NDArray[Any], first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of each new block, or -1. ``held``: what each bucket holds already."""
    early = held[first] + _ranks(first) < FILL_FIRST
    chosen = np.where(early, first, -1)
    counts: list[int] = (held + np.bincount(first[early], minlength=len(held))).tolist()
    late = np.flatnonzero(~early)
    for row, one, other in zip(late.tolist(), first[late].tolist(), second[late].tolist(), strict=True):
        bucket = other if counts[other] < counts[one] else one
        if counts[bucket] < BUCKET_ENTRIES:
            counts[bucket] += 1
            chosen[row] = bucket
    return chosen


def _ranks(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many equal ones stand before each."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.searchsorted(ordered, ordered)
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - starts
    return ranks


def write(buckets: Buckets, blocks: Many, tags: U32, places: Places) -> None:
    """Makes the index hold just these blocks in these places, with every sequence even."""
    order = np.argsort(places, kind="stable")
    order = order[places[order] >= 0]
    ordered = places[order]
    starts = np.arange(0, buckets.count + _SLICE, _SLICE)
    bounds = np.searchsorted(ordered, starts * BUCKET_ENTRIES).tolist()
    for start, low, high in zip(starts.tolist(), bounds, bounds[1:], strict=False):
        rows = buckets.whole[start : start + _SLICE]
        image = _image(blocks, tags, order[low:high], ordered[low:high] - start * BUCKET_ENTRIES, len(rows))
        _keep_void(image, rows)
        wrong = np.flatnonzero((image[:, 1:] != rows[:, 1:]).any(axis=1) | (rows[:, 0] % 2 != 0))
        if wrong.size:
            sequences = rows[wrong, 0] | np.uint64(1)
            rows[wrong, 0] = sequences
            rows[wrong, 1:] = image[wrong, 1:]
            rows[wrong, 0] = sequences + np.uint64(1)


def _keep_void(image: U64, rows: U64) -> None:
    """What stands in places that are to be empty means nothing, and is no reason to write a bucket."""
    empty = image.view("u1")[:, TIERS_OFFSET : TIERS_OFFSET + BUCKET_ENTRIES] == 0
    at, numbers = np.nonzero(empty & (rows.view("<u4")[:, _TAGS] != 0))
    for kind, offset in (("<u4", TAGS_OFFSET // 4), ("<u2", GROUPS_OFFSET // 2)):
        image.view(kind)[at, offset + numbers] = rows.view(kind)[at, offset + numbers]
    shape = len(rows), BUCKET_ENTRIES, -1
    image[:, ENTRIES_OFFSET // 8 :].reshape(shape)[at, numbers] = rows[:, ENTRIES_OFFSET // 8 :].reshape(shape)[
        at, numbers
    ]


def _image(blocks: Many, tags: U32, rows: NDArray[np.intp], places: Places, count: int) -> U64:
    """What ``count`` buckets should hold, sequences aside."""
    image = np.zeros((count, BUCKET_BYTES // 8), np.uint64)
    at, numbers = np.divmod(places, BUCKET_ENTRIES)
    image.view("<u4")[at, TAGS_OFFSET // 4 + numbers] = tags[rows]
    image.view("<u2")[at, GROUPS_OFFSET // 2 + numbers] = blocks.groups[rows]
    image.view("u1")[at, TIERS_OFFSET + numbers] = blocks.residency[rows]
    entries = image[:, ENTRIES_OFFSET // 8 :].reshape(count, BUCKET_ENTRIES, -1)
    entries[at, numbers, :4] = blocks.keys[rows]
    entries[at, numbers, 4:] = blocks.places[rows]
    return image
