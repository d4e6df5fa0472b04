"""Device memory as memfds that are mapped at real addresses, and which addresses a copy may touch."""

import ctypes
import itertools
import mmap
import os
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, TypeVar

from ._enums import CUresult
from ._refusal import Refusal, invalid

GRANULARITY: Final = 2 << 20
_NAME: Final = "kvtier-fake-cuda"
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _mmap(address: int, size: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address or None, size, protection, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes")
    return found


@dataclass(slots=True)
class _Physical:
    """Memory on the device."""

    fd: int
    size: int
    exportable: bool
    device: int
    handle: bool = True
    mappings: int = 0


@dataclass(slots=True)
class _Range:
    """``[start, start + size)`` of the process's addresses."""

    start: int
    size: int


@dataclass(slots=True)
class _Reservation(_Range):
    mapped: _Physical | None = None
    mapped_size: int = 0
    allowed: bool = False


@dataclass(slots=True)
class _Plain(_Range):
    """Of cuMemAlloc."""

    memory: mmap.mmap
    device: int


_R = TypeVar("_R", bound=_Range)


@dataclass(slots=True)
class _Ranges(Generic[_R]):
    """Ranges that do not overlap, by address."""

    starts: list[int] = field(default_factory=list)
    by_start: dict[int, _R] = field(default_factory=dict)

    def add(self, entry: _R) -> None:
        self.starts.insert(bisect_right(self.starts, entry.start), entry.start)
        self.by_start[entry.start] = entry

    def remove(self, start: int) -> _R | None:
        entry = self.by_start.pop(start, None)
        if entry is not None:
            self.starts.remove(start)
        return entry

    def touching(self, address: int, nbytes: int) -> list[_R]:
        first = max(bisect_right(self.starts, address) - 1, 0)
        found = []
        for start in itertools.islice(self.starts, first, None):
            if start >= address + nbytes:
                break
            entry = self.by_start[start]
            if entry.start + entry.size > address:
                found.append(entry)
        return found


def _used_by_all(shared: str, device: int) -> int:
    """Bytes of a device's memory that any process holds: each piece once, however many descriptors it has."""
    sizes: dict[int, int] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(f"/memfd:{_named(shared, device)} "):
                status = link.stat()
                sizes[status.st_ino] = status.st_size
        except OSError:
            continue  # closed, or its process ended, meanwhile
    return sum(sizes.values())


class Memory:
    """All of one process. Not thread-safe: the caller holds the lock of the fake."""

    def __init__(self, limit: int, shared: str = "") -> None:
        self._limit = limit
        self._shared = shared
        self._numbers = itertools.count(0x4A0001)
        self._handles: dict[int, _Physical] = {}
        self._reserved: _Ranges[_Reservation] = _Ranges()
        self._plain: _Ranges[_Plain] = _Ranges()
        self._registered: _Ranges[_Range] = _Ranges()
        self._of_host: dict[int, mmap.mmap] = {}
        self._used: Counter[int] = Counter()  # by device
        self._holders: Counter[int] = (
            Counter()
        )  # by inode: of a process's own memory, and what it imported of another's

    def free_bytes(self, device: int) -> int:
        return self._limit - (_used_by_all(self._shared, device) if self._shared else self._used[device])

    # Handles. -----------------------------------------------------------------------------------------------------

    def create(self, size: int, exportable: bool, device: int) -> int:
        if size <= 0 or size % GRANULARITY:
            raise invalid(f"size {size} is not a multiple of {GRANULARITY}")
        self._check_room(size, device)
        fd = os.memfd_create(_named(self._shared, device))
        os.ftruncate(fd, size)
        _fill(fd, size)
        return self._new_handle(_Physical(fd, size, exportable, device))

    def release(self, handle: int) -> None:
        physical = self._physical(handle)
        del self._handles[handle]
        physical.handle = False
        self._drop(physical)

    def export(self, handle: int) -> int:
        physical = self._physical(handle)
        if not physical.exportable:
            raise invalid("created without requestedHandleTypes")
        return os.dup(physical.fd)

    def import_(self, fd: int) -> int:
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError as error:
            raise invalid(f"descriptor {fd}: {error}") from error
        if _NAME not in name:
            raise invalid(f"descriptor {fd} is {name}, not device memory")
        device = int(name.removesuffix(" (deleted)").rpartition(".")[2])
        return self._new_handle(_Physical(os.dup(fd), os.fstat(fd).st_size, exportable=True, device=device))

    def _new_handle(self, physical: _Physical) -> int:
        handle = next(self._numbers)
        self._handles[handle] = physical
        inode = os.fstat(physical.fd).st_ino
        if not self._holders[inode]:
            self._used[physical.device] += physical.size
        self._holders[inode] += 1
        return handle

    def _physical(self, handle: int) -> _Physical:
        physical = self._handles.get(handle)
        if physical is None:
            raise invalid(f"no handle {handle:#x}: never created, or released already")
        return physical

    def _drop(self, physical: _Physical) -> None:
        if not physical.handle and not physical.mappings:
            inode = os.fstat(physical.fd).st_ino
            self._holders[inode] -= 1
            if not self._holders[inode]:
                self._used[physical.device] -= physical.size
            os.close(physical.fd)

    def _check_room(self, size: int, device: int) -> None:
        free = self.free_bytes(device)
        if size > free:
            raise Refusal(CUresult.CUDA_ERROR_OUT_OF_MEMORY, f"{size} bytes of {free} that are free")

    # Addresses. ---------------------------------------------------------------------------------------------------

    def reserve(self, size: int, alignment: int) -> int:
        if size <= 0 or size % mmap.PAGESIZE:
            raise invalid(f"size {size} is not a multiple of the page size")
        if alignment & (alignment - 1):
            raise invalid(f"alignment {alignment} is not a power of two")
        alignment = alignment or GRANULARITY
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        wide = _mmap(0, size + alignment, _PROT_NONE, flags, -1)
        start = -(-wide // alignment) * alignment
        if start > wide:
            _libc.munmap(wide, start - wide)
        if after := wide + alignment - start:
            _libc.munmap(start + size, after)
        self._reserved.add(_Reservation(start, size))
        return start

    def unreserve(self, start: int, size: int) -> None:
        entry = self._reserved.by_start.get(start)
        if entry is None or entry.size != size:
            raise invalid(f"{size} bytes at {start:#x} were not reserved as one")
        if entry.mapped is not None:
            raise invalid(f"memory is still mapped at {start:#x}")
        self._reserved.remove(start)
        _libc.munmap(start, size)

    def map(self, start: int, size: int, offset: int, handle: int) -> None:
        physical = self._physical(handle)
        if start % GRANULARITY or size % GRANULARITY or offset % GRANULARITY or size <= 0:
            raise invalid(f"{size} bytes at {start:#x} from {offset}: not multiples of {GRANULARITY}")
        if offset:
            raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "the fake maps from the start of a handle only")
        if size > physical.size:
            raise invalid(f"{size} bytes of memory of {physical.size}")
        entry = self._reserved.by_start.get(start)
        if entry is None or size > entry.size:
            raise invalid(f"{size} bytes at {start:#x} are not reserved (the fake maps from a range's start only)")
        if entry.mapped is not None:
            raise invalid(f"memory is mapped at {start:#x} already")
        _mmap(start, size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, physical.fd)
        entry.mapped, entry.mapped_size, entry.allowed = physical, size, False
        physical.mappings += 1

    def allow(self, start: int, size: int, device: int) -> None:
        entry = self._mapping(start, size)
        if entry.mapped is not None and entry.mapped.device != device:
            raise invalid(f"memory of device {entry.mapped.device}, which the fake lets no other device touch")
        _libc.mprotect(start, size, mmap.PROT_READ | mmap.PROT_WRITE)
        entry.allowed = True

    def unmap(self, start: int, size: int) -> None:
        entry = self._mapping(start, size)
        physical = entry.mapped
        assert physical is not None
        _mmap(start, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        entry.mapped, entry.mapped_size, entry.allowed = None, 0, False
        physical.mappings -= 1
        self._drop(physical)

    def _mapping(self, start: int, size: int) -> _Reservation:
        entry = self._reserved.by_start.get(start)
        if entry is None or entry.mapped is None or entry.mapped_size != size:
            raise invalid(f"{size} bytes at {start:#x} were not mapped as one")
        return entry

    # Memory without a handle. -------------------------------------------------------------------------------------

    def alloc(self, size: int, device: int) -> int:
        if size <= 0:
            raise invalid("0 bytes")
        self._check_room(size, device)
        self._used[device] += size
        memory = mmap.mmap(-1, size)
        memory.write(_FRESH * min(size, _FILLED))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._plain.add(_Plain(start, size, memory, device))
        return start

    def free(self, start: int) -> None:
        entry = self._plain.remove(start)
        if entry is None:
            raise invalid(f"{start:#x} was not allocated, or freed already")
        self._used[entry.device] -= entry.size

    def register(self, start: int, size: int) -> None:
        if size <= 0:
            raise invalid("0 bytes")
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        pages = -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE - first
        if self._registered.touching(first, pages):
            raise Refusal(
                CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, f"some of {size} bytes at {start:#x} is registered"
            )
        self._registered.add(_Range(start, size))

    def unregister(self, start: int) -> None:
        if start in self._of_host or self._registered.remove(start) is None:
            raise Refusal(CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, f"{start:#x} was not registered")

    def alloc_host(self, size: int) -> int:
        if size <= 0:
            raise invalid("0 bytes")
        memory = mmap.mmap(-1, size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._of_host[start] = memory
        self._registered.add(_Range(start, size))
        return start

    def free_host(self, start: int) -> None:
        if self._of_host.pop(start, None) is None:
            raise invalid(f"{start:#x} was not allocated, or freed already")
        self._registered.remove(start)

    # What may be touched. -----------------------------------------------------------------------------------------

    def kind(self, address: int, nbytes: int) -> str:
        """``device``, ``pinned`` or ``pageable``, as the whole range is. Refused where it is in parts."""
        if address == 0:
            raise invalid("a null pointer")
        device: list[_Reservation] | list[_Plain]
        if device := self._reserved.touching(address, nbytes):
            entry = device[0]
            if entry.mapped is None:
                raise invalid(f"nothing is mapped at {address:#x}")
            if not entry.allowed:
                raise invalid(f"access at {address:#x} was not allowed")
            return _whole("device", address, nbytes, entry.start, entry.mapped_size)
        if device := self._plain.touching(address, nbytes):
            return _whole("device", address, nbytes, device[0].start, device[0].size)
        if pinned := self._registered.touching(address, nbytes):
            return _whole("pinned", address, nbytes, pinned[0].start, pinned[0].size)
        return "pageable"

    def device_of(self, address: int, nbytes: int) -> int | None:
        if (mapped := self._reserved.touching(address, nbytes)) and mapped[0].mapped is not None:
            return mapped[0].mapped.device
        return next((plain.device for plain in self._plain.touching(address, nbytes)), None)

    def left(self) -> dict[str, int]:
        """What has not been given back, by kind."""
        kinds = {
            "handles": len(self._handles),
            "mappings": sum(entry.mapped is not None for entry in self._reserved.by_start.values()),
            "reservations": len(self._reserved.by_start),
            "allocations": len(self._plain.by_start),
            "registrations": len(self._registered.by_start) - len(self._of_host),
            "host allocations": len(self._of_host),
        }
        return {kind: count for kind, count in kinds.items() if count}


_FRESH: Final = b"\xa5"
_FILLED: Final = 64 << 20
"""New memory is this byte, up to that many: who reads what nobody wrote sees that it is not zero."""


def _named(shared: str, device: int) -> str:
    return f"{_NAME}{shared}.{device}"


def _fill(fd: int, size: int) -> None:
    piece = _FRESH * (1 << 20)
    for offset in range(0, min(size, _FILLED), len(piece)):
        os.pwrite(fd, piece, offset)


def _whole(kind: str, address: int, nbytes: int, start: int, size: int) -> str:
    if address < start or address + nbytes > start + size:
        raise invalid(f"{nbytes} bytes at {address:#x} reach beyond the {size} at {start:#x}")
    return kind
