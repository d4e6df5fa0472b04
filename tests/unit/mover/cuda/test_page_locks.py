"""Host memory is page-locked chunk by chunk behind the back of those who use it, and all of it undone."""

import mmap
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.cuda import driver as cuda_driver
from kvtier.abi.cuda import page_locks
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.page_locks import PageLocks
from tests.fake_cuda import load_fake, until

PAGE = 4096
CHUNK = 2 * PAGE


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locks, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def pages() -> mmap.mmap:
    return mmap.mmap(-1, 16 * PAGE)


@pytest.fixture
def start(pages: mmap.mmap) -> int:
    return np.frombuffer(pages, np.uint8).ctypes.data


class Slow(Driver):
    """Locks no chunk before it may."""

    def __init__(self, bindings: Any) -> None:
        super().__init__(bindings, "cuda")
        self.may = threading.Semaphore(0)

    def register(self, address: Address, nbytes: int) -> None:
        assert self.may.acquire(timeout=30)
        super().register(address, nbytes)


@pytest.fixture
def driver() -> Iterator[Slow]:
    fake = load_fake(max_delay_ms=0)
    driver = Slow(fake)
    yield driver
    driver.close()
    assert fake.fake_left() == {}


def test_what_is_ready_is_known_chunk_by_chunk_and_all_is_undone(driver: Slow, start: int) -> None:
    locks = PageLocks("cache", driver, start, 10 * PAGE - 1)
    locks.start(None)
    assert locks.nbytes == 0
    driver.may.release(3)
    until(lambda: locks.nbytes == 3 * CHUNK)

    driver.may.release(2)
    until(lambda: locks.nbytes == locks.total)
    assert locks.nbytes == locks.total == 10 * PAGE
    assert locks.problem is None
    assert locks.close()
    assert locks.nbytes == 0


COPIES = st.lists(st.tuples(st.integers(-CHUNK, 12 * PAGE), st.integers(0, CHUNK), st.integers(1, 3 * CHUNK)))


@given(COPIES, st.sampled_from([0, 1]), st.integers(0, 5))
def test_copies_are_cut_where_chunks_meet(copies: list[tuple[int, int, int]], side: int, ready: int) -> None:
    start = 1 << 30
    locks = PageLocks("cache", Driver(load_fake(), "cuda"), start, 10 * PAGE)
    locks.nbytes = ready * CHUNK
    given_copies = np.array([(start + place, other, nbytes) for place, other, nbytes in copies], np.int64).reshape(
        -1, 3
    )
    rows = [0, 1, 2] if side == 0 else [1, 0, 2]

    found, locked = locks.split(given_copies.T[rows], side)

    pieces = found[rows].T.tolist()
    moved = Counter((there + n, other + n) for there, other, nbytes in pieces for n in (0, nbytes - 1))
    wanted: Counter[tuple[int, int]] = Counter()
    for there, other, nbytes in given_copies.tolist():
        ends = [(there - start) // CHUNK * CHUNK + start, there + nbytes]
        borders = [there, *range(ends[0] + CHUNK, ends[1], CHUNK), there + nbytes]
        wanted.update(
            (first + n, other + first + n - there) for first, last in pairwise(borders) for n in (0, last - first - 1)
        )
    assert moved == wanted
    for (there, _, nbytes), is_locked in zip(pieces, locked.tolist(), strict=True):
        offset = there - start
        assert is_locked == (offset < 0 or offset >= 10 * PAGE or offset + nbytes <= locks.nbytes)


def test_memory_that_no_lock_covers_is_taken_for_locked() -> None:
    locks = PageLocks("none", Driver(load_fake(), "cuda"), 0, 0)
    _, locked = locks.split(np.array([[4096], [77], [10]]), 0)
    assert locked.tolist() == [True]


def test_a_close_in_the_middle_ends_it_and_undoes_what_was_done(driver: Slow, start: int) -> None:
    locks = PageLocks("cache", driver, start, 10 * PAGE - 1)
    locks.start(None)
    driver.may.release(1)
    until(lambda: locks.nbytes > 0)
    closing = threading.Thread(target=locks.close)
    closing.start()
    driver.may.release(1)  # the chunk that was in hand
    closing.join(30)
    assert not closing.is_alive()
    assert locks.nbytes == 0


def test_chunks_are_whole_pages_of_a_host_whose_pages_are_larger(
    driver: Slow, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "HOST_PAGE", 4 * PAGE)
    assert PageLocks("cache", driver, start, 9 * PAGE + 1).total == 12 * PAGE


def test_memory_that_cannot_be_unlocked_must_stay_mapped(start: int) -> None:
    failure = {"call": "cuMemHostUnregister", "code": "CUDA_ERROR_INVALID_VALUE", "after": 1}
    driver = Driver(load_fake(fail=[failure]), "cuda")
    locks = PageLocks("cache", driver, start, 10 * PAGE - 1)
    locks.start(None)
    until(lambda: locks.nbytes == locks.total)
    assert not locks.close()
    assert locks.nbytes == 4 * CHUNK
