"""Copies for a cache whose device tier is a GPU: from slot to slot, and for disks and streams, which cannot reach its
slots."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

import numpy as np

from kvtier.abi.cuda.driver import Copies
from kvtier.abi.cuda.errors import CudaError, CudaLost
from kvtier.abi.cuda.page_locks import PageLocks
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import DEVICE, GroupId, SlotId, Tier
from kvtierd.mover import disk_io
from kvtierd.mover.cuda.plan import Direction, Sites, StagedRecords
from kvtierd.mover.cuda.staging import Buffer, Staging
from kvtierd.mover.cuda.traffic import Passage, Touched, Traffic
from kvtierd.mover.runtime import Batch, Faults, Finish, Stretch, Unaccounted
from kvtierd.mover.work import destination, items_of, target
from kvtierd.tiers.base import Bytes, TierError, TierIOError
from kvtierd.tiers.cuda.pool import CudaDevice
from kvtierd.tiers.mapped import HostStore

BATCH_BYTES: Final = 16 << 20
"""Limit of bytes that a batch copies to or from the device, unless a single block is larger. With small batches a small
copy waits only for a few of them, and the bus stays busy while the next batch is prepared."""
DRAIN_S: Final = 5.0
"""Time that a close waits for copies in flight."""

_log = logging.getLogger(__name__)


class CudaCopies:
    """The copies of one cache. All calls block, so only threads make them. ``host``, and ``segment``, all of its
    memory: None if the cache has no host tier. Raises :class:`CudaError`."""

    batch_bytes: Final = BATCH_BYTES

    def __init__(
        self, name: str, layout: ArenaLayout, device: CudaDevice, host: HostStore | None, segment: Bytes | None
    ) -> None:
        self._name = name
        self._device = device
        self._host = host
        self._segment = segment  # stays mapped while a copy may touch it
        start, nbytes = (0, 0) if segment is None else (segment.ctypes.data, len(segment))
        self._sites = Sites(layout, device, start)
        self.locks: Final = PageLocks(name, device.driver, start, nbytes)
        sizes = [group.record_bytes for group in layout.groups]
        self._staging = Staging(device.driver, max(BATCH_BYTES, *sizes), device.node)
        self._traffic = Traffic(device.driver, device, self.locks)

    # work of the lanes

    def copy(self, batch: Batch) -> Faults | Finish:
        """Copies every item's bytes between device and host. A small batch that has the bus to itself ends before
        another thread would wake up, so this call waits for it."""
        src, dst = batch[0].move.src, target(batch[0].move)
        direction = Direction.TO_HOST if src is DEVICE else Direction.TO_DEVICE
        pairs = _pairs(batch)
        on_device, on_host = (0, 1) if src is DEVICE else (1, 0)
        records = {
            group: (slots[on_device], self._sites.host_records(group, slots[on_host])) for group, slots in pairs.items()
        }
        copies = self._sites.plan(direction, records)
        passage = self._traffic.issue(direction, copies, _touched(src, pairs, 0), _touched(dst, pairs, 1))

        def finish() -> Faults:
            self._traffic.settle(passage)
            return Faults()

        return finish() if self._traffic.ends_soon(passage) else finish

    def write(self, batch: Batch) -> Finish:
        """See :func:`kvtierd.mover.disk_io.write`. A block that cannot be fetched from the device fails alone. If its
        copy may still be running, the staging memory is never used again."""
        copied = [(place, move, item) for place, (move, item) in enumerate(items_of(batch)) if item.dst is not None]
        parts = {
            place: self._on_host.padded_parts(move.group, item.src)
            for place, move, item in copied
            if move.src is not DEVICE
        }
        wanted = {place: (move.group, item.src) for place, move, item in copied if move.src is DEVICE}
        if not wanted:
            return disk_io.store(batch, parts)
        with ExitStack() as holding:
            try:
                with ExitStack() as fetching:
                    load = StagedRecords(self._sites.layout, fetching.enter_context(self._buffer()), wanted)
                    self._fill(load)
                    holding.push(fetching.pop_all())
            except (CudaError, TierError, Unaccounted) as error:
                _log.warning("blocks could not be fetched from the device cache=%s why=%r", self._name, str(error))
            else:
                parts |= load.records()
            return disk_io.store(batch, parts, lent=True)

    def read(self, batch: Batch) -> Faults | Finish:
        """See :func:`kvtierd.mover.disk_io.read`. Only verified blocks go on to the device. If their copies may still
        be running, the rest of the batch is reported all the same."""
        wanted = {
            place: (move.group, destination(item))
            for place, (move, item) in enumerate(items_of(batch))
            if move.dst is DEVICE
        }
        if not wanted:
            return disk_io.read(batch)
        with ExitStack() as holding:
            load = StagedRecords(self._sites.layout, holding.enter_context(self._buffer()), wanted)
            records = load.records()
            faults = disk_io.fetch(
                batch,
                [
                    records[place] if place in records else self._on_host.padded_parts(move.group, destination(item))
                    for place, (move, item) in enumerate(items_of(batch))
                ],
            )
            verified = wanted.keys() - faults.failed - faults.corrupt
            if not verified:
                return faults
            passage = self._issue_load(Direction.TO_DEVICE, load, verified)
            held = holding.pop_all()

        def finish() -> Faults:
            try:
                with held:
                    self._traffic.settle(passage)
            except Unaccounted as error:
                count, why = len(verified), str(error)
                _log.error("blocks are out of use until a restart cache=%s count=%d why=%r", self._name, count, why)
                return replace(faults, unaccounted=frozenset(verified))
            except (CudaError, TierError) as error:
                _log.warning("blocks did not reach the device cache=%s why=%r", self._name, str(error))
                return Faults(faults.failed | verified, faults.corrupt)
            return faults

        return finish

    # bytes for streams and checksums

    def fetch(self, group: GroupId, stretches: Sequence[Stretch]) -> Bytes:
        """Returns a copy of bytes of device slots, one stretch after another, at most :data:`BATCH_BYTES`. Raises
        :class:`TierIOError`."""
        try:
            with self._buffer() as buffer:
                self._run(Direction.TO_HOST, buffer, group, stretches)
                return buffer.memory[: sum(stretch.nbytes for stretch in stretches)].copy()
        except Unaccounted as error:  # a reader's device slots are unchanged
            raise TierIOError(0, str(error)) from error

    def put(self, group: GroupId, stretches: Sequence[Stretch], data: Bytes) -> Bytes:
        """Writes ``data`` to device slots and returns it. No other caller may get the slots before the return; never,
        if the call raises :class:`Unaccounted`. Raises :class:`TierIOError` besides."""
        with self._buffer() as buffer:
            np.copyto(buffer.memory[: len(data)], data)
            self._run(Direction.TO_DEVICE, buffer, group, stretches)
            return data

    # closing

    def close(self) -> bool:
        """Gives all resources back. False: copies may be in flight, or memory is still page-locked. Then neither the
        device's memory nor the host's may be given back before the process ends."""
        if not self._traffic.close(DRAIN_S):
            hangs, left = self._traffic.issuing, self._traffic.under_way
            _log.error("copies are still under way name=%s batches=%d call_hangs=%s", self._name, left, hangs)
            return False
        try:
            self._staging.close()
        except CudaError as error:
            _log.warning("staging memory is not given back name=%s why=%r", self._name, str(error))
        if not self.locks.close():
            return False
        self._segment = None  # a remaining reference to this object must not keep the memory
        return True

    @property
    def _on_host(self) -> HostStore:
        if self._host is None:
            raise LookupError(f"cache {self._name} has no host tier")
        return self._host

    @contextmanager
    def _buffer(self) -> Iterator[Buffer]:
        """Lends a staging buffer. Raises :class:`TierIOError` if there is no memory for it."""
        try:
            buffer = self._staging.take()
        except CudaError as error:
            if isinstance(error, CudaLost):
                self._device.lose(str(error))
            raise TierIOError(0, f"no memory to stage copies in: {error}") from error
        try:
            yield buffer
        except Unaccounted:
            self._staging.abandon()
            raise
        except BaseException:
            self._staging.give_back(buffer)
            raise
        self._staging.give_back(buffer)

    def _fill(self, load: StagedRecords) -> None:
        load.blank_padding()
        self._traffic.settle(self._issue_load(Direction.TO_HOST, load, load.wanted.keys()))

    def _issue_load(self, direction: Direction, load: StagedRecords, places: Collection[int]) -> Passage:
        """Issues copies between the load's records at these places and their device slots."""
        records = load.at(places)
        device = {(DEVICE, group, slot) for group, (slots, _) in records.items() for slot in slots}
        return self._issue_staged(direction, self._sites.plan(direction, records), device)

    def _run(self, direction: Direction, buffer: Buffer, group: GroupId, stretches: Sequence[Stretch]) -> None:
        """Copies between the buffer, from its start on, and the slots."""
        on_device = [part for stretch in stretches for part in self._sites.on_device(group, stretch)]
        addresses, sizes = np.array(on_device, np.int64).T
        staged = buffer.address + np.cumsum(sizes) - sizes
        ends = (staged, addresses) if direction is Direction.TO_HOST else (addresses, staged)
        slots = {(DEVICE, group, stretch.slot) for stretch in stretches}
        try:
            self._traffic.settle(self._issue_staged(direction, np.stack((*ends, sizes)), slots))
        except CudaError as error:
            raise TierIOError(0, str(error)) from error

    def _issue_staged(self, direction: Direction, copies: Copies, device: Touched) -> Passage:
        """Issues copies to or from staging memory, which only its borrower uses, so only device slots need ordering."""
        nothing: Touched = frozenset()
        reads, writes = (device, nothing) if direction is Direction.TO_HOST else (nothing, device)
        return self._traffic.issue(direction, copies, reads, writes)


Pairs = Mapping[GroupId, tuple[Sequence[SlotId], Sequence[SlotId]]]
"""Source slots and destination slots of each group's copies."""


def _pairs(batch: Batch) -> Pairs:
    pairs: defaultdict[GroupId, tuple[list[SlotId], list[SlotId]]] = defaultdict(lambda: ([], []))
    for piece in batch:
        sources, targets = pairs[piece.move.group]
        sources += [item.src for item in piece.items]
        targets += [destination(item) for item in piece.items]
    return pairs


def _touched(tier: Tier, pairs: Pairs, side: int) -> Touched:
    """Slots of one side of the pairs. ``side``: 0 for the sources, 1 for the destinations."""
    return {(tier, group, slot) for group, slots in pairs.items() for slot in slots[side]}
