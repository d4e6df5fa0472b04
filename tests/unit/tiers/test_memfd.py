"""Where a segment's memory lies: near a GPU, and in huge pages, as far as the kernel lets it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.abi import memory
from kvtier.abi.cuda import driver as cuda_driver
from kvtier.abi.cuda.driver import Driver
from kvtier.v1 import caches_pb2
from kvtier.wire import spec_to_wire
from kvtierd.mover.cuda.staging import Staging
from kvtierd.tiers import memfd
from kvtierd.tiers.memfd import Memfd, near, node_of
from tests.fake_cuda import load_fake
from tests.mappings import kilobytes
from tests.unit.service.rig import DEVICE, HOST, SLOT_BYTES, SPEC, attached, config, running

MIB = 1 << 20
NUMA_MAPS = Path("/proc/thread-self/numa_maps")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
HUGE_PAGES = _KERNEL >= (6, 1) and _SETTING.exists() and "[deny]" not in _SETTING.read_text()
"""Whether this kernel makes them of a memfd's pages."""
needs_numa = pytest.mark.skipif(not NUMA_MAPS.exists(), reason="the kernel knows no NUMA nodes")


def policy() -> str:
    """The policy by which this thread gets its memory."""
    return NUMA_MAPS.read_text().split()[1]


def in_thread(work: Callable[[], None]) -> None:
    """Whose policy nobody else has."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def at_node(directory: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """The fake's first GPU is there."""
    device = directory / "0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(memfd, "_PCI_DEVICES", directory)


@pytest.mark.parametrize(("said", "node"), [("1", 1), ("-1", None), ("", None)])
def test_the_node_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, node: int | None) -> None:
    at_node(tmp_path, monkeypatch, said)
    assert node_of("0000:3b:00.0") == node
    assert node_of("0000:3c:00.0") is None


@needs_numa
def test_memory_is_near_a_node_for_as_long_as_it_is_asked() -> None:
    def work() -> None:
        before = policy()
        with near(0):
            assert policy() == "prefer:0"
            with near(None):
                assert policy() == "prefer:0"
            with near(0):
                pass
            assert policy() == "prefer:0"
        assert policy() == before

    in_thread(work)


@needs_numa
def test_a_node_that_is_not_there_is_told_and_nothing_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        before = policy()
        with near(1000):
            assert policy() == before
            Memfd.create("somewhere", MIB).close()

    in_thread(work)
    assert "memory is not placed near its GPU node=1000 why='Invalid argument'" in caplog.text


def noting(module: object, call: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each call of it is made; the policy of its thread is noted."""
    real, seen = getattr(module, call), list[str]()

    def noted(*arguments: object) -> object:
        seen.append(policy())
        return real(*arguments)

    noted.__name__ = call
    monkeypatch.setattr(module, call, noted)
    return seen


@needs_numa
async def test_the_arena_of_a_cache_is_near_its_gpu(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node is all that most machines have: what is asked of it is seen where memory is allocated."""
    at_node(tmp_path, monkeypatch, "0")
    fake = load_fake(devices=2)
    monkeypatch.setattr(cuda_driver, "load_bindings", lambda: fake)
    devices = [f"cuda:{number}={8 * SLOT_BYTES}" for number in range(2)]
    async with running(config(short_dir, host=16, device=devices)) as daemon, attached(daemon) as client:
        seen = noting(os, "posix_fallocate", monkeypatch)
        for device, where in (("cuda:0", "prefer:0"), ("cuda:1", policy())):
            seen.clear()
            budgets = [caches_pb2.TierBudget(tier=tier, bytes=4 * SLOT_BYTES) for tier in (DEVICE, HOST)]
            name = device.replace(":", "-")
            request = caches_pb2.OpenRequest(name=name, spec=spec_to_wire(SPEC), budgets=budgets, device=device)
            await client.call(client.caches.Open, request)
            assert set(seen) == {where}


@needs_numa
def test_staging_memory_is_near_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = load_fake()
    seen = noting(fake, "cuMemHostAlloc", monkeypatch)

    def work() -> None:
        Staging(Driver(fake, "cuda"), MIB, 0).take().close()

    in_thread(work)
    assert seen == ["prefer:0"]


def test_a_segment_is_in_huge_pages_and_its_rest_in_small_ones() -> None:
    segment = Memfd.create("kvtier-huge", 5 * MIB)
    try:
        assert segment.array.shape == (5 * MIB,)
        assert not segment.array.any()
        assert os.fstat(segment.fd).st_blocks * 512 == 5 * MIB
        if HUGE_PAGES:
            assert sum(kilobytes("kvtier-huge", "ShmemPmdMapped")) == 4 * 1024
    finally:
        segment.close()


def test_what_the_kernel_has_no_huge_pages_for_is_allocated_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_COLLAPSE", -1)  # no kernel knows this advice
    segment = Memfd.create("kvtier-small", 5 * MIB)
    try:
        assert os.fstat(segment.fd).st_blocks * 512 == 5 * MIB
        segment.prefault()
        assert kilobytes("kvtier-small", "Rss") == [5 * 1024]
    finally:
        segment.close()
