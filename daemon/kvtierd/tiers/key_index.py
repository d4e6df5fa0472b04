"""The key index of an arena, as its only writer keeps it. What stands where: :mod:`kvtier.abi.key_index`.

A block that is new goes into the first of its two buckets or, once that holds six, into the emptier of the two. Where
both are full, a block in one of them makes way that has room in its own other bucket. With as many blocks as a cache
can have two places in three are taken, so there always is one, unless somebody chose keys for it. Then the new block is
kept here, counted in ``unindexed``, and put in when a place in one of its buckets comes free.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

import numpy as np

from kvtier.abi.control import Shown, write_shown, write_unindexed
from kvtier.abi.key_index import (
    ABSENT,
    ENTRIES_OFFSET,
    ENTRY,
    GROUPS_OFFSET,
    KEY_BYTES,
    TAGS,
    TAGS_OFFSET,
    TIERS_OFFSET,
    Buckets,
    Entry,
)
from kvtier.abi.layout import BUCKET_BYTES, BUCKET_ENTRIES, ArenaLayout
from kvtierd.core.ids import EventId, GroupId, Key, SlotId, Tier
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.index_columns import Columns, Slots, packed
from kvtierd.tiers.index_rebuild import FILL_FIRST, Many, plan, write

_PLACES: Final = struct.Struct("<QQII")
"""An entry without its key."""
_HOST: Final = Tier.HOST.bit
_DEVICE: Final = Tier.DEVICE.bit
_FEW: Final = 12
"""Below so many keys numpy's calls cost more than they save."""
MANY: Final = 32
"""Below so many blocks that are put it costs less to put one after another."""
_ENTRY_BYTES: Final = ENTRY.size
_PACK_ENTRY: Final = ENTRY.pack_into
_NOWHERE: Final = (0, 0)

Name = tuple[GroupId, Key]
Place = tuple[SlotId, int]
"""A slot and its generation."""
Arrived = tuple[Mapping[Key, SlotId], memoryview]
"""Slots of one tier that blocks have got to, and the generations of all slots there."""
Homes = tuple[int, int, int]
"""First bucket, second bucket, tag."""


class KeyIndex:
    """One thread at a time."""

    def __init__(self, layout: ArenaLayout, control: Bytes, epoch: int) -> None:
        """Over what stands there; of an adopted arena that may be old, and torn: see :meth:`rebuild`.

        ``epoch``: of the events that it will show.
        """
        self._epoch = epoch
        self._buckets: Final = Buckets(layout, control)
        self._base: Final = self._buckets.base
        self._bytes: Final = self._buckets.bytes
        self._words: Final = self._buckets.words
        self._halves: Final = self._bytes.cast("H")
        self._singles: Final = self._bytes.cast("I")
        self._homes: Final = self._buckets.mix.one
        self._columns: Final = Columns(self._buckets)
        self._overflow: dict[Name, Entry] = {}
        self._waiting: dict[int, dict[Name, None]] = {}

    @property
    def places(self) -> int:
        """For blocks."""
        return self._buckets.count * BUCKET_ENTRIES

    @property
    def unindexed(self) -> int:
        """Blocks without a place."""
        return len(self._overflow)

    def show(self, event: EventId) -> None:
        """The index shows the effect of this event, and of all before it."""
        write_shown(self._words, Shown(self._epoch, event))

    def put(
        self, group: GroupId, key: Key, residency: int, host: Place | None = None, device: Place | None = None
    ) -> None:
        """The block is READY in just these tiers; 0: it is gone. ``host``, ``device``: where it has got to since it was
        last put; None: nowhere."""
        self._put((group, key), self._homes(key, group), residency, host, device)

    def put_many(
        self,
        group: GroupId,
        residencies: Mapping[Key, int],
        host: Arrived | None = None,
        device: Arrived | None = None,
        *,
        new: bool = False,
    ) -> None:
        """The same of many blocks. ``host``, ``device``: of those that have got there. ``new``: none of them is in the
        index."""
        if len(residencies) < MANY:
            self._put_each(group, list(residencies), residencies, host, device, new=new)
            return
        for keys, at_host, at_device in _alike(residencies, host, device):
            if len(keys) < MANY or (self._overflow and not new):
                self._put_each(group, keys, residencies, at_host, at_device, new=new)
            else:
                slots = _slots(at_host, keys), _slots(at_device, keys)
                self.put_alike(group, keys, residencies[keys[0]], *slots, new=new)

    def _put_each(
        self,
        group: GroupId,
        keys: Sequence[Key],
        residencies: Mapping[Key, int],
        host: Arrived | None,
        device: Arrived | None,
        *,
        new: bool,
    ) -> None:
        for key, homes in zip(keys, self._homes_of(group, keys), strict=True):
            residency = residencies[key]
            at_host, at_device = _place(host, key), _place(device, key)
            if not new:
                self._put((group, key), homes, residency, at_host, at_device)
                continue
            first, second, tag = homes
            host_place = at_host if at_host is not None and residency & _HOST else _NOWHERE
            device_place = at_device if at_device is not None and residency & _DEVICE else _NOWHERE
            bucket, number = self._free_place(first, second)
            if number >= 0:
                self._fill(bucket, number, tag, (group, key), residency, host_place, device_place)
            else:
                self._wait((group, key), first, second, Entry(residency, *host_place, *device_place))

    def _homes_of(self, group: GroupId, keys: Sequence[Key]) -> Iterable[Homes]:
        if len(keys) < _FEW:
            return [self._homes(key, group) for key in keys]
        first, second, tags = self._buckets.mix.many(packed(keys), int(group))
        return zip(first.tolist(), second.tolist(), tags.tolist(), strict=True)

    def put_alike(
        self,
        group: GroupId,
        keys: Sequence[Key],
        residency: int,
        host: Slots | None,
        device: Slots | None,
        *,
        new: bool,
    ) -> None:
        """The same of distinct blocks that are READY in the same tiers, and of which all have got to a tier, or none.
        Only while none is ``unindexed``, or where they are new."""
        words, columns = packed(keys), self._columns
        if new:
            left = columns.put_new(words, group, residency, host, device)
        else:
            found = columns.find(words, group)
            columns.change(found, residency, host, device)
            left = found.others(len(keys))
        for row in left:
            self.put(group, keys[row], residency, _row(host, row), _row(device, row))

    def remove_many(self, group: GroupId, keys: Sequence[Key]) -> None:
        """These blocks are gone. Each is there, or has no place, until its tier bits are stored as 0."""
        if len(keys) < _FEW or self._overflow:
            for key in keys:
                self.put(group, key, 0)
        else:
            self._columns.remove(self._columns.find(packed(keys), group))

    def _put(self, name: Name, homes: Homes, residency: int, host: Place | None, device: Place | None) -> None:
        group, key = name
        first, second, tag = homes
        for bucket in (first, second):
            start = self._base + bucket * BUCKET_BYTES
            number = self._find(start, tag, key, group)
            if number >= 0:
                self._change(start, number, residency, host, device)
                if not residency and self._waiting:
                    self._let_in(bucket)
                return
        if residency or self._overflow:
            self._put_new(name, homes, _entry(ABSENT, residency, host, device))

    def rebuild(self, blocks: Many) -> None:
        """These are all the blocks there are. Readers find throughout what was in the index before and stays."""
        self._overflow.clear()
        self._waiting.clear()
        homes = self._buckets.mix.many(blocks.keys, blocks.groups)
        places = plan(self._buckets, blocks, homes)
        write(self._buckets, blocks, homes.tags, places)
        for row in np.flatnonzero(places < 0).tolist():
            name = GroupId(int(blocks.groups[row])), Key(blocks.keys[row].tobytes())
            self._put_new(name, self._homes(name[1], name[0]), blocks.entry(row))
        write_unindexed(self._words, len(self._overflow))

    def contents(self) -> dict[Name, Entry]:
        """All blocks, those without a place included. For tests and the checker."""
        if (odd := np.flatnonzero(self._buckets.sequences % 2)).size:
            raise AssertionError(f"buckets {odd.tolist()} are being written by nobody")
        found = dict(self._overflow)
        for bucket, number in np.argwhere(self._buckets.tiers).tolist():
            group = GroupId(int(self._buckets.groups[bucket, number]))
            at = self._base + bucket * BUCKET_BYTES + ENTRIES_OFFSET + number * ENTRY.size
            key, *_ = ENTRY.unpack_from(self._bytes, at)
            if (group, key) in found:
                raise AssertionError(f"block {key.hex()} of group {group} stands in the index twice")
            found[group, key] = self._read(at + KEY_BYTES, int(self._buckets.tiers[bucket, number]))
        return found

    def _find(self, start: int, tag: int, key: Key, group: GroupId) -> int:
        """The number of the block's place in the bucket that starts there; -1: it has none."""
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
                return number
        return -1

    def _read(self, at: int, residency: int) -> Entry:
        host_generation, device_generation, host_slot, device_slot = _PLACES.unpack_from(self._bytes, at)
        return Entry(residency, host_slot, host_generation, device_slot, device_generation)

    def _change(self, start: int, number: int, residency: int, host: Place | None, device: Place | None) -> None:
        before = self._bytes[start + TIERS_OFFSET + number]
        if not residency:
            self._bytes[start + TIERS_OFFSET + number] = 0
            return
        if residency == before and host is None and device is None:
            return
        at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES + KEY_BYTES
        host_generation, device_generation, host_slot, device_slot = _PLACES.unpack_from(self._bytes, at)
        if not residency & _HOST:
            host_slot, host_generation = _NOWHERE
        elif host is not None:
            host_slot, host_generation = host
        if not residency & _DEVICE:
            device_slot, device_generation = _NOWHERE
        elif device is not None:
            device_slot, device_generation = device
        word = start // 8
        sequence = self._words[word] | 1
        self._words[word] = sequence
        _PLACES.pack_into(self._bytes, at, host_generation, device_generation, host_slot, device_slot)
        self._bytes[start + TIERS_OFFSET + number] = residency
        self._words[word] = sequence + 1

    def _put_new(self, name: Name, homes: Homes, entry: Entry) -> None:
        """A block that stands in neither of its buckets."""
        first, second, tag = homes
        if name in self._overflow:
            entry = _entry(self._overflow[name], entry.residency, _host(entry), _device(entry))
            self._wait(name, first, second, entry)
            return
        if not entry.residency:
            return
        bucket, number = self._free_place(first, second)
        if number < 0:
            self._wait(name, first, second, entry)
        else:
            self._fill(bucket, number, tag, name, entry.residency, entry[1:3], entry[3:5])

    def _free_place(self, first: int, second: int) -> tuple[int, int]:
        """Bucket and number of a place that is to be filled at once; -1, -1: there is none."""
        tiers = self._tiers(first)
        bucket, empty = first, tiers.count(0)
        if empty <= BUCKET_ENTRIES - FILL_FIRST:
            others = self._tiers(second)
            if others.count(0) > empty:
                bucket, tiers = second, others
            elif not empty:
                return self._make_way(first, second)
        return bucket, tiers.find(0)

    def _make_way(self, *full: int) -> tuple[int, int]:
        """Moves a block out of one of these buckets. Returns its old place, which is to be filled at once; or -1, -1.

        It stands in both places until then. Who looks into its other bucket before that, and into this one afterwards,
        misses it: this once, and absence is no proof.
        """
        for bucket in full:
            start = self._base + bucket * BUCKET_BYTES
            for number in range(BUCKET_ENTRIES):
                at = start + ENTRIES_OFFSET + number * ENTRY.size
                key = Key(bytes(self._bytes[at : at + KEY_BYTES]))
                group = GroupId(self._halves[(start + GROUPS_OFFSET) // 2 + number])
                first, second, tag = self._homes(key, group)
                other = second if first == bucket else first
                empty = self._tiers(other).find(0)
                if empty >= 0:
                    entry = self._read(at + KEY_BYTES, self._bytes[start + TIERS_OFFSET + number])
                    self._fill(other, empty, tag, (group, key), entry.residency, entry[1:3], entry[3:5])
                    return bucket, number
        return -1, -1

    def _tiers(self, bucket: int) -> bytes:
        word: int = self._words[(self._base + bucket * BUCKET_BYTES + TIERS_OFFSET) // 8]
        return word.to_bytes(BUCKET_ENTRIES, "little")

    def _fill(
        self,
        bucket: int,
        number: int,
        tag: int,
        name: Name,
        residency: int,
        host: tuple[int, int],
        device: tuple[int, int],
    ) -> None:
        """Puts a block into an empty place. ``host``, ``device``: slot and generation, or zeros."""
        words = self._words
        start = self._base + bucket * BUCKET_BYTES
        word = start // 8
        sequence = words[word] | 1
        words[word] = sequence
        at = start + ENTRIES_OFFSET + number * _ENTRY_BYTES
        _PACK_ENTRY(self._bytes, at, name[1], host[1], device[1], host[0], device[0])
        self._singles[(start + TAGS_OFFSET) // 4 + number] = tag
        self._halves[(start + GROUPS_OFFSET) // 2 + number] = name[0]
        self._bytes[start + TIERS_OFFSET + number] = residency
        words[word] = sequence + 1

    def _wait(self, name: Name, first: int, second: int, entry: Entry) -> None:
        """The block has no place; one that is gone (``entry`` without residency) wants none any more."""
        if entry.residency:
            self._overflow[name] = entry
            for bucket in (first, second):
                self._waiting.setdefault(bucket, {})[name] = None
        else:
            self._leave(name, first, second)
        write_unindexed(self._words, len(self._overflow))

    def _leave(self, name: Name, first: int, second: int) -> Entry:
        for bucket in {first, second}:
            waiting = self._waiting[bucket]
            del waiting[name]
            if not waiting:
                del self._waiting[bucket]
        return self._overflow.pop(name)

    def _let_in(self, bucket: int) -> None:
        """A place in the bucket has come free."""
        waiting = self._waiting.get(bucket)
        if waiting is None:
            return
        name = next(iter(waiting))
        group, key = name
        first, second, tag = self._homes(key, group)
        entry = self._leave(name, first, second)
        self._fill(bucket, self._tiers(bucket).find(0), tag, name, entry.residency, entry[1:3], entry[3:5])
        write_unindexed(self._words, len(self._overflow))


def _entry(old: Entry, residency: int, host: Place | None, device: Place | None) -> Entry:
    """What ``put`` says of a block that was like this before. What is void is 0."""
    host_slot, host_generation = (host or old[1:3]) if residency & _HOST else (0, 0)
    device_slot, device_generation = (device or old[3:5]) if residency & _DEVICE else (0, 0)
    return Entry(residency, host_slot, host_generation, device_slot, device_generation)


def _alike(
    residencies: Mapping[Key, int], host: Arrived | None, device: Arrived | None
) -> Iterator[tuple[list[Key], Arrived | None, Arrived | None]]:
    """These blocks in parts: those of one are READY in the same tiers, and each has got to a tier where any has."""
    at_host, at_device = _keys(host), _keys(device)
    names = residencies.keys()
    if len(set(residencies.values())) == 1 and all(not at or at == names for at in (at_host, at_device)):
        yield list(names), host if at_host else None, device if at_device else None
        return
    parts: defaultdict[tuple[int, bool, bool], list[Key]] = defaultdict(list)
    for key, residency in residencies.items():
        parts[residency, key in at_host, key in at_device].append(key)
    for (_, on_host, on_device), keys in parts.items():
        yield keys, host if on_host else None, device if on_device else None


def _keys(arrived: Arrived | None) -> Set[Key]:
    return arrived[0].keys() if arrived is not None else frozenset()


def _place(arrived: Arrived | None, key: Key) -> Place | None:
    if arrived is None:
        return None
    slot = arrived[0].get(key)
    return None if slot is None else (slot, arrived[1][slot])


def _slots(arrived: Arrived | None, keys: Sequence[Key]) -> Slots | None:
    if arrived is None:
        return None
    of, generations = arrived
    return Slots.of([of[key] for key in keys], generations)


def _row(slots: Slots | None, row: int) -> Place | None:
    return None if slots is None else (SlotId(int(slots.slots[row])), int(slots.generations[row]))


def _host(entry: Entry) -> Place | None:
    return (SlotId(entry.host_slot), entry.host_generation) if entry.host_generation else None


def _device(entry: Entry) -> Place | None:
    return (SlotId(entry.device_slot), entry.device_generation) if entry.device_generation else None
