"""Reads without a call: lookups in the mapped key index, and copies out of slots that nobody holds.

A copy is optimistic. The index says in which slot a block is and of which generation the slot is then; the bytes are
copied; if the slot's generation is still that one, they are the block's. If not, the slot has been given away
meanwhile, and what was copied is void.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier import again
from kvtier.abi.key_index import Found, IndexReader
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.again import Again, Asked, Remembered
from kvtier.answers import AcrossMatch, Locations, Match, ReadCounts
from kvtier.arena import Arena
from kvtier.binding import Binder
from kvtier.chains import Chains, are_distinct, count_leading
from kvtier.recency import Recency
from kvtier.tensors import Rows
from kvtier.types import Tier

MAX_KEYS: Final = 16_384
"""Of one verb, as in a call to the daemon, which refuses more."""

_TRIES: Final = 2
"""How often a block is copied whose slot is given away meanwhile, before it counts as not there. The copy of a chain
that is read again (:mod:`kvtier.again`) comes before these."""

_MOST_UNTOLD: Final = 1024
"""Reads of chains that had been read before, until they are counted and noted."""

_NONE: Final = np.empty(0, dtype=np.intp)

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Mapping:
    """A mapped arena whose index can be asked."""

    arena: Arena
    index: IndexReader
    chains: Chains
    remembered: dict[Asked, Remembered] = field(default_factory=dict)


class Reader:
    """Reads of one cache in all its window groups. Any thread may. ``keys`` are packed.

    None as an answer: it cannot be told without a call.
    """

    def __init__(self, binder: Binder) -> None:
        self._binder: Final = binder
        self.recency: Final = Recency(binder, self._settle)
        self._mapping: Mapping | None = None
        self._counts: Final = [0] * len(fields(ReadCounts))
        """In the order of its fields."""
        self._lock: Final = threading.Lock()
        self._read_again: Final[deque[Again]] = deque()
        """What is not counted yet, nor noted: to append is one step, which needs no lock."""
        self.copying = 0
        """Gets of a chain read before whose bytes are being copied, of those on a loop."""

    @property
    def spec(self) -> CacheSpec:
        """What the cache's bytes mean."""
        return self._binder.spec

    @property
    def way(self) -> str:
        """``shared memory``, or ``calls`` and why."""
        if not self._binder.maps:
            return "calls: the cache's memory is not mapped here"
        arena = self._binder.binding.arena
        if arena.index is None:
            return "calls: the daemon keeps no key index on its kind of machine"
        if not arena.current:
            return "calls: the daemon that mapped its memory is gone; the next one maps it anew"
        return "shared memory"

    @property
    def counts(self) -> ReadCounts:
        self._settle()
        return ReadCounts(*self._counts)

    def count(self, *, lookups: int = 0, hits: int = 0, misses: int = 0, reuses: int = 0, calls: int = 0) -> None:
        counts = self._counts
        with self._lock:
            counts[0] += lookups
            counts[1] += hits
            counts[2] += misses
            counts[3] += reuses
            counts[4] += calls

    # -- lookups ---------------------------------------------------------------------------------------------------

    def prefix_length(self, keys: bytes, group: int) -> int | None:
        return self._look_up(keys, lambda chains: chains.prefix_length(keys, group))

    def match(self, keys: bytes, group: int) -> Match | None:
        return self._look_up(keys, lambda chains: chains.match(keys, group), distinct=True)

    def match_across(self, keys: bytes) -> AcrossMatch | None:
        return self._look_up(keys, lambda chains: chains.match_across(keys), distinct=True)

    def locate(self, keys: bytes, group: int) -> Locations | None:
        return self._look_up(keys, lambda chains: chains.locate(keys, group), distinct=True)

    def _look_up(self, keys: bytes, look_up: Callable[[Chains], T | None], *, distinct: bool = False) -> T | None:
        mapping = self._current(keys)
        if mapping is None or (distinct and not are_distinct(keys)):
            return None
        found = look_up(mapping.chains)
        if found is not None:
            self.count(lookups=1)
        return found

    # -- copies ----------------------------------------------------------------------------------------------------

    def begin(self, keys: bytes, group: int, tier: Tier | None) -> Copying | None:
        """What of a chain's first blocks can be copied now, ``tier``: out of that one only. None: ask the daemon."""
        mapping = self._current(keys)
        if mapping is None:
            return None
        remembered = mapping.remembered.get((group, tier, keys)) if len(keys) <= again.MOST_BYTES else None
        if remembered is not None and not mapping.chains.stands(keys, group, remembered.last):
            remembered = None
        if remembered is None and not are_distinct(keys):
            return None
        if remembered is not None and (remembered.again is None or not remembered.again.stands()):
            # It is read for the second time, or something else of its bucket has changed.
            remembered.again = again.again(self, mapping.arena, mapping.index, keys, group, remembered)
        return Copying(self, mapping, keys, group, tier, remembered)

    def remembered(self, keys: bytes, group: int, tier: Tier | None) -> Again | None:
        """A chain that was read before, if it is where it was then. None: :meth:`begin` tells more."""
        mapping = self._mapping
        if mapping is None or self._binder.readable is None or not mapping.arena.current:
            return None
        known = mapping.remembered.get((group, tier, keys))
        if known is None or known.again is None or not known.again.stands():
            return None
        return known.again

    def noted(self, copying: Copying) -> None:
        """Blocks were copied: counts, and what the daemon is to be told."""
        blocks, misses = copying.blocks, copying.misses
        self.count(hits=blocks, misses=misses, reuses=copying.reuses)
        if blocks or misses:
            self.recency.note(copying.group, copying.used(), misses)

    def noted_again(self, read: Again) -> None:
        """The same of a chain that was read once more."""
        self._read_again.append(read)
        if not self.recency.due:
            self.recency.tell_later()
        elif len(self._read_again) > _MOST_UNTOLD:
            self._settle()

    def missed_across(self, blocks: int) -> None:
        """So many of a chain were asked for in vain over all groups; they count once."""
        self.count(misses=blocks)
        self.recency.note(0, (), blocks)

    def remember(self, mapping: Mapping, asked: Asked, known: Remembered) -> None:
        with self._lock:
            mapping.remembered.pop(asked, None)
            while len(mapping.remembered) >= again.CHAINS:
                del mapping.remembered[next(iter(mapping.remembered))]
            mapping.remembered[asked] = known

    # -- inside ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while self._read_again:
            try:
                read = self._read_again.popleft()
            except IndexError:
                return  # another thread was quicker
            self.count(hits=read.blocks)
            self.recency.add(read.group, (read.key,), 0)

    def _current(self, keys: bytes) -> Mapping | None:
        binding = self._binder.readable
        if binding is None or not 0 < len(keys) <= MAX_KEYS * KEY_BYTES:
            return None
        arena, mapping = binding.mapped, self._mapping
        if arena is None or arena.index is None or not arena.current:
            return None
        if mapping is None or mapping.arena is not arena:
            self._mapping = mapping = Mapping(arena, arena.index, Chains(arena.index, self.spec))
        return mapping


class Copying:
    """The first blocks of a chain on their way out of mapped slots.

    ``blocks``: how many of them can be copied, and after :meth:`copy` how many were.
    """

    def __init__(
        self,
        reader: Reader,
        mapping: Mapping,
        keys: bytes,
        group: int,
        tier: Tier | None,
        remembered: Remembered | None,
    ) -> None:
        self.group: Final = group
        self.asked: Final = len(keys) // KEY_BYTES
        self.blocks = self.asked
        self.reuses = 0
        self._reader: Final = reader
        self._mapping: Final = mapping
        self._keys: Final = keys
        self._tier: Final = tier
        self._tiers: Final = [each for each in mapping.arena.tiers if tier is None or each is tier]
        self._bits: Final = sum(each.bit for each in self._tiers)
        self._sliding: Final = mapping.chains.is_sliding(group)
        self._start = 0
        self._current = True
        self._remembered: Final = remembered
        self._found: Found = remembered.found if remembered is not None else self._look_up()

    @property
    def at_end(self) -> bool:
        """Whether that is all of the chain that is stored: there is nothing to ask the daemon for."""
        if self.blocks == self.asked or not self._current:
            return self._current
        following = self.blocks - self._start
        return bool(self._found.sure[following]) and self._found.residency[following] == 0

    @property
    def waits(self) -> bool:
        """Whether its copies wait for a device: see :attr:`kvtier.memory.Memory.waits`."""
        return any(self._mapping.arena.memory(tier).waits for tier in self._tiers)

    @property
    def misses(self) -> int:
        return self.asked - self.blocks if self.at_end else 0

    def used(self) -> Sequence[bytes]:
        """The keys that tell the daemon which blocks were read."""
        ends = range(self.blocks * KEY_BYTES, 0, -KEY_BYTES)
        if not self._sliding:
            ends = ends[:1]
        return [self._keys[end - KEY_BYTES : end] for end in ends]

    def copy(self, rows: Rows) -> None:
        """Fills the rows, one a block, and cuts :attr:`blocks` to those that were there to the end."""
        for _ in range(_TRIES):
            void = self._copy(rows[self._start : self.blocks], self._found)
            if not len(void):
                break
            self._start += int(void[0])
            self._found = self._look_up()
            self.blocks = min(self.blocks, len(rows))
        else:
            self.blocks = self._start
        if not self._mapping.arena.current:
            self.blocks, self._current = 0, False
        self._reader.noted(self)

    def _look_up(self) -> Found:
        """Where the blocks from ``_start`` on are now; sets how many of them can be copied."""
        found = self._mapping.chains.find(self._keys[self._start * KEY_BYTES :], self.group)
        there = count_leading(found.residency & self._bits != 0)
        self.blocks = self._start + there
        if there == self.asked and len(self._keys) <= again.MOST_BYTES and not self._sliding:
            self._reader.remember(self._mapping, (self.group, self._tier, self._keys), self._to_remember(found))
        return found

    def _to_remember(self, found: Found) -> Remembered:
        residency = found.residency
        whole = next((tier for tier in self._tiers if (residency & tier.bit).all()), None)
        slots, generations = _of_tier(found, Tier.HOST if whole is None else whole)
        return Remembered(found, found.entry(-1), whole, slots.astype(np.intp), generations)

    def _copy(self, rows: Rows, found: Found) -> NDArray[np.intp]:
        """Copies the first blocks of ``found``, one into each row. Returns which of them were not there to the end."""
        known = self._remembered
        if known is not None and known.tier is not None and known.found is found and len(rows) == self.asked:
            return self._copy_from(known.tier, rows, known.slots, known.generations)
        where = found.residency[: len(rows)] & self._bits
        if len(self._tiers) == 1 and where.all():
            slots, generations = _of_tier(found, self._tiers[0])
            return self._copy_from(self._tiers[0], rows, slots[: len(rows)], generations[: len(rows)])
        lost = [np.flatnonzero(where == 0)]
        for tier in self._tiers:
            of_tier = np.flatnonzero(where & tier.bit)
            if len(of_tier):
                where[of_tier] = 0
                slots, generations = _of_tier(found, tier)
                part = [rows[at] for at in of_tier.tolist()]
                lost.append(of_tier[self._copy_from(tier, part, slots[of_tier], generations[of_tier])])
        return np.sort(np.concatenate(lost))

    def _copy_from(
        self, tier: Tier, rows: Rows, slots: NDArray[np.integer[Any]], generations: NDArray[np.uint64]
    ) -> NDArray[np.intp]:
        """Copies these slots of one tier. Returns, by row, which were given away meanwhile."""
        arena = self._mapping.arena
        try:
            arena.read(tier, self.group, slots, rows)
        except IndexError:  # a slot that there is not: the index is damaged, and these blocks are the daemon's to find
            return np.arange(len(rows))
        # After the bytes, all of which have come by now: the generation that the index gave is even, and ends before
        # the first of them changes.
        now = arena.generations(tier, self.group, slots)
        if now.tobytes() == generations.tobytes():  # half of what comparing them as numbers costs
            return _NONE
        changed = now != generations
        self.reuses += int(changed.sum())
        return np.flatnonzero(changed)


def _of_tier(found: Found, tier: Tier) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Slots and generations."""
    if tier is Tier.DEVICE:
        return found.device_slots, found.device_generations
    return found.host_slots, found.host_generations
