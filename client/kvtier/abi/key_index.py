"""The key index in the ``control`` segment: the blocks of a cache and their slots.

Buckets of 512 bytes, 8 blocks in each::

       0  u64      sequence      odd while the daemon writes the bucket
       8  u32 x 8  tags          see below
      40  u16 x 8  groups        window groups
      56  u8 x 8   tier bits     1 device, 2 host, 4 disk: where the block is READY; 0 = the place is empty
      64  56 bytes x 8           entries

An entry::

       0  32       key
      32  u64      host_generation
      40  u64      device_generation
      48  u32      host_slot
      52  u32      device_slot

Slot and generation are valid only if the tier's bit is set. Nothing in an empty place is valid. A block stands in
one of its two buckets. If both are full, the block has no place, and the header's ``unindexed`` counts it.

The key and the window group give the two buckets and the tag. All arithmetic is modulo 2^64; ``w`` are the key's four
8-byte words, ``s`` the seed's, little-endian::

    t = w * s;  t ^= t >> 32;  t *= s                       for each word and its part of the seed
    h = t0 + t1 + t2 + t3 + (group + 1) * 0x9E3779B97F4A7C15
    h ^= h >> 32;  h *= 0xD6E8FEB86659FD93;  h ^= h >> 32
    first bucket  = (h >> 32) * buckets >> 32
    second bucket = (h mod 2^32) * buckets >> 32
    tag           = (h ^ h >> 32) mod 2^32

The seed is random, so that clients cannot choose keys that all fall into one bucket. Its words are odd, so that no
multiplication loses a bit of a key.

**Reading.** A reader reads the sequence, the bucket, and the sequence again. If the sequence was odd or has changed,
the reader tries again. After some 10 us of failed tries the block's place is *unsure*: ask the daemon. Compare all
bytes of the key. An answer was true at one moment during the call. To use a slot without a lease, copy its bytes and
then compare its generation with the entry's. A block that is not found may be written at this moment; it is *unsure* if
``unindexed`` is not 0.

**Writing.** The daemon makes the sequence odd, writes the bytes, and makes the sequence even, by single aligned stores.
Up to 32 buckets are odd at once, for some 2 us. x86-64 keeps the order of these loads and stores; on other machines
there is no index. To remove a block the daemon clears its tier bits, a store of one byte, and does not change the
sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.control import Header, Shown, read_shown, read_unindexed, words_of
from kvtier.abi.keys import KEY_DTYPE
from kvtier.abi.layout import BUCKET_BYTES, BUCKET_ENTRIES, ArenaLayout

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_MASK: Final = 2**64 - 1
_LOW: Final = 2**32 - 1
_GROUP: Final = 0x9E3779B97F4A7C15
_FINAL: Final = 0xD6E8FEB86659FD93
_WORDS: Final = struct.Struct("<4Q")

KEY_BYTES: Final = 32
TAGS_OFFSET: Final = 8
GROUPS_OFFSET: Final = 40
TIERS_OFFSET: Final = 56
ENTRIES_OFFSET: Final = 64
ENTRY: Final = struct.Struct("<32sQQII")
"""Key, host_generation, device_generation, host_slot, device_slot."""
TAGS: Final = struct.Struct("<8I")

_ENTRY_WORDS: Final = ENTRY.size // 8
_BUCKET_WORDS: Final = BUCKET_BYTES // 8
_BUCKET_LINES: Final = BUCKET_BYTES // ENTRIES_OFFSET

_TRIES: Final = 100
"""Some 10 us if a bucket stays odd: a daemon that is not interrupted has written its buckets by then."""
_FEW: Final = 12
"""Below this number of keys, numpy's calls cost more than they save."""
_MANY: Final = 1024
"""Keys looked up at a time: their buckets stay in the processor's caches."""


class KeyMix:
    """Computes the buckets and tags of keys. ``seed``: 32 bytes; ``buckets``: under 2^32."""

    def __init__(self, seed: bytes, buckets: int) -> None:
        self._seed = _WORDS.unpack(seed)
        self._seeds = np.frombuffer(seed, "<u8")[:, None]
        self._buckets = buckets
        self._count = np.array(buckets, np.uint64)

    def one(self, key: bytes, group: int) -> tuple[int, int, int]:
        """First bucket, second bucket and tag of a key."""
        w0, w1, w2, w3 = _WORDS.unpack(key)
        s0, s1, s2, s3 = self._seed
        w0 = w0 * s0 & _MASK
        w1 = w1 * s1 & _MASK
        w2 = w2 * s2 & _MASK
        w3 = w3 * s3 & _MASK
        mixed = (w0 ^ w0 >> 32) * s0 + (w1 ^ w1 >> 32) * s1 + (w2 ^ w2 >> 32) * s2 + (w3 ^ w3 >> 32) * s3
        mixed = mixed + (group + 1) * _GROUP & _MASK
        mixed = (mixed ^ mixed >> 32) * _FINAL & _MASK
        high = mixed >> 32
        low = mixed & _LOW ^ high
        return high * self._buckets >> 32, low * self._buckets >> 32, low ^ high

    def many(self, keys: U64, group: int) -> tuple[I64, I64, U32]:
        """Like :meth:`one`, for ``keys``, [n, 4]. Buckets are signed like numpy's indices, which is faster."""
        words = keys.T.copy()  # numpy is faster on long rows
        words *= self._seeds
        words ^= words >> _HALF
        words *= self._seeds
        mixed, one, another, last = words
        mixed += one
        mixed += another
        mixed += last
        mixed += np.uint64((group + 1) * _GROUP & _MASK)
        mixed ^= mixed >> _HALF
        mixed *= _FINAL_U64
        high = mixed >> _HALF
        low = mixed & _LOW_U64 ^ high
        first, second = ((half * self._count >> _HALF).view(np.int64) for half in (high, low))
        return first, second, mixed.astype(np.uint32)


class IndexEntry(NamedTuple):
    """The place of a block. ``residency``: its tier bits, 0 = absent. Slots and generations of other tiers are void."""

    residency: int = 0
    host_slot: int = 0
    host_generation: int = 0
    device_slot: int = 0
    device_generation: int = 0


ABSENT: Final = IndexEntry()


@dataclass(slots=True, frozen=True)
class IndexEntries:
    """The places of many blocks, as in :class:`IndexEntry`, one element per block. ``sure`` False: ask the daemon."""

    residency: NDArray[np.uint8]
    sure: NDArray[np.bool_]
    host_generations: U64
    device_generations: U64
    slots: U64
    """The slots on host and device as in the index, side by side: numpy is several times slower with parts of words."""

    @classmethod
    def nothing(cls, count: int, *, sure: bool) -> Self:
        return cls(np.zeros(count, np.uint8), np.full(count, sure), *np.zeros((3, count), np.uint64))

    @property
    def host_slots(self) -> U32:
        return self.slots.view("<u4")[::2]

    @property
    def device_slots(self) -> U32:
        return self.slots.view("<u4")[1::2]


class Buckets:
    """Views of the index's memory for reading and writing, without copies."""

    def __init__(self, layout: ArenaLayout, control: NDArray[np.uint8]) -> None:
        """The arena must have an index: ``layout.index_bytes`` is not 0."""
        self.count = layout.index_bytes // BUCKET_BYTES
        self.base = layout.index_offset
        self.bytes = control.data
        self.words = words_of(control)
        self.mix = KeyMix(Header.read(control, len(layout.groups)).index_seed, self.count)
        self.whole: U64 = np.frombuffer(control, "<u8", self.count * _BUCKET_WORDS, self.base).reshape(self.count, -1)
        self.sequences = self.whole[:, 0]
        self.tiers = self.whole.view(np.uint8)[:, TIERS_OFFSET : TIERS_OFFSET + BUCKET_ENTRIES]


class IndexReader:
    """Looks blocks up in a mapped ``control`` segment, from any number of threads and processes, without writing."""

    def __init__(self, layout: ArenaLayout, control: NDArray[np.uint8]) -> None:
        """The arena must have an index: ``layout.index_bytes`` is not 0."""
        self._buckets = Buckets(layout, control)
        self._mix = self._buckets.mix
        self._bytes = self._buckets.bytes
        self._words = self._buckets.words
        self._halves = self._bytes.cast("H")
        self._base = self._buckets.base
        self._whole = self._buckets.whole.reshape(-1)
        self._lines: NDArray[np.void] = self._whole.view(f"V{ENTRIES_OFFSET}")
        entries = self._whole[ENTRIES_OFFSET // 8 :]
        self._keys: NDArray[np.void] = np.ndarray(len(entries) - _ENTRY_WORDS + 1, KEY_DTYPE, entries, strides=(8,))
        self._entry_words = [entries[word:] for word in (4, 5, 6)]
        """Generations on host and device, and both slots."""

    def shown(self) -> Shown:
        """The last event whose effect the index shows."""
        return read_shown(self._words)

    def entry(self, key: bytes, group: int, unindexed: int | None = None) -> IndexEntry | None:
        """Returns the block's place; None: unsure. ``unindexed``: the count read before, if the caller has one."""
        if unindexed is None:
            unindexed = read_unindexed(self._words)
        first, second, tag = self._mix.one(key, group)
        found = self._probe(first, tag, key, group)
        if found is None or found.residency == 0:
            other = self._probe(second, tag, key, group)
            if other is None or other.residency:
                return other
        if found is ABSENT and unindexed:
            return None
        return found

    def prefix_length(self, keys: bytes | memoryview, group: int) -> int | None:
        """Counts the present blocks of a declared chain, from its first block on, by bisection.

        Args:
            keys: packed, each block the child of the block before. In a full-attention group no block is present
                without its ancestors.
        Returns: None if the index is unsure.
        """
        present, absent, sure = 0, len(keys) // KEY_BYTES, True
        while present < absent:
            at = (present + absent) // 2
            entry = self.entry(bytes(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]), group)
            if entry is not None and entry.residency:
                present = at + 1
            else:
                absent, sure = at, entry is not None
        return present if sure else None

    def find(self, keys: bytes | memoryview, group: int) -> IndexEntries:
        """Returns the places of many blocks. ``keys``: packed."""
        count = len(keys) // KEY_BYTES
        unindexed = read_unindexed(self._words)
        found = IndexEntries.nothing(count, sure=unindexed == 0)
        unstable: Iterable[int] = range(count)
        if count >= _FEW:
            words = np.frombuffer(keys, "<u8").reshape(count, KEY_BYTES // 8)
            starts = range(0, count, _MANY)
            unstable = [row for start in starts for row in self._find_some(found, words, group, start)]
        for row in unstable:
            entry = self.entry(bytes(keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]), group, unindexed)
            found.sure[row] = entry is not None
            found.residency[row], host, found.host_generations[row], device, found.device_generations[row] = (
                entry or ABSENT
            )
            found.slots[row] = host | device << 32
        return found

    def _find_some(self, found: IndexEntries, words: U64, group: int, start: int) -> list[int]:
        """Looks for the keys from ``start`` on, in the second bucket only if a key is not in the first.

        Returns: rows whose bucket was being written.
        """
        keys = words[start : start + _MANY]
        first, second, tags = self._mix.many(keys, group)
        rows = np.arange(start, start + len(keys))
        unstable = self._probe_many(found, rows, keys, tags, first, group)
        (missing,) = (found.residency[start : start + _MANY] == 0).nonzero()
        if missing.size:
            unstable += self._probe_many(found, rows[missing], keys[missing], tags[missing], second[missing], group)
        return unstable

    def _probe_many(
        self, found: IndexEntries, rows: NDArray[np.intp], keys: U64, tags: U32, at: I64, group: int
    ) -> list[int]:
        """Looks for each key in one bucket. ``rows``: the rows of the answers. Returns rows that were being written."""
        starts = at * _BUCKET_WORDS
        # The first access to a line of memory does nothing else, so that many accesses wait for memory at once.
        before = self._whole[starts]
        heads = self._lines.take(at * _BUCKET_LINES)
        (hits,) = (heads.view("<u4").reshape(-1, 16)[:, _TAGS] == tags[:, None]).reshape(-1).nonzero()
        some, numbers = hits >> 3, hits & 7
        tiers = heads.view("u1")[some * ENTRIES_OFFSET + TIERS_OFFSET + numbers]
        groups = heads.view("<u2")[some * (ENTRIES_OFFSET // 2) + GROUPS_OFFSET // 2 + numbers]
        places = starts[some] + numbers * _ENTRY_WORDS
        its, wanted = self._keys[places], keys.view(KEY_DTYPE).reshape(-1)[some]
        right = (groups == group) & (tiers != 0)
        if its.tobytes() != wanted.tobytes():  # equal tags do not mean equal keys
            right &= (its.view("<u8") == wanted.view("<u8")).reshape(-1, 4).all(axis=1)
        to, where = rows[some], [word[places] for word in self._entry_words]
        after = self._whole[starts]
        unstable: list[int] = []
        if after.tobytes() != before.tobytes() or np.bitwise_or.reduce(before) & _ONE:
            stable = (after == before) & (before & _ONE == 0)
            unstable = rows[~stable].tolist()
            right &= stable[some]
        if not right.all():
            to, tiers, where = to[right], tiers[right], [column[right] for column in where]
        found.residency[to] = tiers
        found.sure[to] = True
        found.host_generations[to], found.device_generations[to], found.slots[to] = where
        return unstable

    def _probe(self, bucket: int, tag: int, key: bytes, group: int) -> IndexEntry | None:
        """Returns the block's entry in one bucket; None: the bucket keeps changing."""
        start = self._base + bucket * BUCKET_BYTES
        word = start // 8
        words = self._words
        for _ in range(_TRIES):
            before = words[word]
            if before % 2:
                continue
            found = ABSENT
            tags = TAGS.unpack_from(self._bytes, start + TAGS_OFFSET)
            for place in range(BUCKET_ENTRIES) if tag in tags else ():
                if tags[place] != tag:
                    continue
                at = start + ENTRIES_OFFSET + place * ENTRY.size
                its, host_generation, device_generation, host_slot, device_slot = ENTRY.unpack_from(self._bytes, at)
                residency = self._bytes[start + TIERS_OFFSET + place]
                if its == key and residency and self._halves[(start + GROUPS_OFFSET) // 2 + place] == group:
                    found = IndexEntry(residency, host_slot, host_generation, device_slot, device_generation)
                    break
            if words[word] == before:
                return found
        return None


_ONE: Final = np.uint64(1)
_TAGS: Final = slice(TAGS_OFFSET // 4, TAGS_OFFSET // 4 + BUCKET_ENTRIES)

# Arrays without dimensions: numpy is faster with them than with its scalars.
_HALF: Final = np.array(32, np.uint64)
_LOW_U64: Final = np.array(_LOW, np.uint64)
_FINAL_U64: Final = np.array(_FINAL, np.uint64)
