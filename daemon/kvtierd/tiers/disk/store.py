"""A cache's blocks on disk: slabs for the bytes, an index for the truth."""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.tiers.base import TierConfigError, TierError, TierIOError
from kvtierd.tiers.disk.batch import Batch, DiskWrite, GroupTable, Restatement, Retirement
from kvtierd.tiers.disk.index import DATA, Index, IndexChanges
from kvtierd.tiers.disk.records import checksum
from kvtierd.tiers.disk.recovery import Recovery, recover_group
from kvtierd.tiers.disk.slab import Slab, SlabRecord, SlabShape, create_slab
from kvtierd.tiers.disk.superblock import allocate, io_errors, sync_directory

INDEX: Final = "index"
_MIN_TOUCH_BYTES: Final = 64 << 10
_TOUCH_BYTES_PER_SLOT: Final = 16
_CLEARED_AT_ONCE: Final = 10_000

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Begun:
    """A batch whose bytes are on their way to the disk, from :meth:`DiskStore.begin`. ``moving``: threads that write;
    their results are indices into ``writes``. ``sync_failures``: number of failed syncs when the batch began."""

    writes: Sequence[DiskWrite]
    checksums: Sequence[bytes]
    moving: Sequence[Future[list[int]]]
    sync_failures: int


class DiskRead(NamedTuple):
    """A block to fetch into ``parts`` (writable, otherwise like :class:`DiskWrite`'s)."""

    group: GroupId
    slot: SlotId
    key: Key
    parts: Sequence[memoryview]


@dataclass(slots=True, frozen=True)
class ReadReport:
    """Indices of failed reads. Other reads have their block's verified bytes; failed reads have garbage.

    ``failed``: the disk gave no bytes. ``corrupt``: the slot holds another block, or its bytes have changed since they
    were written.
    """

    failed: frozenset[int]
    corrupt: frozenset[int]


def slab_name(group: GroupId) -> str:
    return f"group-{group}.slab"


def _inside(slots: Iterable[SlotId], shape: SlabShape) -> frozenset[SlotId]:
    """The slots inside of the slab: a damaged index may name others."""
    return frozenset(slot for slot in slots if slot < shape.slots)


def create_files(directory: Path, shapes: Mapping[GroupId, SlabShape], map_bytes: int) -> None:
    """Makes an empty store in ``directory``, with all its disk space allocated. Raises :class:`TierIOError`."""
    for group, shape in shapes.items():
        create_slab(directory / slab_name(group), shape)
    Index.create(directory / INDEX, tuple(shapes), map_bytes)
    with io_errors(f"cannot create {directory}"):
        sync_directory(directory)


def grow_files(directory: Path, shapes: Mapping[GroupId, SlabShape], map_bytes: int) -> None:
    """Allocates disk space for a store that is not open and is to become larger. Raises OSError."""
    for group, shape in shapes.items():
        allocate(directory / slab_name(group), shape.nbytes)
    allocate(directory / INDEX / DATA, map_bytes)


def trim_files(directory: Path, shapes: Mapping[GroupId, SlabShape]) -> None:
    """Gives back disk space behind the slabs of a store that is not open. Raises OSError."""
    for group, shape in shapes.items():
        os.truncate(directory / slab_name(group), shape.nbytes)


class DiskStore:
    """A store. Blocking; for threads. A single thread at a time commits (others wait). Any number of threads may read
    meanwhile, and one may write the bytes of the next batch (:meth:`begin`).

    Call :meth:`recover` first. The caller gives a slot to another block only after the call that retired the old block
    has returned, and never reads a slot during a write to it.
    """

    def __init__(
        self, shapes: Mapping[GroupId, SlabShape], fingerprint: bytes, slabs: Mapping[GroupId, Slab], index: Index
    ) -> None:
        self._shapes = shapes
        self._fingerprint = fingerprint
        self._slabs = slabs
        self._index = index
        self._tables: dict[GroupId, GroupTable] = {}
        self._committing = threading.Lock()
        self._sync_failures = 0
        self._doubtful: set[tuple[GroupId, Key]] = set()
        """Blocks reported as failed, although their failed transaction may have reached the disk."""
        self._corrupt: set[tuple[GroupId, SlotId]] = set()
        """Corrupt slots found by readers, not yet in the index. Use only operations that the GIL makes atomic."""
        self.closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        shapes: Mapping[GroupId, SlabShape],
        fingerprint: bytes,
        map_bytes: int,
        *,
        durable: bool = False,
    ) -> Self:
        """Opens the files of :func:`create_files`. Raises :class:`DamagedDirectory`, :class:`TierIOError`. ``durable``:
        no crash of the system undoes a call that has returned; else a crash may undo the last transaction."""
        with ExitStack() as opened:
            slabs: dict[GroupId, Slab] = {}
            for group, shape in shapes.items():
                slabs[group] = Slab.open(directory / slab_name(group), shape)
                opened.callback(slabs[group].close)
            index = Index.open(directory / INDEX, tuple(shapes), map_bytes, durable=durable)
            opened.pop_all()
        return cls(dict(shapes), fingerprint, slabs, index)

    def recover(self) -> Recovery:
        """Reads the whole index, and deletes records that cannot be served. Raises :class:`TierIOError`."""
        with self._committing:
            self._commit(Batch(self._tables))
            stored = {group: self._index.load(group) for group in self._shapes}
            groups = {group: recover_group(stored[group], shape) for group, shape in self._shapes.items()}
            deletes = {
                group: IndexChanges(deletes=list(found.dropped)) for group, found in groups.items() if found.dropped
            }
            if deletes:
                self._index.commit(deletes)
            self._tables = {group: found.table for group, found in groups.items()}
            self._doubtful.clear()
        dropped = sum(len(found.dropped) for found in groups.values())
        return Recovery(
            records={group: found.records for group, found in groups.items()},
            quarantined={g: _inside(stored[g].quarantined, shape) for g, shape in self._shapes.items()},
            corrupt={group: found.corrupt for group, found in groups.items()},
            dropped=dropped,
        )

    def write(
        self,
        writes: Sequence[DiskWrite],
        retire: Sequence[Retirement] = (),
        touches: Sequence[tuple[GroupId, bytes]] = (),
        restate: Sequence[Restatement] = (),
    ) -> frozenset[int]:
        """Stores blocks, forgets others and notes uses, in one transaction: :meth:`begin` and :meth:`finish`."""
        return self.finish(self.begin(writes), retire, touches, restate)

    def begin(self, writes: Sequence[DiskWrite]) -> Begun:
        """Begins to write the bytes of blocks. No block is stored before :meth:`finish`, which another thread may call
        while the next batch begins. Batches finish in the order in which they began.

        Raises:
            TierConfigError: a slot beyond the slab, or parts of a wrong size. Nothing has changed.
            InvariantViolation: a slot with a block, or two writes of the same slot or block. Nothing has changed.
        """
        pieces: defaultdict[GroupId, list[SlabRecord]] = defaultdict(list)
        taken: set[tuple[GroupId, SlotId | Key]] = set()
        for number, (group, slot, key, _, _, parts) in enumerate(writes):
            holder = self._place(group, slot, parts).key_at(slot)
            if holder is not None:
                raise InvariantViolation(f"disk slot {slot} still holds block {holder.hex()}")
            pieces[group].append(SlabRecord(number, slot, parts))
            taken |= {(group, slot), (group, key)}
        if len(taken) < 2 * len(writes):
            raise InvariantViolation("two writes of one batch to the same disk slot or of the same block")
        sync_failures = self._sync_failures
        moving = [each for group, wanted in pieces.items() for each in self._slabs[group].begin_write(wanted)]
        try:
            checksums = [checksum(write.parts, write.key, self._fingerprint) for write in writes]
        except BaseException:
            wait(moving)  # no write may be under way after an error
            raise
        return Begun(writes, checksums, moving, sync_failures)

    def finish(
        self,
        begun: Begun,
        retire: Sequence[Retirement] = (),
        touches: Sequence[tuple[GroupId, bytes]] = (),
        restate: Sequence[Restatement] = (),
    ) -> frozenset[int]:
        """Stores a begun batch, with one sync and one transaction, which no end of this process undoes. A crash of the
        machine may undo the last transaction as a whole, unless the store is durable.

        Args:
            begun: A write moves a block that has another slot.
            retire: blocks to forget, if they are in the given slot. ``touches``: packed keys, in order of use.
            restate: the new retention of blocks on disk.
        Returns: Indices of failed writes; their slots hold no block. A write fails, too, if its block's parent is not
            on disk.
        Raises: TierIOError: the transaction failed, and had retirements, which are not done, or no writes.
        """
        with self._committing:
            try:
                planned, failed = self._plan(begun, frozenset(), retire, touches, restate)
            finally:
                wait(begun.moving)
            if lost := self._not_synced(begun):
                planned, failed = self._plan(begun, lost, retire, touches, restate)
            try:
                self._commit(planned)
            except TierIOError:
                if retire or not begun.writes:
                    raise
                _log.exception("%d blocks were not stored", len(begun.writes))
                return frozenset(range(len(begun.writes)))
            return failed

    def read(self, reads: Sequence[DiskRead], *, held: bool = True) -> ReadReport:
        """Fetches and verifies blocks. ``held``: False for blocks that may leave their slots meanwhile, which are then
        not marked as corrupt. Raises :class:`TierConfigError` like :meth:`begin`, before any read."""
        pieces: defaultdict[GroupId, list[SlabRecord]] = defaultdict(list)
        expected: dict[int, bytes] = {}
        corrupt: set[int] = set()
        for number, (group, slot, key, parts) in enumerate(reads):
            table = self._place(group, slot, parts)
            if table.key_at(slot) == key:
                expected[number] = table.checksum_at(slot)
                pieces[group].append(SlabRecord(number, slot, parts))
            else:
                corrupt.add(number)
        failed = {number for group, wanted in pieces.items() for number in self._slabs[group].read(wanted)}
        for number in expected.keys() - failed:
            group, slot, key, parts = reads[number]
            if checksum(parts, key, self._fingerprint) != expected[number]:
                corrupt.add(number)
                if held:
                    self._corrupt.add((group, slot))
        return ReadReport(frozenset(failed), frozenset(corrupt))

    def sync(self) -> None:
        """Makes earlier calls durable over crashes of the system. Does nothing in a closed store."""
        with self._committing:
            if self.closed:
                return
            try:
                self._index.sync()
            except TierIOError:
                _log.exception("what was written last may be undone if the system goes down")

    def probe(self) -> None:
        """Writes and reads back test bytes in each slab. Raises :class:`TierIOError` if that fails."""
        for slab in self._slabs.values():
            slab.probe()

    def clear(self) -> None:
        """Forgets every block; corrupt slots stay marked. No read or write may be under way. Raises
        :class:`TierIOError`; blocks may then be left, and the call may be repeated."""
        with self._committing:
            for group, slab in self._slabs.items():
                slab.allocate()
                keys = self._index.load(group).keys
                for first in range(0, len(keys), _CLEARED_AT_ONCE):
                    self._index.commit({group: IndexChanges(deletes=list(keys[first : first + _CLEARED_AT_ONCE]))})
        self.recover()

    def close(self) -> None:
        """Closes the files. No call may be under way. A second close does nothing."""
        with self._committing:
            if self.closed:
                return
            self.closed = True
            try:
                self._commit(Batch(self._tables))
                self._index.sync()
            except TierIOError:
                _log.exception("corrupt slots could not be remembered; they will be found again")
            finally:
                self._index.close()
                for slab in self._slabs.values():
                    slab.close()

    def _place(self, group: GroupId, slot: SlotId, parts: Sequence[memoryview]) -> GroupTable:
        """The slot's table. Raises TierConfigError, also for parts of a wrong size, which could overwrite the next
        slot."""
        table = self._tables.get(group)
        if table is None:
            raise TierError(f"group {group} has not been recovered")
        if not 0 <= slot < table.shape.slots:
            raise TierConfigError("slot", slot, f"0 to {table.shape.slots - 1}")
        nbytes = sum(map(len, parts))
        if nbytes != table.shape.record_bytes:
            raise TierConfigError("parts", f"{nbytes} bytes", f"one record of {table.shape.record_bytes} bytes")
        return table

    def _not_synced(self, begun: Begun) -> frozenset[int]:
        """Indices of writes whose bytes did not reach the medium. A failed sync does not tell which bytes were lost, so
        all writes that had begun before it count as lost."""
        unwritten = frozenset(number for each in begun.moving for number in each.result())
        for group in {write.group for write in begun.writes}:
            try:
                self._slabs[group].sync()
            except OSError:
                _log.exception("%s: sync failed", self._slabs[group].path)
                self._sync_failures += 1
        return frozenset(range(len(begun.writes))) if begun.sync_failures != self._sync_failures else unwritten

    def _plan(
        self,
        begun: Begun,
        lost: frozenset[int],
        retire: Sequence[Retirement],
        touches: Sequence[tuple[GroupId, bytes]],
        restate: Sequence[Restatement],
    ) -> tuple[Batch, frozenset[int]]:
        """Plans the transaction without ``lost`` writes. Returns also the indices of all writes that are not in it."""
        batch = Batch(self._tables)
        for group in {group for group, _ in touches}:
            most = max(_MIN_TOUCH_BYTES, _TOUCH_BYTES_PER_SLOT * self._shapes[group].slots)
            if self._index.touch_bytes(group) > most:
                batch.fold(group)
        batch.retire(retire)
        failed = batch.put(begun.writes, begun.checksums, lost, self._doubtful)
        for group, key, traits in restate:
            batch.restate(group, key, traits)
        for group, packed in touches:
            batch.touch(group, packed)
        return batch, failed

    def _commit(self, batch: Batch) -> None:
        """Commits a batch with the pending deletions and quarantines. Raises :class:`TierIOError`."""
        for group, key in self._doubtful:
            batch.discard(group, key)
        corrupt = set(self._corrupt)
        for group, slot in corrupt:
            batch.condemn(group, slot)
        if not batch.changes:
            return
        try:
            self._index.commit(batch.changes)
        except TierIOError:
            self._doubtful.update(batch.stored)
            raise
        self._doubtful.clear()
        self._corrupt -= corrupt
        batch.apply()
