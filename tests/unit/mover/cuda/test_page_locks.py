"""Host memory is page-locked chunk by chunk behind the back of those who use it, and all of it undone."""

import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.abi.cuda import driver as cuda_driver
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.page_locks import CHUNK_BYTES, Chunk
from kvtierd.mover.cuda.plan import SegmentLocks, chunks_of, in_turn
from tests.fake_cuda import load_fake, until

PAGE = 4096


@pytest.fixture
def pages() -> mmap.mmap:
    return mmap.mmap(-1, 16 * PAGE)


@pytest.fixture
def chunks(pages: mmap.mmap) -> list[Chunk]:
    """Of two groups in turn: the first has chunks at 0, 2, 4, the second at 8 and 10 (in pages)."""
    start = np.frombuffer(pages, np.uint8).ctypes.data
    return [Chunk(start + first * PAGE, 2 * PAGE) for first in (0, 8, 2, 10, 4)]


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


def test_what_is_ready_is_known_chunk_by_chunk_and_all_is_undone(driver: Slow, chunks: list[Chunk]) -> None:
    locks = SegmentLocks("cache", driver, chunks)
    locks.start(None)
    assert locks.locked == 0
    driver.may.release(3)
    until(lambda: locks.nbytes == 3 * 2 * PAGE)
    assert locks.locked == 3

    driver.may.release(2)
    until(lambda: locks.nbytes == locks.total)
    assert locks.locked == 5
    assert locks.nbytes == locks.total == 10 * PAGE
    assert locks.problem is None
    assert locks.close()
    assert locks.nbytes == 0


def test_an_address_is_told_by_its_chunk_and_a_strangers_is_nobodys(chunks: list[Chunk]) -> None:
    locks = SegmentLocks("cache", Driver(load_fake(), "cuda"), chunks)
    firsts = np.array([chunk.address for chunk in chunks])
    assert locks.chunks_at(firsts).tolist() == [0, 1, 2, 3, 4]
    assert locks.chunks_at(firsts + 2 * PAGE - 1).tolist() == [0, 1, 2, 3, 4]
    assert (
        locks.chunks_at(np.array([1, firsts[0] - 1, firsts[4] + 2 * PAGE, firsts[3] + 2 * PAGE])).tolist() == [-1] * 4
    )
    assert SegmentLocks("none", Driver(load_fake(), "cuda"), []).chunks_at(firsts).tolist() == [-1] * 5


def test_a_close_in_the_middle_ends_it_and_undoes_what_was_done(driver: Slow, chunks: list[Chunk]) -> None:
    locks = SegmentLocks("cache", driver, chunks)
    locks.start(None)
    driver.may.release(1)
    until(lambda: locks.nbytes > 0)
    closing = threading.Thread(target=locks.close)
    closing.start()
    driver.may.release(1)  # the chunk that was in hand
    closing.join(30)
    assert not closing.is_alive()
    assert locks.nbytes == 0


def test_chunks_are_whole_pages_of_a_host_whose_pages_are_larger_than_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    page, record = 16 * PAGE, 3 * PAGE
    monkeypatch.setattr(cuda_driver, "HOST_PAGE", page)
    chunks = list(chunks_of(0, 30_001, record))
    assert all(chunk.address % page == chunk.nbytes % page == chunk.address % record == 0 for chunk in chunks)
    ends = [chunk.address + chunk.nbytes for chunk in chunks]
    assert [0, *ends[:-1]] == [chunk.address for chunk in chunks]
    assert 0 <= ends[-1] - 30_001 * record < page


def test_memory_that_cannot_be_unlocked_must_stay_mapped(chunks: list[Chunk]) -> None:
    failure = {"call": "cuMemHostUnregister", "code": "CUDA_ERROR_INVALID_VALUE", "after": 1}
    driver = Driver(load_fake(fail=[failure]), "cuda")
    locks = SegmentLocks("cache", driver, chunks)
    locks.start(None)
    until(lambda: locks.nbytes == locks.total)
    assert not locks.close()
    assert locks.nbytes == 4 * 2 * PAGE


def test_chunks_are_whole_slots_and_come_group_by_group_in_turn() -> None:
    small, large = 12 * PAGE, CHUNK_BYTES + PAGE
    first = list(chunks_of(0, 3000, small))
    assert sum(chunk.nbytes for chunk in first) == 3000 * small
    assert all(chunk.address % small == 0 for chunk in first)
    assert all(chunk.nbytes <= CHUNK_BYTES < chunk.nbytes + small for chunk in first[:-1])
    second = list(chunks_of(1 << 40, 2, large))
    assert len(second) == 2
    assert in_turn([iter(first), iter(second)])[:4] == [first[0], second[0], first[1], second[1]]
    assert list(chunks_of(0, 0, small)) == []
