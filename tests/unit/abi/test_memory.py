"""Memory is where huge pages fit, its pages are there, and it goes with the last array over it."""

import os
from collections.abc import Iterator
from weakref import ref

import numpy as np
import pytest

import kvtier
from kvtier.abi import memory
from tests.mappings import kilobytes, resident_bytes

MIB = 1 << 20
NAME = "kvtier:unit:memory"


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create(NAME)
    os.truncate(fd, 5 * MIB)
    yield fd
    os.close(fd)


def test_two_mappings_of_a_file_show_the_same_bytes_and_only_one_may_write(fd: int) -> None:
    written, read = memory.mapped(fd, 5 * MIB, write=True), memory.mapped(fd, 5 * MIB, write=False)
    assert written.ctypes.data % memory.HUGE_PAGE == read.ctypes.data % memory.HUGE_PAGE == 0
    written[[0, -1]] = 7, 9
    assert [int(read[0]), int(read[-1])] == [7, 9]
    assert os.pread(fd, 1, 5 * MIB - 1) == b"\x09"
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_a_mapping_ends_with_the_last_array_over_it(fd: int) -> None:
    part = memory.mapped(fd, 5 * MIB, write=True)[MIB : 2 * MIB]
    assert len(kilobytes(NAME, "Rss")) == 1
    part[:] = 3
    del part
    assert kilobytes(NAME, "Rss") == []


def test_what_cannot_be_mapped_is_told(tmp_path: os.PathLike[str]) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="No such device"):
        memory.mapped(directory, MIB, write=False)
    os.close(directory)


def test_touch_maps_every_page_and_ends_where_the_array_is_gone(fd: int) -> None:
    os.posix_fallocate(fd, 0, 5 * MIB)
    array = memory.mapped(fd, 5 * MIB, write=True)
    gone = ref(np.zeros(1, np.uint8))
    memory.touch(gone)
    assert resident_bytes(NAME) == 0
    memory.touch(ref(array))
    assert resident_bytes(NAME) == 5 * MIB


@pytest.mark.parametrize(("shape", "dtype"), [((64, 3, 1000), "float16"), (10, np.uint8), ((0, 4), np.int64)])
def test_an_empty_array_is_like_numpys(shape: int | tuple[int, ...], dtype: str) -> None:
    ours, numpys = kvtier.empty(shape, dtype), np.empty(shape, dtype)
    assert (ours.shape, ours.dtype, ours.flags.c_contiguous) == (numpys.shape, numpys.dtype, True)
    ours[...] = 1
    assert ours.ctypes.data % 4096 == 0


def test_an_empty_array_has_its_pages() -> None:
    before = anonymous()
    array = kvtier.empty(64 * MIB)
    assert anonymous() - before >= array.nbytes
    del array
    assert anonymous() - before < 32 * MIB


def anonymous() -> int:
    """Bytes of this process's memory that are in no file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
