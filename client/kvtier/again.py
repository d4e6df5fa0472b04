"""A chain that is read once more: what was found of it the last time, and the few steps that it takes then.

After a copy there is little but data in the near caches of a processor, and what is done around it takes up to ten
times as long as warm. So it counts how many different steps there are, and these have been made as few as they can be
without leaving out any of the comparisons that make a read without a call right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier import transfer
from kvtier.abi.key_index import Entry, Found, IndexReader, Seen
from kvtier.abi.keys import KEY_BYTES
from kvtier.arena import Arena
from kvtier.memory import CpuMemory
from kvtier.tensors import Bytes
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.reading import Reader

CHAINS: Final = 16
"""So many are remembered of a mapped cache."""
MOST_BYTES: Final = 256 * KEY_BYTES
"""Of one chain's keys: looking up more takes little of the time that copying them takes."""

Asked: TypeAlias = "tuple[int, Tier | None, bytes]"
"""Window group, the tier that will do (None: any), packed keys."""


@dataclass(slots=True)
class Remembered:
    """Where all the blocks of a chain of a full-attention group were when it was read last. Whether they still are, the
    index says of the last one, and generations of all. ``tier``: one that has them all, in these ``slots`` of these
    ``generations``. ``again``: from the second read on, where few steps will do."""

    found: Found
    last: Entry
    tier: Tier | None
    slots: NDArray[np.intp]
    generations: NDArray[np.uint64]
    again: Again | None = None


@dataclass(slots=True, frozen=True, eq=False, repr=False)
class Again:
    """Such a chain, in slots of the CPU's memory."""

    key: bytes
    """Of its last block."""
    group: int
    blocks: int
    nbytes: int
    _arena: Arena
    _index: IndexReader
    _seen: Seen
    _tier: Tier
    _shape: tuple[int, int]
    _pools: tuple[Bytes, ...]
    _slots: NDArray[np.intp]
    _generations: bytes
    reader: Reader

    def stands(self) -> bool:
        """Whether its last block is still where it was, and with it all: see :meth:`kvtier.chains.Chains.stands`. False
        also where that takes a closer look."""
        return self._index.stands(self._seen)

    def read(self, out: transfer.Blocks | None) -> list[Bytes] | None:
        """Copies the blocks into ``out``, or where that is None into a fresh array, and returns them one by one. None:
        to fill that takes more steps, or the blocks were not there to the end."""
        rows = self.rows_of(out)
        if rows is None:
            return None
        transfer.out_of_slots(self._pools, self._slots, rows, True)
        return self.copied(out, rows)

    def rows_of(self, out: transfer.Blocks | None) -> Bytes | None:
        """The bytes that ``out`` is filled by, fresh ones where that is None. None: it takes more steps."""
        return transfer.as_rows(out, self._shape)

    def copy(self, rows: Bytes, start: int, end: int) -> None:
        """The blocks from one number up to another."""
        transfer.out_of_slots(self._pools, self._slots[start:end], rows[start:end], True)

    def copied(self, out: transfer.Blocks | None, rows: Bytes) -> list[Bytes] | None:
        """After all has been copied: the blocks one by one, or None where they were not there to the end."""
        # After the bytes: see Copying.
        now = self._arena.generations(self._tier, self.group, self._slots).tobytes()
        if now != self._generations:
            self.reader.count(reuses=_differing(now, self._generations))
            return None
        if not self._arena.current:
            return None
        self.reader.noted_again(self)
        return list(out) if isinstance(out, list) else list(rows)


def again(reader: Reader, arena: Arena, index: IndexReader, keys: bytes, group: int, known: Remembered) -> Again | None:
    """What reading a chain once more takes. None: it is not all in one tier of the CPU's memory, or its last block is
    not where it was."""
    memory = None if known.tier is None else arena.memory(known.tier)
    if known.tier is None or not isinstance(memory, CpuMemory):
        return None
    seen = index.see(keys[-KEY_BYTES:], group, known.last)
    if seen is None:
        return None
    pools, blocks = memory.pools(group), len(known.slots)
    if not transfer.are_slots(pools, known.slots):  # see Copying
        return None
    block_bytes = sum(pool.shape[1] for pool in pools)
    return Again(
        keys[-KEY_BYTES:],
        group,
        blocks,
        blocks * block_bytes,
        arena,
        index,
        seen,
        known.tier,
        (blocks, block_bytes),
        pools,
        known.slots,
        known.generations.tobytes(),
        reader,
    )


def _differing(some: bytes, others: bytes) -> int:
    return int((np.frombuffer(some, np.uint64) != np.frombuffer(others, np.uint64)).sum())
