"""Reads without a call: lookups in the mapped key index, and copies out of slots that nobody holds.

A copy is optimistic. The index says in which slot a block is and of which generation the slot is then; the bytes are
copied; if the slot's generation is still that one, they are the block's. If not, the slot has been given away
meanwhile, and what was copied is void.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier import transfer
from kvtier.abi.key_index import Found
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.answers import AcrossMatch, Locations, Match, ReadCounts
from kvtier.arena import Arena, Bytes
from kvtier.binding import Binder
from kvtier.chains import Chains, count_leading
from kvtier.recency import Recency
from kvtier.types import Tier

MAX_KEYS: Final = 16_384
"""Of one verb, as in a call to the daemon, which refuses more."""

_TRIES: Final = 2
"""How often a block is copied whose slot is given away meanwhile, before it counts as not there."""

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Mapping:
    """A mapped arena whose index can be asked."""

    arena: Arena
    chains: Chains


class Reader:
    """Reads of one cache in all its window groups. Any thread may. ``keys`` are packed.

    None as an answer: it cannot be told without a call.
    """

    def __init__(self, binder: Binder) -> None:
        self._binder: Final = binder
        self.recency: Final = Recency(binder)
        self._mapping: Mapping | None = None
        self._counts = ReadCounts()
        self._lock: Final = threading.Lock()

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
        return self._counts

    def count(self, *, lookups: int = 0, hits: int = 0, misses: int = 0, reuses: int = 0, calls: int = 0) -> None:
        with self._lock:
            old = self._counts
            self._counts = ReadCounts(
                old.lookups + lookups, old.hits + hits, old.misses + misses, old.reuses + reuses, old.calls + calls
            )

    # -- lookups ---------------------------------------------------------------------------------------------------

    def prefix_length(self, keys: bytes, group: int) -> int | None:
        return self._look_up(keys, lambda chains: chains.prefix_length(keys, group))

    def match(self, keys: bytes, group: int) -> Match | None:
        return self._look_up(keys, lambda chains: chains.match(keys, group))

    def match_across(self, keys: bytes) -> AcrossMatch | None:
        return self._look_up(keys, lambda chains: chains.match_across(keys))

    def locate(self, keys: bytes, group: int) -> Locations | None:
        return self._look_up(keys, lambda chains: chains.locate(keys, group))

    def _look_up(self, keys: bytes, look_up: Callable[[Chains], T | None]) -> T | None:
        mapping = self._current(keys)
        found = None if mapping is None else look_up(mapping.chains)
        if found is not None:
            self.count(lookups=1)
        return found

    # -- copies ----------------------------------------------------------------------------------------------------

    def begin(self, keys: bytes, group: int, tier: Tier | None) -> Copying | None:
        """What of a chain's first blocks can be copied now, ``tier``: out of that one only. None: ask the daemon."""
        mapping = self._current(keys)
        if mapping is None:
            return None
        tiers = [each for each in mapping.arena.tiers if tier is None or each is tier]
        return Copying(self, mapping, keys, group, tiers)

    def noted(self, copying: Copying) -> None:
        """Blocks were copied: counts, and what the daemon is to be told."""
        blocks, misses = copying.blocks, copying.misses
        self.count(hits=blocks, misses=misses, reuses=copying.reuses)
        if blocks or misses:
            self.recency.note(copying.group, copying.used(), misses)

    def missed(self, groups: Iterable[int], blocks: int) -> None:
        """So many were asked for in vain, in each group."""
        for group in groups:
            self.count(misses=blocks)
            self.recency.note(group, (), blocks)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _current(self, keys: bytes) -> Mapping | None:
        binding = self._binder.readable
        if binding is None or not 0 < len(keys) <= MAX_KEYS * KEY_BYTES:
            return None
        arena, mapping = binding.mapped, self._mapping
        if arena is None or arena.index is None or not arena.current:
            return None
        if mapping is None or mapping.arena is not arena:
            self._mapping = mapping = Mapping(arena, Chains(arena.index, self.spec))
        return mapping


class Copying:
    """The first blocks of a chain on their way out of mapped slots.

    ``blocks``: how many of them can be copied, and after :meth:`copy` how many were.
    """

    def __init__(self, reader: Reader, mapping: Mapping, keys: bytes, group: int, tiers: Sequence[Tier]) -> None:
        self.group: Final = group
        self.asked: Final = len(keys) // KEY_BYTES
        self.reuses = 0
        self._reader: Final = reader
        self._mapping: Final = mapping
        self._keys: Final = keys
        self._tiers: Final = tiers
        self._bits: Final = sum(tier.bit for tier in tiers)
        self._found: Found = mapping.chains.find(keys, group)
        self.blocks = count_leading(self._found.residency & self._bits != 0)

    @property
    def at_end(self) -> bool:
        """Whether that is all of the chain that is stored: there is nothing to ask the daemon for."""
        if self.blocks == self.asked:
            return True
        return bool(self._found.sure[self.blocks]) and self._found.residency[self.blocks] == 0

    @property
    def misses(self) -> int:
        return self.asked - self.blocks if self.at_end else 0

    def used(self) -> Sequence[bytes]:
        """The keys that tell the daemon which blocks were read."""
        ends = range(self.blocks * KEY_BYTES, 0, -KEY_BYTES)
        if not self._mapping.chains.is_sliding(self.group):
            ends = ends[:1]
        return [self._keys[end - KEY_BYTES : end] for end in ends]

    def copy(self, rows: Sequence[Bytes]) -> None:
        """Fills the rows, one a block, and cuts :attr:`blocks` to those that were there to the end."""
        left = self._copy(rows, np.arange(self.blocks), self._found)
        for _ in range(_TRIES - 1):
            if not len(left):
                break
            left = self._copy_again(rows, left)
        if len(left):
            self.blocks = int(left[0])
        if not self._mapping.arena.current:
            self.blocks = 0
        self._reader.noted(self)

    def _copy_again(self, rows: Sequence[Bytes], places: NDArray[np.intp]) -> NDArray[np.intp]:
        keys = b"".join(self._keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in places.tolist())
        found = self._mapping.chains.find(keys, self.group)
        there = found.residency & self._bits != 0
        return np.sort(np.concatenate((places[~there], self._copy(rows, places, found))))

    def _copy(self, rows: Sequence[Bytes], places: NDArray[np.intp], found: Found) -> NDArray[np.intp]:
        """``places``: of which blocks of the chain the first of ``found`` tell. Returns those copied in vain."""
        todo = found.residency[: len(places)] & self._bits
        void = [places[:0]]
        for tier in self._tiers:
            mine = np.flatnonzero(todo & tier.bit)
            todo[mine] = 0
            if len(mine):
                on_device = tier is Tier.DEVICE
                slots = (found.device_slots if on_device else found.host_slots)[mine]
                generations = (found.device_generations if on_device else found.host_generations)[mine]
                void.append(self._copy_from(tier, rows, places[mine], slots, generations))
        changed = np.concatenate(void)
        self.reuses += len(changed)
        return changed

    def _copy_from(
        self,
        tier: Tier,
        rows: Sequence[Bytes],
        places: NDArray[np.intp],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint64],
    ) -> NDArray[np.intp]:
        arena = self._mapping.arena
        transfer.out_of_slots(arena.pools(tier, self.group), slots.tolist(), [rows[at] for at in places.tolist()])
        # After the bytes: the generation that the index gave is even, and ends before the first of them changes.
        changed: NDArray[np.intp] = places[arena.generations(tier, self.group, slots) != generations]
        return changed
