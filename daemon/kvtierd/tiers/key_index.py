"""The writer of an arena's key index. Its layout: :mod:`kvtier.abi.key_index`.

A new block goes into the first of its two buckets or, if that holds six blocks, into the emptier of the two. If both
are full, a block in them moves to its own other bucket, if that has room. A full cache takes two places in three, so
every block has a place unless a client chose keys against that. A block without a place is counted in ``unindexed``
until it is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.control import Shown, write_shown, write_unindexed
from kvtier.abi.key_index import (
    ENTRIES_OFFSET,
    ENTRY,
    GROUPS_OFFSET,
    KEY_BYTES,
    TAGS,
    TAGS_OFFSET,
    TIERS_OFFSET,
    Buckets,
    IndexEntry,
)
from kvtier.abi.layout import BUCKET_BYTES, BUCKET_ENTRIES, ArenaLayout
from kvtierd.core.ids import EventId, GroupId, Key, SlotId, Tier
from kvtierd.tiers.base import Bytes

_PLACES: Final = struct.Struct("<QQII")
"""An entry without its key."""
_HOST: Final = Tier.HOST.bit
_DEVICE: Final = Tier.DEVICE.bit
_FILL_FIRST: Final = 6
"""Blocks in a bucket from which on a new block may go into its other bucket."""
_FEW: Final = 12
"""Number of keys below which numpy's calls cost more than they save."""
_ENTRY_BYTES: Final = ENTRY.size

Name = tuple[GroupId, Key]
Homes = tuple[int, int, int]
"""First bucket, second bucket and tag of a key."""
BucketPlace = tuple[int, int]

At = tuple[SlotId, int]
NOWHERE: Final[Mapping[Key, At]] = MappingProxyType({})


class IndexedBlocks(NamedTuple):
    """Blocks of one group that are READY in just these tiers. ``residencies``: tier bits by key. ``host``, ``device``:
    places of blocks that are new in these tiers."""

    group: GroupId
    residencies: Mapping[Key, int]
    host: Mapping[Key, At] = NOWHERE
    device: Mapping[Key, At] = NOWHERE


class KeyIndex:
    """The index. A single thread at a time may use it."""

    def __init__(self, layout: ArenaLayout, control: Bytes, epoch: int) -> None:
        """Takes over the index in ``control``. An adopted index may be old or torn: see :meth:`rebuild`.

        Args:
            epoch: of the events that the index will show.
        """
        self._epoch: Final = epoch
        self._buckets: Final = Buckets(layout, control)
        self._base: Final = self._buckets.base
        self._bytes: Final = self._buckets.bytes
        self._words: Final = self._buckets.words
        self._halves: Final = self._bytes.cast("H")
        self._singles: Final = self._bytes.cast("I")
        self._homes: Final = self._buckets.mix.one
        self._unindexed: set[Name] = set()

    @property
    def places(self) -> int:
        return self._buckets.count * BUCKET_ENTRIES

    @property
    def unindexed(self) -> int:
        return len(self._unindexed)

    def show(self, event: EventId) -> None:
        """Notes that the index shows the effect of this event and of all earlier events."""
        write_shown(self._words, Shown(self._epoch, event))

    def put(self, blocks: IndexedBlocks, *, new: bool = False) -> None:
        """Sets the places of blocks. A block with tier bits 0 is removed.

        Args:
            blocks: ``host`` and ``device`` have the slots that are new since a block was last put.
            new: none of the blocks is in the index.
        """
        group, residencies, host, device = blocks
        for (key, residency), homes in zip(residencies.items(), self._homes_of(group, residencies), strict=True):
            place = None if new else self._find(homes, key, group)
            if place is not None:
                self._change(place, residency, host.get(key), device.get(key))
            elif residency:
                at_host = (residency & _HOST and host.get(key)) or (0, 0)
                at_device = (residency & _DEVICE and device.get(key)) or (0, 0)
                self._add((group, key), homes, IndexEntry(residency, *at_host, *at_device))
            elif self._unindexed:
                self._unindexed.discard((group, key))
                write_unindexed(self._words, len(self._unindexed))

    def rebuild(self, blocks: Iterable[IndexedBlocks]) -> None:
        """Makes the index hold just these blocks. Readers find every block with a right entry throughout."""
        self._unindexed.clear()
        write_unindexed(self._words, 0)
        if self._buckets.tiers.any():
            right = np.zeros((self._buckets.count, BUCKET_ENTRIES), np.bool_)
            blocks = [self._check(some, right) for some in blocks]
            self._buckets.tiers[~right] = 0
        for bucket in np.flatnonzero(self._buckets.sequences % 2).tolist():
            self._words[(self._base + bucket * BUCKET_BYTES) // 8] += 1
        for some in blocks:
            self.put(some, new=True)

    def contents(self) -> dict[Name, IndexEntry | None]:
        """All blocks; None = a block without a place. For tests and the checker."""
        if (odd := np.flatnonzero(self._buckets.sequences % 2)).size:
            raise AssertionError(f"buckets {odd.tolist()} are being written by nobody")
        found: dict[Name, IndexEntry | None] = dict.fromkeys(self._unindexed)
        for bucket, number in np.argwhere(self._buckets.tiers).tolist():
            name = self._name((bucket, number))
            if name in found:
                raise AssertionError(f"block {name[1].hex()} of group {name[0]} stands in the index twice")
            found[name] = self._read((bucket, number))
        return found

    def _homes_of(self, group: GroupId, keys: Iterable[Key]) -> Iterable[Homes]:
        keys = list(keys)
        if len(keys) < _FEW:
            return [self._homes(key, group) for key in keys]
        many = np.frombuffer(b"".join(keys), "<u8").reshape(-1, KEY_BYTES // 8)
        first, second, tags = self._buckets.mix.many(many, int(group))
        return zip(first.tolist(), second.tolist(), tags.tolist(), strict=True)

    def _find(self, homes: Homes, key: Key, group: GroupId) -> BucketPlace | None:
        first, second, tag = homes
        for bucket in (first, second):
            start = self._base + bucket * BUCKET_BYTES
            tags = TAGS.unpack_from(self._bytes, start + TAGS_OFFSET)
            number = -1
            for _ in range(tags.count(tag)):
                number = tags.index(tag, number + 1)
                at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES
                if (
                    self._bytes[start + TIERS_OFFSET + number]
                    and bytes(self._bytes[at : at + KEY_BYTES]) == key
                    and self._halves[(start + GROUPS_OFFSET) // 2 + number] == group
                ):
                    return bucket, number
        return None

    def _check(self, blocks: IndexedBlocks, right: NDArray[np.bool_]) -> IndexedBlocks:
        """Marks the places of right entries in ``right``. Returns the blocks without a right entry."""
        group, residencies, host, device = blocks
        missing: dict[Key, int] = {}
        for (key, residency), homes in zip(residencies.items(), self._homes_of(group, residencies), strict=True):
            place = self._find(homes, key, group)
            if place is not None and self._read(place) == IndexEntry(
                residency, *(host.get(key) or (0, 0)), *(device.get(key) or (0, 0))
            ):
                right[place] = True
            else:
                missing[key] = residency
        return blocks._replace(residencies=missing)

    def _name(self, place: BucketPlace) -> Name:
        bucket, number = place
        start = self._base + bucket * BUCKET_BYTES
        at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES
        group = self._halves[(start + GROUPS_OFFSET) // 2 + number]
        return GroupId(group), Key(bytes(self._bytes[at : at + KEY_BYTES]))

    def _read(self, place: BucketPlace) -> IndexEntry:
        bucket, number = place
        start = self._base + bucket * BUCKET_BYTES
        at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES + KEY_BYTES
        host_generation, device_generation, host_slot, device_slot = _PLACES.unpack_from(self._bytes, at)
        residency = self._bytes[start + TIERS_OFFSET + number]
        return IndexEntry(residency, host_slot, host_generation, device_slot, device_generation)

    def _change(self, place: BucketPlace, residency: int, host: At | None, device: At | None) -> None:
        bucket, number = place
        start = self._base + bucket * BUCKET_BYTES
        if not residency:
            self._bytes[start + TIERS_OFFSET + number] = 0
            return
        before, *slots = self._read(place)
        at_host = (host or slots[:2]) if residency & _HOST else (0, 0)
        at_device = (device or slots[2:]) if residency & _DEVICE else (0, 0)
        if residency == before and [*at_host, *at_device] == slots:
            return
        word = start // 8
        sequence = self._words[word] | 1
        self._words[word] = sequence
        at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES + KEY_BYTES
        _PLACES.pack_into(self._bytes, at, at_host[1], at_device[1], at_host[0], at_device[0])
        self._bytes[start + TIERS_OFFSET + number] = residency
        self._words[word] = sequence + 1

    def _add(self, name: Name, homes: Homes, entry: IndexEntry) -> None:
        """Puts a block that is in neither of its buckets into one of them, if there is a place."""
        first, second, tag = homes
        place = self._free_place(first, second) if name not in self._unindexed else None
        if place is not None:
            self._fill(place, tag, name, entry)
            return
        self._unindexed.add(name)
        write_unindexed(self._words, len(self._unindexed))

    def _free_place(self, first: int, second: int) -> BucketPlace | None:
        """A free place, which the caller must fill at once; None if there is none."""
        tiers = self._tiers(first)
        bucket, empty = first, tiers.count(0)
        if empty <= BUCKET_ENTRIES - _FILL_FIRST:
            others = self._tiers(second)
            if others.count(0) > empty:
                bucket, tiers = second, others
            elif not empty:
                return self._make_way((first, second))
        return bucket, tiers.index(0)

    def _make_way(self, full: Sequence[int]) -> BucketPlace | None:
        """Moves a block out of one of these buckets. Returns its old place, which the caller must fill at once.

        Until then the block is in both places. A reader that looks into the new bucket before the move, and into the
        old bucket after the fill, misses the block once.
        """
        for bucket in full:
            for number in range(BUCKET_ENTRIES):
                group, key = self._name((bucket, number))
                first, second, tag = self._homes(key, group)
                other = second if first == bucket else first
                empty = self._tiers(other).find(0)
                if empty >= 0:
                    self._fill((other, empty), tag, (group, key), self._read((bucket, number)))
                    return bucket, number
        return None

    def _tiers(self, bucket: int) -> bytes:
        word: int = self._words[(self._base + bucket * BUCKET_BYTES + TIERS_OFFSET) // 8]
        return word.to_bytes(BUCKET_ENTRIES, "little")

    def _fill(self, place: BucketPlace, tag: int, name: Name, entry: IndexEntry) -> None:
        bucket, number = place
        residency, host_slot, host_generation, device_slot, device_generation = entry
        start = self._base + bucket * BUCKET_BYTES
        word = start // 8
        sequence = self._words[word] | 1
        self._words[word] = sequence
        at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES
        ENTRY.pack_into(self._bytes, at, name[1], host_generation, device_generation, host_slot, device_slot)
        self._singles[(start + TAGS_OFFSET) // 4 + number] = tag
        self._halves[(start + GROUPS_OFFSET) // 2 + number] = name[0]
        self._bytes[start + TIERS_OFFSET + number] = residency
        self._words[word] = sequence + 1
