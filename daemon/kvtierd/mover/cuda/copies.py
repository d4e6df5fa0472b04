"""Copies for a cache whose device tier is a GPU: from slot to slot, and for those who cannot reach its slots."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, Protocol

import numpy as np

from kvtier.abi.cuda.driver import Direction
from kvtier.abi.cuda.errors import CudaError
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import DEVICE, GroupId, SlotId
from kvtierd.mover import diskio
from kvtierd.mover.cuda.hazards import Passage, spot
from kvtierd.mover.cuda.loads import Load
from kvtierd.mover.cuda.pagelocks import PageLocks
from kvtierd.mover.cuda.plan import Rows, plan
from kvtierd.mover.cuda.sites import DevicePool, Sites
from kvtierd.mover.cuda.staging import Buffer, Staging
from kvtierd.mover.cuda.traffic import Losable, Traffic
from kvtierd.mover.work import Batch, Faults, Finish, Unaccounted, destination, items_of
from kvtierd.tiers.base import Bytes, TierError
from kvtierd.tiers.host import HostStore

BATCH_BYTES: Final = 16 << 20
"""Most that one batch copies to or from the device, unless a single block is more: a third of a millisecond on a fast
bus. A small copy waits for no more than the few batches before it, which keep the bus busy while it is prepared."""
DRAIN_S: Final = 10.0
"""How long a close waits for copies that are under way."""
_LOOK_S: Final = 0.005

_log = logging.getLogger(__name__)


class LosablePool(DevicePool, Losable, Protocol):
    pass


class CudaCopies:
    """Of one cache. All of it blocks: for threads.

    ``host``: None where the cache has no host tier; ``segment`` is then empty, else what the host tier lies in. Raises
    :class:`CudaError`.
    """

    batch_bytes: Final = BATCH_BYTES

    def __init__(
        self, name: str, layout: ArenaLayout, device: LosablePool, host: HostStore | None, segment: Bytes
    ) -> None:
        self._name = name
        self._host = host
        self._segment = segment  # stays mapped for as long as a copy may touch it
        self._sites = Sites(layout, device, segment.ctypes.data)
        self._pitch = device.driver.features.max_pitch
        self.locks: Final = PageLocks(name, device.driver, self._sites.host_chunks())
        sizes = [group.record_bytes for group in layout.groups]
        self._staging = Staging(device.driver, max(BATCH_BYTES, *sizes))
        self._traffic = Traffic(device.driver, device, self.locks)

    # what lanes carry out

    def copy(self, batch: Batch) -> Finish:
        """Copies every item's bytes between device and host."""
        edge = batch[0].move
        if edge.dst is None:
            raise ValueError("a copy stream cannot retire slots")
        direction = Direction.TO_HOST if edge.src is DEVICE else Direction.TO_DEVICE
        items = [(move.group, item.src, destination(item)) for move, item in items_of(batch)]
        reads = [spot(edge.src, group, src) for group, src, _ in items]
        writes = [spot(edge.dst, group, dst) for group, _, dst in items]
        pieces = plan(items, self._sites.between_tiers(direction), self._pitch)
        passage = self._traffic.issue(direction, pieces, reads, writes)

        def finish() -> Faults:
            self._traffic.settle(passage)
            return Faults()

        return finish

    def write(self, batch: Batch) -> Finish:
        """See :func:`kvtierd.mover.diskio.write`. What cannot be fetched from the device fails alone."""
        copied = [(place, move, item) for place, (move, item) in enumerate(items_of(batch)) if item.dst is not None]
        parts = {
            place: self._on_host.padded_parts(move.group, item.src)
            for place, move, item in copied
            if move.src is not DEVICE
        }
        wanted = {place: (move.group, item.src) for place, move, item in copied if move.src is DEVICE}
        if not wanted:
            return diskio.store(batch, parts)
        with self._buffer() as buffer:
            load = Load(self._sites.layout, buffer, wanted)
            try:
                self._fill(load)
            except (CudaError, TierError) as error:
                _log.warning("blocks could not be fetched from the device cache=%s why=%r", self._name, str(error))
            else:
                parts |= load.records()
            return diskio.store(batch, parts)

    def read(self, batch: Batch) -> Faults | Finish:
        """See :func:`kvtierd.mover.diskio.read`. Only what has been verified goes on to the device."""
        wanted = {
            place: (move.group, destination(item))
            for place, (move, item) in enumerate(items_of(batch))
            if move.dst is DEVICE
        }
        if not wanted:
            return diskio.read(batch)
        with ExitStack() as holding:
            load = Load(self._sites.layout, holding.enter_context(self._buffer()), wanted)
            records = load.records()
            faults = diskio.fetch(
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
            with held:
                try:
                    self._traffic.settle(passage)
                except (CudaError, TierError) as error:
                    _log.warning("blocks did not reach the device cache=%s why=%r", self._name, str(error))
                    return Faults(faults.failed | verified, faults.corrupt)
                return faults

        return finish

    # bytes for streams and checksums

    def fetch(self, group: GroupId, slot: SlotId, start: int, stop: int) -> Bytes:
        """A copy of the bytes [``start``, ``stop``) of a device slot's block. Raises :class:`CudaError`,
        :class:`TierIOError`."""
        with self._buffer() as buffer:
            pieces = list(self._stretches(Direction.TO_HOST, buffer, group, slot, start, stop))
            self._traffic.settle(self._traffic.issue(Direction.TO_HOST, pieces, [spot(DEVICE, group, slot)], ()))
            return buffer.memory[: stop - start].copy()

    def put(self, group: GroupId, slot: SlotId, start: int, data: Bytes) -> None:
        """Writes a device slot's bytes from ``start`` on. Nobody else may get the slot before this returns. Raises as
        :meth:`fetch`, and :class:`Unaccounted`: then never."""
        with self._buffer() as buffer:
            np.copyto(buffer.memory[: len(data)], data)
            pieces = list(self._stretches(Direction.TO_DEVICE, buffer, group, slot, start, start + len(data)))
            self._traffic.settle(self._traffic.issue(Direction.TO_DEVICE, pieces, (), [spot(DEVICE, group, slot)]))

    # the end

    def close(self) -> bool:
        """False: copies may be under way, or memory is still page-locked. Then neither the device's memory nor the
        host's may be given back before the process ends."""
        deadline = time.monotonic() + DRAIN_S
        while not self._traffic.close():
            if time.monotonic() >= deadline:
                _log.error("copies are still under way name=%s batches=%d", self._name, self._traffic.under_way)
                return False
            time.sleep(_LOOK_S)
        try:
            self._staging.close()
        except CudaError as error:
            _log.warning("staging memory is not given back name=%s why=%r", self._name, str(error))
        return self.locks.close()

    @property
    def _on_host(self) -> HostStore:
        if self._host is None:
            raise LookupError(f"cache {self._name} has no host tier")
        return self._host

    @contextmanager
    def _buffer(self) -> Iterator[Buffer]:
        """Staging memory for as long as it is needed."""
        buffer = self._staging.take()
        try:
            yield buffer
        except Unaccounted:
            self._staging.abandon()
            raise
        except BaseException:
            self._staging.give_back(buffer)
            raise
        self._staging.give_back(buffer)

    def _fill(self, load: Load) -> None:
        load.blank_padding()
        self._traffic.settle(self._issue_load(Direction.TO_HOST, load, load.wanted.keys()))

    def _issue_load(self, direction: Direction, load: Load, places: Collection[int]) -> Passage:
        """Between the load's records at these places and the device slots that they are of."""
        numbered = [one for one in load.numbered() if one.place in places]
        spots = [spot(DEVICE, one.group, one.slot) for one in numbered]
        if direction is Direction.TO_HOST:
            copies, reads, writes = [(one.group, one.slot, one.number) for one in numbered], spots, []
        else:
            copies, reads, writes = [(one.group, one.number, one.slot) for one in numbered], [], spots
        pieces = plan(copies, self._sites.to_staging(direction, load), self._pitch)
        return self._traffic.issue(direction, pieces, reads, writes)

    def _stretches(
        self, direction: Direction, buffer: Buffer, group: GroupId, slot: SlotId, start: int, stop: int
    ) -> Iterator[Rows]:
        place = buffer.address
        for address, nbytes in self._sites.stretches(group, slot, start, stop):
            if direction is Direction.TO_HOST:
                yield Rows(place, address, nbytes)
            else:
                yield Rows(address, place, nbytes)
            place += nbytes
