"""Maps memory so that huge pages fit, and allocates its pages before their first use.

A page fault costs as much as the copy of several pages. A huge page has one fault for 512 pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet, ref

import numpy as np
from numpy.typing import DTypeLike, NDArray

Bytes = NDArray[np.uint8]

HUGE_PAGE: Final = 2 << 20
_TOUCH_STEP: Final = 64 << 20
_COLLAPSE: Final = 25
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_FIXED_NOREPLACE: Final = 0x100000
_MAP_NORESERVE: Final = 0x4000

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(fd: int, size: int, *, write: bool) -> Bytes:
    """Maps the first ``size`` bytes of a file, shared, at a multiple of :data:`HUGE_PAGE`.

    Returns: an array whose ``base`` is the mapping, which ends with the last array over it.
    Raises: :class:`OSError`.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    place = mmap.mmap(-1, size + HUGE_PAGE, flags=flags, prot=protection)  # the kernel aligns files to small pages
    skipped = -np.frombuffer(place, np.uint8).ctypes.data % HUGE_PAGE
    array: Bytes = np.frombuffer(place, np.uint8, size, skipped)
    if _libc.mmap(array.ctypes.data, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != array.ctypes.data:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if write:
        place.madvise(mmap.MADV_DONTFORK)  # a child may outlive this process, whose slots go to others
        _unforked.add(place)
    return array


_unforked: Final[WeakSet[mmap.mmap]] = WeakSet()
"""Writable mappings, which a forked child does not inherit."""


def _bar_the_gaps() -> None:
    """Reserves, in a forked child, the addresses of its parent's slots: inherited views point there, and unmap them."""
    for place in list(_unforked):
        start = np.frombuffer(place, np.uint8).ctypes.data
        _libc.mmap(start, len(place), _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE, -1, 0)


os.register_at_fork(after_in_child=_bar_the_gaps)


def allocate(fd: int, array: Bytes, start: int) -> None:
    """Allocates the pages of ``array``, which maps a memfd from ``start`` on: huge pages as far as the kernel has them.

    Raises: :class:`OSError` if memory is short.
    """
    # The kernel makes a huge page from a range with at least one page, even if huge pages are off for shared memory,
    # unless they are denied. A range that the kernel refuses keeps small pages.
    for place in range(start, start + len(array) - HUGE_PAGE + 1, HUGE_PAGE):
        os.posix_fallocate(fd, place, mmap.PAGESIZE)
    _libc.madvise(array.ctypes.data, len(array), _COLLAPSE)
    os.posix_fallocate(fd, start, len(array))


def touch(array: ref[Bytes]) -> None:
    """Maps every page, so that no copy pays for it, until the array is gone. For a thread, beside users of the array.

    One read byte per page suffices, also for later writes, and changes nothing. numpy releases the interpreter lock in
    each of the bounded pieces.
    """
    start = 0
    while (whole := array()) is not None and start < len(whole):
        whole[start : start + _TOUCH_STEP : mmap.PAGESIZE].max()
        start += _TOUCH_STEP
        del whole


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> NDArray[Any]:
    """Returns an array like :func:`numpy.empty`, page-aligned and with its pages allocated: the first copy into it is
    as fast as later copies.

    Args:
        shape: elements along each axis.
    Raises: :class:`OSError` if memory is short.
    """
    count, kind = math.prod(np.atleast_1d(shape).tolist()), np.dtype(dtype)
    mapping = mmap.mmap(-1, max(1, count * kind.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 0
    return np.frombuffer(mapping, kind, count).reshape(shape)
