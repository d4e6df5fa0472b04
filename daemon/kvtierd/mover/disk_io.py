"""Disk batches: writer and reader threads pass blocks to the store. The order of use is written once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Final

import xxhash

from kvtierd.core.ids import GroupId, Key, SlotId, Traits
from kvtierd.mover.runtime import Batch, CacheRuntime, CopyPiece, Faults, Finish
from kvtierd.mover.work import Concerns, destination, items_of, target
from kvtierd.tiers.base import TierError
from kvtierd.tiers.disk.batch import DiskWrite, Retirement
from kvtierd.tiers.disk.store import DiskRead


def write(batch: Batch) -> Finish:
    """Stores blocks and retires slots in one transaction. Raises ``TierIOError`` if nothing was stored."""
    runtime = batch[0].runtime
    parts = {
        place: runtime.memory(move.src).padded_parts(move.group, item.src)
        for place, (move, item) in enumerate(items_of(batch))
        if item.dst is not None
    }
    return store(batch, parts)


def store(batch: Batch, parts: Mapping[int, Sequence[memoryview]], *, lent: bool = False) -> Finish:
    """Like :func:`write`, with the records of the blocks by their places in the batch.

    A block without a record fails. A block whose bytes differ from the committed bytes is not written.

    While one batch is made durable, the bytes of the next batch are written.

    Args:
        lent: The caller reuses the records after this returns, so this waits for the disk.
    """
    runtime = batch[0].runtime
    disk = runtime.store
    writes: list[DiskWrite] = []
    places: list[int] = []
    retires: list[Retirement] = []
    failed: set[int] = set()
    corrupt: set[int] = set()
    for place, (move, item) in enumerate(items_of(batch)):
        if item.dst is None:
            retires.append((move.group, item.key, item.src))
        elif place in parts and not _as_committed(runtime, move.group, item.traits, parts[place]):
            corrupt.add(place)
        elif place in parts:
            writes.append(DiskWrite(move.group, item.dst, item.key, item.parent, item.traits, parts[place]))
            places.append(place)
        else:
            failed.add(place)
    begun = disk.begin(writes)
    if lent:
        wait(begun.moving)

    def finish() -> Faults:
        unstored = disk.finish(begun, retires)
        return Faults(frozenset(failed.union(places[index] for index in unstored)), frozenset(corrupt))

    return finish


def _as_committed(runtime: CacheRuntime, group: GroupId, traits: Traits, record: Sequence[memoryview]) -> bool:
    """Whether a block's bytes have the checksum of its commit, if there is one. ``record``: one view, or one view a
    pool."""
    if traits.label is None or not traits.label.checksum:
        return True
    pools, digest, whole = runtime.arena.layout.groups[group].pools, xxhash.xxh3_128(), len(record) == 1
    for number, pool in enumerate(pools):
        start = pool.record_offset if whole else 0
        digest.update(record[0 if whole else number][start : start + pool.block_bytes])
    return digest.digest() == traits.label.checksum


def read(batch: Batch) -> Faults:
    """Reads blocks into memory and verifies them."""
    runtime = batch[0].runtime
    items = items_of(batch)
    return fetch(batch, [runtime.memory(target(m)).padded_parts(m.group, destination(item)) for m, item in items])


def fetch(batch: Batch, parts: Sequence[Sequence[memoryview]]) -> Faults:
    """Like :func:`read`, into these records, one for each item."""
    reads = [
        DiskRead(move.group, item.src, item.key, into)
        for (move, item), into in zip(items_of(batch), parts, strict=True)
    ]
    report = batch[0].runtime.store.read(reads)
    return Faults(failed=report.failed, corrupt=report.corrupt)


def concerns(piece: CopyPiece) -> Concerns:
    """The disk slots and blocks that a piece of the writer changes. No two pieces of a batch may change the same.

    A slot is written only after the transaction that deleted its old record, and a record is deleted only after the
    transaction that put it there. Inside a transaction payloads come first, then deletions, then records.
    """
    group, about = piece.move.group, set[tuple[GroupId, SlotId | Key]]()
    for key, _, _, src, dst in piece.items:
        about |= {(group, key), (group, src if dst is None else dst)}
    return about


NOTED_EVERY_S: Final = 1.0


class UseLog:
    """Writes one cache's order of use to its disk. Loop thread only; writes run in a thread, one at a time."""

    def __init__(self, runtime: CacheRuntime) -> None:
        self._runtime = runtime
        self._writing: asyncio.Task[None] | None = None
        self._written_at = time.monotonic()
        self.problem: str | None = None
        """Why the last write failed. Its uses are lost: the order suffers, no block is lost."""

    def note(self) -> None:
        """Starts a write if one is due and none is running. Meanwhile the core collects uses."""
        busy = self._writing is not None and not self._writing.done()
        if not busy and time.monotonic() - self._written_at >= NOTED_EVERY_S:
            self._start()

    async def finish(self) -> None:
        """Returns when all uses so far are on disk or could not be written. If the caller is cancelled, a running write
        goes on in its thread."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._start()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _start(self) -> None:
        self._written_at = time.monotonic()
        uses = self._runtime.manager.take_disk_uses()
        changed = self._runtime.manager.take_restated()
        if uses or changed:
            self._writing = asyncio.get_running_loop().create_task(self._write(uses, changed))

    async def _write(
        self, uses: Mapping[GroupId, Sequence[Key]], changed: Mapping[GroupId, Sequence[tuple[Key, Traits]]]
    ) -> None:
        touches = [(group, b"".join(keys)) for group, keys in uses.items()]
        restate = [(group, key, traits) for group, blocks in changed.items() for key, traits in blocks]
        try:
            await asyncio.to_thread(self._runtime.store.write, (), (), touches, restate)
            self.problem = None
        except TierError as error:
            self.problem = f"cache {self._runtime.name}: the order of use could not be written: {error}"
