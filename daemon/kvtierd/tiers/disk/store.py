"""One cache's blocks on disk: slabs for the bytes, an index for the truth."""

from __future__ import annotations

import logging
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
from kvtierd.tiers.disk.index import Changes, Index
from kvtierd.tiers.disk.records import checksum
from kvtierd.tiers.disk.recovery import Recovery, recover_group
from kvtierd.tiers.disk.slab import Piece, Slab, SlabShape, create_slab
from kvtierd.tiers.disk.superblock import io_errors, sync_directory

INDEX: Final = "index"
_MIN_TOUCH_BYTES: Final = 64 << 10
_TOUCH_BYTES_PER_SLOT: Final = 16
_CLEARED_AT_ONCE: Final = 10_000

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Begun:
    """A batch whose bytes are on their way to the disk, as :meth:`DiskStore.begin` returns it.

    ``moving``: threads that write; their results are indices into ``writes``. ``sync_failures``: how many there had
    been when the batch began.
    """

    writes: Sequence[DiskWrite]
    checksums: Sequence[bytes]
    moving: Sequence[Future[list[int]]]
    sync_failures: int


class DiskRead(NamedTuple):
    """One block to fetch into ``parts`` (writable, else as in :class:`DiskWrite`)."""

    group: GroupId
    slot: SlotId
    key: Key
    parts: Sequence[memoryview]


@dataclass(slots=True, frozen=True)
class ReadReport:
    """Indices into the reads asked for; those in neither set hold their block's verified bytes, the others garbage.

    ``failed``: the disk did not deliver. ``corrupt``: the slot does not hold this block, or its bytes are not what
    was written.
    """

    failed: frozenset[int]
    corrupt: frozenset[int]


def slab_name(group: GroupId) -> str:
    return f"group-{group}.slab"


def _inside(slots: Iterable[SlotId], shape: SlabShape) -> frozenset[SlotId]:
    """Without those that a damaged index says beyond the slab."""
    return frozenset(slot for slot in slots if slot < shape.slots)


def create_files(directory: Path, shapes: Mapping[GroupId, SlabShape], map_bytes: int) -> None:
    """Makes an empty store in ``directory``, with all the disk it will ever take. Raises :class:`TierIOError`."""
    for group, shape in shapes.items():
        create_slab(directory / slab_name(group), shape)
    Index.create(directory / INDEX, tuple(shapes), map_bytes)
    with io_errors(f"cannot create {directory}"):
        sync_directory(directory)


class DiskStore:
    """Blocking; for threads. One thread at a time commits (others wait), any number read beside it, and one may write
    the bytes of the next batch meanwhile (:meth:`begin`).

    :meth:`recover` comes first. The caller gives a slot to another block only after the call that retired the old one
    has returned, and reads only slots that nothing is being written to.
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
        """Reported as failed, though their transaction may have reached the disk before it broke."""
        self._corrupt: set[tuple[GroupId, SlotId]] = set()
        """Found by readers, not yet in the index. Only single operations that the GIL makes atomic touch it."""
        self._closed = False

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
        """Opens the files of :func:`create_files`. Raises :class:`DamagedDirectory`, :class:`TierIOError`.

        ``durable``: no crash of the system undoes a call that has returned. Else it may undo the last transaction.
        """
        with ExitStack() as opened:
            slabs: dict[GroupId, Slab] = {}
            for group, shape in shapes.items():
                slabs[group] = Slab.open(directory / slab_name(group), shape)
                opened.callback(slabs[group].close)
            index = Index.open(directory / INDEX, tuple(shapes), map_bytes, durable=durable)
            opened.pop_all()
        return cls(dict(shapes), fingerprint, slabs, index)

    @property
    def closed(self) -> bool:
        return self._closed

    def recover(self) -> Recovery:
        """Reads the whole index, deletes records that cannot be served. Raises :class:`TierIOError`."""
        with self._committing:
            self._commit(Batch(self._tables))
            stored = {group: self._index.load(group) for group in self._shapes}
            groups = {group: recover_group(stored[group], shape) for group, shape in self._shapes.items()}
            deletes = {group: Changes(deletes=list(found.dropped)) for group, found in groups.items() if found.dropped}
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
        return self.finish([self.begin(writes)], retire, touches, restate)

    def begin(self, writes: Sequence[DiskWrite]) -> Begun:
        """Begins to write the bytes of blocks. Nothing is stored before :meth:`finish`, which may be called from
        another thread while the next batch begins; batches finish in the order in which they began.

        Raises:
            TierConfigError: a slot beyond the slab, or parts that are not one record. Nothing has changed.
            InvariantViolation: a slot that holds a block, or two writes of one slot or block. Nothing has changed.
        """
        pieces: defaultdict[GroupId, list[Piece]] = defaultdict(list)
        taken: set[tuple[GroupId, SlotId | Key]] = set()
        for number, (group, slot, key, _, _, parts) in enumerate(writes):
            holder = self._place(group, slot, parts).key_at(slot)
            if holder is not None:
                raise InvariantViolation(f"disk slot {slot} still holds block {holder.hex()}")
            pieces[group].append(Piece(number, slot, parts))
            taken |= {(group, slot), (group, key)}
        if len(taken) < 2 * len(writes):
            raise InvariantViolation("two writes of one batch to the same disk slot or of the same block")
        sync_failures = self._sync_failures
        moving = [each for group, wanted in pieces.items() for each in self._slabs[group].begin_write(wanted)]
        try:
            checksums = [checksum(write.parts, write.key, self._fingerprint) for write in writes]
        except BaseException:
            wait(moving)  # nothing may be under way any more
            raise
        return Begun(writes, checksums, moving, sync_failures)

    def finish(
        self,
        batches: Sequence[Begun],
        retire: Sequence[Retirement] = (),
        touches: Sequence[tuple[GroupId, bytes]] = (),
        restate: Sequence[Restatement] = (),
    ) -> frozenset[int]:
        """Stores what has begun, with one sync and one transaction, which no end of this process undoes.
        A crash of the machine may undo the last transaction, whole, unless the store is durable.

        Args:
            batches: in the order in which they began. A write of a block that has another slot moves it.
            retire: blocks to forget, if they are in the slot given. ``touches``: packed keys, in order of use.
            restate: the retention of blocks on disk from now on.
        Returns: Indices, through all writes, of those that failed, as a block does whose parent is not on disk: their
            slots hold nothing.
        Raises: TierIOError: the transaction failed with something to retire, which is still there, or nothing to write.
        """
        writes = [write for begun in batches for write in begun.writes]
        checksums = [each for begun in batches for each in begun.checksums]
        with self._committing:
            try:
                planned, failed = self._plan(writes, checksums, frozenset(), retire, touches, restate)
            finally:
                wait([each for begun in batches for each in begun.moving])
            if lost := self._not_synced(batches):
                planned, failed = self._plan(writes, checksums, lost, retire, touches, restate)
            try:
                self._commit(planned)
            except TierIOError:
                if retire or not writes:
                    raise
                _log.exception("%d blocks were not stored", len(writes))
                return frozenset(range(len(writes)))
            return failed

    def read(self, reads: Sequence[DiskRead]) -> ReadReport:
        """Fetches and verifies blocks. Raises :class:`TierConfigError` as :meth:`begin` does, having read nothing."""
        pieces: defaultdict[GroupId, list[Piece]] = defaultdict(list)
        expected: dict[int, bytes] = {}
        corrupt: set[int] = set()
        for number, (group, slot, key, parts) in enumerate(reads):
            table = self._place(group, slot, parts)
            if table.key_at(slot) == key:
                expected[number] = table.checksum_at(slot)
                pieces[group].append(Piece(number, slot, parts))
            else:
                corrupt.add(number)
        failed = {number for group, wanted in pieces.items() for number in self._slabs[group].read(wanted)}
        for number in expected.keys() - failed:
            group, slot, key, parts = reads[number]
            if checksum(parts, key, self._fingerprint) != expected[number]:
                corrupt.add(number)
                self._corrupt.add((group, slot))
        return ReadReport(frozenset(failed), frozenset(corrupt))

    def peek(self, read: DiskRead) -> bool:
        """Reads a block that may leave its slot meanwhile. Whether ``parts`` hold its verified bytes; the slot is not
        blamed. Raises :class:`TierIOError`."""
        group, slot, key, parts = read
        table = self._place(group, slot, parts)
        if table.key_at(slot) != key:
            return False
        expected = table.checksum_at(slot)
        failed = self._slabs[group].read([Piece(0, slot, parts)])
        return not failed and checksum(parts, key, self._fingerprint) == expected

    def sync(self) -> None:
        """No crash of the system undoes earlier calls when this returns. Does nothing in a closed store."""
        with self._committing:
            if self._closed:
                return
            try:
                self._index.sync()
            except TierIOError:
                _log.exception("what was written last may be undone if the system goes down")

    def probe(self) -> None:
        """Whether bytes can be written and read back. Raises :class:`TierIOError`."""
        for slab in self._slabs.values():
            slab.probe()

    def clear(self) -> None:
        """Forgets every block; slots found corrupt stay so. No read or write may be under way. Raises
        :class:`TierIOError`: some may be left then, and it can be called again."""
        with self._committing:
            for group, slab in self._slabs.items():
                slab.allocate()
                keys = self._index.load(group).keys
                for first in range(0, len(keys), _CLEARED_AT_ONCE):
                    self._index.commit({group: Changes(deletes=list(keys[first : first + _CLEARED_AT_ONCE]))})
        self.recover()

    def close(self) -> None:
        """No call may be under way. A second close does nothing."""
        with self._committing:
            if self._closed:
                return
            self._closed = True
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
        """The slot's table. Parts of more than one record would be written over the next slot."""
        table = self._tables.get(group)
        if table is None:
            raise TierError(f"group {group} has not been recovered")
        if not 0 <= slot < table.shape.slots:
            raise TierConfigError("slot", slot, f"0 to {table.shape.slots - 1}")
        nbytes = sum(map(len, parts))
        if nbytes != table.shape.record_bytes:
            raise TierConfigError("parts", f"{nbytes} bytes", f"one record of {table.shape.record_bytes} bytes")
        return table

    def _not_synced(self, batches: Sequence[Begun]) -> frozenset[int]:
        """Indices of writes whose bytes did not reach the medium. A sync that fails says nothing of which bytes were
        lost, so all writes that had begun by then are."""
        unwritten: set[int] = set()
        base = 0
        for begun in batches:
            unwritten.update(base + number for each in begun.moving for number in each.result())
            base += len(begun.writes)
        for group in {write.group for begun in batches for write in begun.writes}:
            try:
                self._slabs[group].sync()
            except OSError:
                _log.exception("%s: sync failed", self._slabs[group].path)
                self._sync_failures += 1
        lost = any(begun.sync_failures != self._sync_failures for begun in batches)
        return frozenset(range(base) if lost else unwritten)

    def _plan(
        self,
        writes: Sequence[DiskWrite],
        checksums: Sequence[bytes],
        lost: frozenset[int],
        retire: Sequence[Retirement],
        touches: Sequence[tuple[GroupId, bytes]],
        restate: Sequence[Restatement],
    ) -> tuple[Batch, frozenset[int]]:
        """Without those writes that are ``lost``; and which are not in it, the lost ones among them."""
        batch = Batch(self._tables)
        batch.retire(retire)
        failed = batch.put(writes, checksums, lost, self._doubtful)
        for group, key, traits in restate:
            batch.restate(group, key, traits)
        for group, packed in touches:
            batch.touch(group, packed)
            if self._index.touch_bytes(group) > max(
                _MIN_TOUCH_BYTES, _TOUCH_BYTES_PER_SLOT * self._shapes[group].slots
            ):
                batch.fold(group)
        return batch, failed

    def _commit(self, batch: Batch) -> None:
        """Does the housekeeping that was waiting for a transaction, too. Raises :class:`TierIOError`."""
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
