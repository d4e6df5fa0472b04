"""Gets without a call: chains out of mapped slots into arrays.

:meth:`copy` of both kinds blocks for as long as the bytes take, and may run in any thread; the rest is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier import transfer
from kvtier.abi.keys import KEY_BYTES
from kvtier.again import Again
from kvtier.reading import Copying, Reader
from kvtier.tensors import Bytes, DeviceBytes, Row, Rows
from kvtier.types import Tier
from kvtier.wire import Keys, packed_keys

if TYPE_CHECKING:
    from kvtier.cache import Cache
    from kvtier.gpu import Gpu


_INLINE_BYTES: Final = 4 << 20
"""So much is copied on an event loop: under half a millisecond, of which a thread would take as much to begin."""


async def run(load: Loading | AcrossLoading) -> None:
    """Copies on the loop or, where it takes longer, in a thread."""
    if load.nbytes <= _INLINE_BYTES and not load.waits:
        load.copy()
    else:
        await transfer.run(load.copy, load.nbytes, waits=load.waits)


async def read_again(known: Again, out: transfer.Blocks | None) -> list[Bytes] | None:
    """The same of a chain that was read before: see :meth:`Again.read`. Where no other such get of the cache goes on,
    the loop makes some of a long copy beside the thread, so that neither waits to be woken by the other."""
    if known.nbytes <= _INLINE_BYTES:
        return known.read(out)
    rows = known.rows_of(out)
    if rows is None:
        return None
    reader, copy = known.reader, partial(known.copy, rows)
    reader.copying += 1
    try:
        if reader.copying == 1:
            await transfer.run_shared(copy, known.blocks, known.nbytes)
        else:
            await transfer.run(lambda: copy(0, known.blocks), known.nbytes)
    finally:
        reader.copying -= 1
    return known.copied(out, rows)


class Loading:
    """A get of one window group. ``rows``: what has been copied of the chain, from its first block on."""

    def __init__(
        self,
        cache: Cache,
        keys: Keys,
        out: transfer.Blocks | None,
        tier: Tier | None,
        *,
        in_cpu: bool = False,
    ) -> None:
        """``in_cpu``: the bytes are to pass through the CPU's memory, wherever the targets are.

        Raises :class:`kvtier.errors.InvalidArgument` for what no get can do."""
        self.packed: Final = packed_keys(keys)
        self.place: Final = cache.lease_tier(tier)
        """Where the daemon is to make ready what is not in mapped slots."""
        self.count: Final = len(self.packed) // KEY_BYTES
        gpu = None if tier is None or in_cpu else cache.gpu(tier)
        self._targets: Final = _targets(out, self.count, cache.block_bytes, gpu)
        self._copying: Final = cache.reader.begin(self.packed, cache.group, tier)
        blocks = 0 if self._copying is None else self._copying.blocks
        self.nbytes: Final = blocks * cache.block_bytes
        self.waits: Final = blocks > 0 and self._copying is not None and self._copying.waits
        self._rows: Rows = _fresh(blocks, cache.block_bytes) if self._targets is None else self._targets[:blocks]
        self.rows: list[Row] = []

    @property
    def targets(self) -> list[Row] | None:
        """Where the caller wants the blocks: all of them."""
        return None if self._targets is None else list(self._targets)

    def copy(self) -> None:
        if self._copying is not None:
            self._copying.copy(self._rows)
            self.rows = list(self._rows[: self._copying.blocks])

    def left(self, out: transfer.Blocks, count: int) -> transfer.Blocks:
        """The targets after the first ``count``, for another get: those on a GPU as they were taken for this one, which
        the caller's stream had reached then."""
        if self.targets is None or not any(isinstance(target, DeviceBytes) for target in self.targets):
            return out[count:]
        pairs = zip(out[count:], self.targets[count:], strict=True)
        return [target if isinstance(target, DeviceBytes) else block for block, target in pairs]

    @property
    def done(self) -> bool:
        """Whether there is nothing to ask the daemon for."""
        return self._copying is not None and self._copying.at_end


class AcrossLoading:
    """A get over all window groups: whole, or not without the daemon."""

    def __init__(self, reader: Reader, groups: Sequence[Cache], packed: bytes, tier: Tier | None) -> None:
        self._reader: Final = reader
        self._packed: Final = packed
        self._parts: list[tuple[Copying, Bytes]] | None = []
        self.blocks = 0
        self.nbytes = 0
        self.waits = False
        match = reader.match_across(packed)
        if match is None:
            self._parts = None
            return
        self.blocks = match.blocks
        for span in match.groups if match.blocks else ():
            chain = packed[span.first_block * KEY_BYTES : match.blocks * KEY_BYTES]
            copying = reader.begin(chain, span.group, tier)
            if copying is None or copying.blocks < copying.asked:
                self._parts = None
                return
            block_bytes = groups[span.group].block_bytes
            self.nbytes += copying.blocks * block_bytes
            self.waits = self.waits or copying.waits
            self._parts.append((copying, _fresh(copying.blocks, block_bytes)))

    def copy(self) -> None:
        for copying, rows in self._parts or ():
            copying.copy(rows)

    def result(self) -> tuple[int, dict[int, list[Bytes]]] | None:
        """Blocks of the prefix and, by group, the arrays of its last ones. None: ask the daemon."""
        if self._parts is None or any(copying.blocks < copying.asked for copying, _ in self._parts):
            return None
        missed = len(self._packed) // KEY_BYTES - self.blocks
        groups = range(len(self._reader.spec.groups))
        if missed:
            self._reader.missed_across(missed)
        return self.blocks, {group: [] for group in groups} | {c.group: list(rows) for c, rows in self._parts}


def _targets(out: transfer.Blocks | None, count: int, block_bytes: int, gpu: Gpu | None) -> Rows | None:
    """Raises :class:`kvtier.errors.InvalidArgument`."""
    if transfer.in_one_piece(out, count, block_bytes):
        return transfer.rows_of(out, count)
    return None if out is None else transfer.writable(out, count, block_bytes, gpu)


def _fresh(blocks: int, block_bytes: int) -> Bytes:
    return np.empty((blocks, block_bytes), dtype=np.uint8)
