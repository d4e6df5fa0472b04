"""The GPU, opened once for all caches, and the memory of each cache on it: one allocation with all pools."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Self

from kvtier.abi import attach
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.errors import CudaError, CudaLost, CudaMissing, CudaOutOfMemory, CudaUnavailable
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.opening import find, load_bindings, uuid_name
from kvtier.abi.cuda.views import DevicePool
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import GroupId, SlotId
from kvtierd.tiers.base import DeviceIOError, GpuUnavailable, NoDeviceMemory, NotAdoptable, TierConfigError
from kvtierd.tiers.memfd import node_of

READERS_GET_NONE: Final = "a handle of GPU memory has no read-only form: only who may write the cache is given one"

_POLL_S: Final = 0.002
BEAT_S: Final = 0.5
"""Seconds between checks that a device still answers."""
SILENT_S: Final = 2.0
"""A device that takes longer than this to answer is reported as a problem in health."""

_log = logging.getLogger(__name__)


class _Unsettled(Exception):
    """The device may still be writing to the memory."""

    def __init__(self, error: CudaError) -> None:
        super().__init__(str(error))
        self.error: Final = error


class DaemonGpu:
    """A device. Every method blocks, some for as long as the driver does; for any thread but the loop's."""

    def __init__(self, driver: Driver) -> None:
        """Raises :class:`kvtier.abi.cuda.errors.CudaError`."""
        self.driver: Final = driver
        self.total: Final = driver.memory()[1]
        self.node: Final = self._node()
        """The device's NUMA node; None if unknown."""
        self.lost: str | None = None
        """Why the device is lost until the daemon restarts: its bytes are unreliable, calls fail; None = it works."""
        self._asked_at: float | None = None
        """When the pending check of the device began; None = no check is pending."""
        self._closing: Final = threading.Event()
        self._watching: threading.Thread | None = None
        self._out_of_use: Final[list[DeviceMemory]] = []
        """Memory kept until the process ends: the device may still write to it."""
        self._tell: Callable[[], None] | None = None
        self._losing: Final = threading.Lock()

    @classmethod
    def open(cls, device: str) -> Self:
        """Opens a device by its name in the configuration. Raises :class:`TierConfigError` if this machine lacks
        software that CUDA needs, :class:`GpuUnavailable` if it has the software but the device cannot be opened."""
        try:
            gpu = cls(Driver.open(device))
        except CudaMissing as error:
            raise TierConfigError("device", device, str(error)) from error
        except (CudaUnavailable, CudaError) as error:
            broken = isinstance(error, CudaLost) or isinstance(error.__cause__, CudaLost)
            raise GpuUnavailable(str(error), _uuid_of(device), broken=broken) from error
        cuda = gpu.driver.features.driver_version
        _log.info(
            "GPU opened name=%r uuid=%s cuda=%d total=%d node=%s", gpu.driver.name, gpu.uuid, cuda, gpu.total, gpu.node
        )
        return gpu

    def _node(self) -> int | None:
        try:
            return node_of(self.driver.pci_address())
        except CudaError as error:
            _log.warning("GPU does not say where it is uuid=%s why=%r", self.uuid, str(error))
            return None

    @property
    def uuid(self) -> str:
        """The uuid as ``nvidia-smi -L`` shows it."""
        return uuid_name(self.driver.uuid)

    @property
    def silent_s(self) -> float:
        """Seconds that the pending check of the device has taken; 0 = none is pending."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def watch(self) -> None:
        """Starts a thread that checks the device: an idle daemon makes no other call that would notice its loss. The
        thread ends with :meth:`close`, or with the loss of the device."""
        self._watching = threading.Thread(target=self._watch, name=f"watch-{self.uuid}", daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while self.lost is None and not self._closing.wait(BEAT_S):
            self._asked_at = time.monotonic()
            try:
                self.memory()
            except DeviceIOError as error:
                _log.warning("GPU does not say whether it is there why=%r", str(error))
            self._asked_at = None

    def lose(self, why: str) -> None:
        """Records that the device, or this process's use of it, is gone. Call before its copies are reported as failed.
        The first reason stays."""
        with self._losing:
            if self.lost is not None:
                return
            self.lost, tell = why, self._tell
        _log.error("GPU lost uuid=%s why=%r", self.uuid, why)
        if tell is not None:
            tell()

    def on_loss(self, tell: Callable[[], None]) -> None:
        """Sets a callback, which the first thread to call :meth:`lose` runs once; after a loss it runs at once."""
        with self._losing:
            self._tell, lost = tell, self.lost is not None
        if lost:
            tell()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes. Raises :class:`DeviceIOError`."""
        try:
            return self.driver.memory()
        except CudaError as error:
            raise self._failed("cannot ask for free memory", error) from error

    def create(self, name: str, nbytes: int, patience_s: float = 0.0) -> CudaSegment:
        """Allocates zeroed memory for the cache ``name``: clients that map it must not read bytes of another cache.

        ``patience_s``: seconds to wait for enough free memory, if memory is about to be freed. Raises
        :class:`NoDeviceMemory` if too little is free, :class:`DeviceIOError`. A failed call keeps only memory that the
        device may still be clearing.
        """
        wanted = self._rounded(nbytes)
        until = time.monotonic() + patience_s
        while (free := self.memory()[0]) < wanted:
            if time.monotonic() >= until:
                raise self._short(name, wanted, free)
            time.sleep(_POLL_S)
        try:
            memory = DeviceMemory.create(self.driver, wanted)
        except CudaOutOfMemory as error:
            raise self._short(name, wanted, free) from error
        except CudaError as error:
            raise self._failed(f"cannot allocate {wanted} bytes", error) from error
        try:
            self._clear(memory)
        except _Unsettled as unsettled:
            self._out_of_use.append(memory)
            raise self._failed(f"cannot clear {wanted} bytes, which are out of use now", unsettled.error) from unsettled
        except CudaError as error:
            memory.close()
            raise self._failed(f"cannot clear {wanted} bytes", error) from error
        if memory.fd is None:
            _log.warning("GPU memory cannot be shared cache=%s why=%r", name, memory.why_not)
        return CudaSegment(self, memory, fresh=True)

    def adopt(self, fd: int, nbytes: int, known: attach.CudaHandle | None) -> CudaSegment:
        """Takes over the memory of an earlier daemon with its bytes. ``fd``: its descriptor, which stays the caller's.
        ``known``: the earlier daemon's note of the memory. Raises :class:`NotAdoptable`."""
        wanted = attach.CudaHandle(self.driver.uuid.hex(), self._rounded(nbytes))
        if known != wanted:
            raise NotAdoptable(f"it is {known}, not {wanted}")
        try:
            memory = DeviceMemory.from_fd(self.driver, fd, wanted.nbytes, keep=True)
        except CudaError as error:
            raise NotAdoptable(str(self._failed("cannot import it", error))) from error
        return CudaSegment(self, memory, fresh=False)

    def close(self) -> None:
        """Call after every cache is closed. The end of the process frees any memory that is left."""
        self._closing.set()
        if self._watching is not None:
            self._watching.join(SILENT_S)
        if self.lost is None and self._asked_at is None:
            self.driver.close()

    def _rounded(self, nbytes: int) -> int:
        """The size of the allocation, by which an adopted descriptor is checked."""
        if not self.driver.features.vmm:
            return nbytes
        try:
            granularity = self.driver.granularity()
        except CudaError as error:
            raise self._failed("cannot ask for the granularity", error) from error
        return -(-nbytes // granularity) * granularity

    def _clear(self, memory: DeviceMemory) -> None:
        driver = self.driver
        with ExitStack() as undo:
            stream = driver.stream()
            undo.callback(driver.drop_stream, stream)
            driver.fill(memory.address, 0, memory.nbytes, stream)
            try:
                while not driver.idle(stream):
                    time.sleep(_POLL_S)
            except CudaLost:
                raise  # a lost device has stopped writing
            except CudaError as error:
                raise _Unsettled(error) from error

    def _short(self, name: str, wanted: int, free: int) -> NoDeviceMemory:
        says = f"not enough memory on {self.driver.name}: {free} bytes are free"
        return NoDeviceMemory(f"device memory of {name}", wanted, says)

    def _failed(self, what: str, error: CudaError) -> DeviceIOError:
        if isinstance(error, CudaLost):
            self.lose(str(error))
        return DeviceIOError(f"GPU {self.uuid}: {what}: {error}")


def _uuid_of(device: str) -> str | None:
    """The uuid of a device that the driver lists, even if the device cannot be used."""
    try:
        return uuid_name(find(load_bindings(), device).uuid)
    except CudaUnavailable:
        return None


class NoSegment:
    """Stands in for GPU memory that is unavailable: the cache has its slots, but they are out of service."""

    fresh: Final = True
    fd: Final = None
    described: Final = None

    def __init__(self, why: str) -> None:
        self.why: Final = why

    def offer(self, *, write: bool) -> str:
        """The reason why a client gets no memory."""
        return f"the device tier is out of service: {self.why}"

    def close(self) -> None:
        """Does nothing: there is no memory to free."""


class CudaSegment:
    """GPU memory of one cache, held by its arena. ``fresh``: the memory has no bytes of an earlier daemon."""

    def __init__(self, gpu: DaemonGpu, memory: DeviceMemory, *, fresh: bool) -> None:
        self.gpu: Final = gpu
        self.memory: Final = memory
        self.fresh: Final = fresh

    @property
    def fd(self) -> int | None:
        """The segment's own descriptor; None = the memory cannot be shared. Any descriptor keeps the memory alive."""
        return self.memory.fd

    @property
    def described(self) -> attach.CudaHandle:
        """The device and the size, which the descriptor does not tell."""
        return attach.CudaHandle(self.gpu.driver.uuid.hex(), self.memory.nbytes)

    def offer(self, *, write: bool) -> int | str:
        """The descriptor for a client, or the reason why the client gets none."""
        if self.memory.fd is None:
            return f"the GPU's memory cannot be shared: {self.memory.why_not}"
        if not write:
            return READERS_GET_NONE
        return self.memory.fd if self.gpu.lost is None else f"the GPU is lost: {self.gpu.lost}"

    def close(self) -> None:
        """Frees the memory, unless another process has a descriptor or a mapping of it. No copy to or from it may be
        running. Blocks."""
        self.memory.close()


class CudaDevice:
    """A region per pool, with the same slot index in each. Only copies by the GPU reach the bytes, so this is not a
    :class:`kvtierd.tiers.base.MemoryStore`. For any thread."""

    def __init__(self, layout: ArenaLayout, segment: CudaSegment) -> None:
        """``segment``: stays the arena's, which closes it."""
        self._segment: Final = segment
        self.memory: Final[DeviceMemory] = segment.memory
        self.driver: Final[Driver] = segment.gpu.driver
        self.node: Final = segment.gpu.node
        self._pools: Final = DevicePool.all_of(segment.memory, layout)

    def address(self, group: GroupId, pool: int, slot: SlotId) -> Address:
        """Address of the slot's first byte in a pool. Raises IndexError for a slot that does not exist."""
        return self._pools[group][pool].address(slot)

    def stride(self, group: GroupId, pool: int) -> int:
        """Bytes from one slot to the next in a pool: the bytes of a slot there, padded to 4096."""
        return self._pools[group][pool].stride

    @property
    def lost(self) -> str | None:
        """Why the device is lost, for all caches: its bytes are unreliable, and calls fail; None = it works."""
        return self._segment.gpu.lost

    def lose(self, why: str) -> None:
        """Records a :class:`kvtier.abi.cuda.errors.CudaLost` of a call. The first reason stays."""
        self._segment.gpu.lose(why)
