"""Clients of a device tier in GPU memory, on the fake of NVIDIA's bindings: mapping, bytes, and the order of things.

A kernel here is a function that a stream of the fake carries out when a test lets it.
"""

import asyncio
import ctypes
import gc
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import (
    BlockResult,
    CallerError,
    Client,
    ClientClosed,
    DeviceError,
    LeaseLost,
    Planes,
    Tier,
    TierFull,
    connect,
    session,
)
from kvtier.deadline import PASSED
from tests.fake_cuda import GpuArray, load_fake, use
from tests.forking import in_child
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, block, blocks, chain, opened_cache, sizes
from tests.integration.on_gpu import gpu_daemon, supervised_gpu_daemon
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually

KEYS = chain("on gpu", 3)
OTHERS = chain("others", 3)
OK = [BlockResult.OK] * 3
BUDGETS = sizes(device=8, host=8)


@pytest.fixture
def fake(monkeypatch):
    return use(load_fake(max_delay_ms=3), monkeypatch)


@pytest.fixture(scope="module")
def daemon():
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as home,
        gpu_daemon(Path(home), sizes(device=512, host=512), gpu={"devices": 2}) as process,
    ):
        yield process


@pytest.fixture
async def client(fake, daemon):
    async with await connect(daemon.address) as client:
        yield client


@pytest.fixture
async def cache(client, name):
    return await client.open_cache(name, SPEC, budgets=BUDGETS)


class Kernels:
    """Work on a stream of this process, which begins when :meth:`go` is called."""

    def __init__(self, fake, cache):
        gpu = cache.arena.memory(Tier.DEVICE).gpu
        self._fake = fake
        self._go = threading.Event()
        gpu.driver.bind()
        self.stream = int(gpu.driver.stream())
        self.give(lambda: self._go.wait(PATIENCE_S))

    def give(self, work):
        self._fake.fake_work(self.stream, work)

    def go(self):
        self._go.set()

    def write(self, lease, keys):
        """A kernel that fills the slots of a lease with the keys' blocks."""
        for index, key in enumerate(keys):
            self.give(partial(touch, lease.view(index), block(key), read=False))

    def read(self, lease, into):
        for index, row in enumerate(into):
            self.give(partial(touch, lease.view(index), row, read=True))


def touch(parts, data, *, read):
    """As a kernel does, for the fake's addresses are this process's own."""
    start = data.ctypes.data
    for part in parts:
        to, source = (start, part.address) if read else (part.address, start)
        ctypes.memmove(to, source, part.nbytes)
        start += part.nbytes


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_blocks_go_in_and_come_out(client, daemon, cache):
    assert dict(cache.unmapped) == {}
    assert cache.arena.tiers == (Tier.DEVICE, Tier.HOST)
    assert await cache.put(KEYS, blocks(KEYS)) == OK
    assert [place.residency for place in await cache.locate(KEYS)] == [Tier.DEVICE.bit] * 3
    assert_bytes(KEYS, await cache.get(KEYS))
    assert cache.reads.calls == 0, "out of mapped slots"
    async with await connect(daemon.address) as other:
        assert_bytes(KEYS, await (await other.open_cache(cache.name, SPEC)).get(KEYS))
    async with cache.acquire(KEYS) as lease:
        memory: Any = lease.memory
        view: Any = lease.view(1)[0]
        assert (view.address, view.readonly) == (memory.view(0, lease.slots[1], write=True)[0].address, True)
        assert lease.unchanged()


async def test_the_device_is_found_whatever_its_number_here(short_dir, monkeypatch):
    daemon = gpu_daemon(short_dir, sizes(device=4), device="cuda:1", gpu={"devices": 2})
    daemon.start()
    use(load_fake(devices=2), monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    async with opened_cache(daemon.address, "c") as (_, cache):
        memory: Any = cache.arena.memory(Tier.DEVICE)
        assert memory.gpu.driver.ordinal == 0
        await cache.put(KEYS, blocks(KEYS))
        assert_bytes(KEYS, await cache.get(KEYS))
    daemon.stop()


BAD_IMPORT = {"call": "cuMemImportFromShareableHandle", "code": "CUDA_ERROR_INVALID_VALUE"}


@pytest.mark.parametrize(
    ("settings", "visible", "write", "why"),
    [
        ({}, "", True, r"no CUDA device .*CUDA_VISIBLE_DEVICES="),
        ({"devices": 2}, "1", True, r"not among those that this process sees: cuda:0 GPU-"),
        ({"fail": [BAD_IMPORT]}, None, True, "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"),
        ({}, None, False, "no read-only form"),
    ],
    ids=["none visible", "another one", "driver", "reader"],
)
async def test_where_it_cannot_be_mapped_the_reason_is_told_and_the_rest_goes_on(
    daemon, monkeypatch, name, settings, visible, write, why
):
    use(load_fake(**settings), monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    async with opened_cache(daemon.address, name, budgets=BUDGETS, mapped=False) as (client, maker):
        assert await maker.put(KEYS, blocks(KEYS), tier=Tier.HOST) == OK
        cache = await client.open_cache(name, SPEC, write=write)
        assert list(cache.unmapped) == [Tier.DEVICE]
        with pytest.raises(CallerError, match=why) as caught:
            cache.arena.view(Tier.DEVICE, 0, 0, write=write)
        assert caught.value.reason == "CANNOT_MAP"
        assert_bytes(KEYS, await cache.get(KEYS))
        assert (cache.lease_tier(), cache.lookups) == (Tier.HOST, "shared memory")
        if write:
            with pytest.raises(CallerError, match="device tier is not mapped"):
                await cache.reserve(1, Tier.DEVICE)
            assert await cache.put(OTHERS, blocks(OTHERS)) == OK
            assert_bytes(OTHERS, await cache.get(OTHERS))


def on_gpu(cache, *shape, content=0):
    """An array of this process on its GPU."""
    return GpuArray(cache.arena.memory(Tier.DEVICE).gpu.driver, *shape, content=content)


@pytest.mark.parametrize("tier", [Tier.HOST, None], ids=str)
async def test_arrays_on_the_gpu_go_to_host_slots_and_back(daemon, cache, tier):
    """As a connector's blocks do, whose engine has its own memory on the GPU."""
    assert await cache.put(KEYS, [on_gpu(cache, BLOCK_BYTES, content=block(key)) for key in KEYS], tier=Tier.HOST) == OK
    assert [place.residency for place in await cache.locate(KEYS)] == [Tier.HOST.bit] * 3
    assert_bytes(KEYS, await cache.get(KEYS))
    out = [on_gpu(cache, BLOCK_BYTES) for _ in KEYS]
    await cache.get(KEYS, out, tier=tier)
    assert_bytes(KEYS, [each.bytes for each in out])
    assert await cache.across.put(
        OTHERS, {0: [on_gpu(cache, BLOCK_BYTES, content=block(key)) for key in OTHERS]}, tier=Tier.HOST
    ) == {0: OK}
    with Client(daemon.address) as calls:
        same, out = calls.open_cache(cache.name, SPEC), [on_gpu(cache, BLOCK_BYTES) for _ in OTHERS]
        same.get(OTHERS, out, tier=tier)
        assert_bytes(OTHERS, [each.bytes for each in out])
        keys = chain("third", 3)
        assert same.put(keys, [on_gpu(cache, BLOCK_BYTES, content=block(key)) for key in keys], tier=Tier.HOST) == OK
        assert_bytes(keys, await cache.get(keys))


@pytest.mark.parametrize("there", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST], ids=str)
async def test_pages_go_in_and_come_out(cache, tier, there):
    """Of an engine's own tensors, each of which has some bytes of a block."""
    sizes, at = (1000, 4000, BLOCK_BYTES - 5000), [4, 0, 3]

    def tensors():
        return [on_gpu(cache, 5, nbytes) if there else np.zeros((5, nbytes), np.uint8) for nbytes in sizes]

    def content(parts):
        return np.concatenate([part.bytes if there else part for part in parts], axis=1)

    source, target, begin = tensors(), tensors(), 0
    for part in source:
        rows = part.bytes if there else part
        for page, key in zip(at, KEYS, strict=True):
            rows[page] = block(key)[begin : begin + rows.shape[1]]
        begin += rows.shape[1]
    assert await cache.put(KEYS, Planes(source)[at], tier=tier) == OK
    assert_bytes(KEYS, await cache.get(KEYS, tier=tier))
    assert await cache.get(KEYS, Planes(target)[at], tier=tier) == at
    assert (content(target) == content(source)).all()


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["named", "torchs-current"])
async def test_a_block_is_committed_when_its_kernel_has_written_it(fake, client, cache, monkeypatch, named):
    kernels = Kernels(fake, cache)
    stream = SimpleNamespace(cuda_stream=kernels.stream)
    if not named:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    lease = await cache.reserve(3, Tier.DEVICE)
    kernels.write(lease, KEYS)
    committing = asyncio.create_task(lease.commit(KEYS, stream=stream if named else None))
    await client.stats()  # a commit that waited for nothing would have been sent by now
    assert (await tier_stats(client, cache.name, Tier.DEVICE)).blank == 3
    kernels.go()
    assert await committing == OK
    assert_bytes(KEYS, await cache.get(KEYS))
    await lease.release(stream=kernels.stream)


async def overwrite(cache):
    """Another owner has all slots, and writes."""
    taken = await cache.reserve(8, Tier.DEVICE)
    for index in range(8):
        touch(taken.view(index), np.full(BLOCK_BYTES, 0xEE, np.uint8), read=False)
    await taken.release(stream=PASSED)


async def test_an_exit_of_the_block_waits_and_a_point_named_before_is_enough(fake, cache):
    kernels, later = Kernels(fake, cache), threading.Event()
    async with cache.reserve(3, Tier.DEVICE) as lease:
        kernels.write(lease, KEYS)
        written = cache.fence(kernels.stream)
        kernels.give(lambda: later.wait(PATIENCE_S))
        kernels.go()
        assert await lease.commit(KEYS, stream=written) == OK, "not for what came after"
        later.set()
    assert_bytes(KEYS, await cache.get(KEYS))


async def test_a_get_compares_generations_when_the_bytes_have_come(daemon, name, tmp_path, monkeypatch):
    """Its copies begin when its slots are another owner's already."""
    hold = tmp_path / "hold"
    fake = use(load_fake(hold=hold), monkeypatch)
    async with opened_cache(daemon.address, name, budgets=BUDGETS) as (_, cache):
        assert await cache.put(KEYS, blocks(KEYS), tier=Tier.DEVICE) == OK
        await asyncio.to_thread(hold.touch)
        try:
            getting = asyncio.create_task(cache.get(KEYS, tier=Tier.DEVICE))
            await eventually(lambda: asyncio.to_thread(begun, fake), bool)
            assert (await cache.drop(KEYS[:1])).results == [BlockResult.OK]
            await overwrite(cache)
        finally:
            await asyncio.to_thread(hold.unlink)
        assert await getting == []


def begun(fake):
    """Whether copies of this process wait in a stream."""
    return any(stream._work for stream in fake.STATE.streams.values())


def _told_of_the_fork(call):
    try:
        call()
    except ClientClosed as error:
        return 0 if error.reason == "FORKED" else 2
    return 3


def test_a_forked_child_is_told_so_and_touches_no_cuda(fake, daemon, name):
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=BUDGETS)
        lease = cache.reserve(1, Tier.DEVICE)
        for call in (lease.release, lambda: cache.release(lease), cache.fence, cache.release_all):
            assert in_child(partial(_told_of_the_fork, call)) == 0
        lease.release()


async def test_where_this_process_lost_its_gpu_its_leases_stay_held(daemon, name, tmp_path, monkeypatch):
    lost = tmp_path / "lost"
    use(load_fake(lost=lost), monkeypatch)
    client = await connect(daemon.address)
    cache = await client.open_cache(name, SPEC, budgets=BUDGETS)
    lease = await cache.reserve(3, Tier.DEVICE)
    lost.write_text("CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        await lease.commit(KEYS)
    assert caught.value.reason == "DEVICE_LOST"
    with pytest.raises(DeviceError):
        await lease.release()
    assert not lease.released
    await client.close()
    async with await connect(daemon.address) as other:
        assert (await tier_stats(other, name, Tier.DEVICE)).held == 3, "no goodbye was said"


@pytest.mark.parametrize("ends", [True, False], ids=["in time", "too late"])
async def test_slots_stay_mapped_while_a_kernel_touches_them(fake, daemon, name, monkeypatch, ends):
    """Also for a client that has stopped waiting for the kernel, and of which nothing is left."""
    monkeypatch.setattr(session, "_WORK_GRACE_S", 0.05)
    client = await connect(daemon.address)
    cache = await client.open_cache(name, SPEC, budgets=BUDGETS)
    kernels = Kernels(fake, cache)
    lease = await cache.reserve(1, Tier.DEVICE)
    part: Any = lease.view(0)[0]
    address, nbytes = part.address, part.nbytes
    del part
    kernels.give(lambda: ctypes.memset(address, 1, nbytes))
    if ends:
        kernels.go()
    await client.close(stream=kernels.stream)
    del client, cache, lease
    gc.collect()
    if ends:
        await eventually(lambda: asyncio.to_thread(fake.fake_left), lambda left: "mappings" not in left)
    else:
        assert fake.fake_left()["mappings"] == 1
        kernels.go()
        assert not await eventually(lambda: asyncio.to_thread(begun, fake), lambda under_way: not under_way)
        assert ctypes.string_at(address, nbytes) == b"\1" * nbytes


async def test_a_restarted_daemon_keeps_a_slot_from_others_until_the_kernel_is_done(fake, short_dir):
    """It has forgotten the session, not its slots; the client says that it is done with them when its kernel is."""
    supervised = supervised_gpu_daemon(short_dir, BUDGETS)
    supervised.start()
    try:
        async with opened_cache(supervised.address, "c", wait=PATIENCE_S) as (client, cache):
            kernels, lease = Kernels(fake, cache), await cache.reserve(3, Tier.DEVICE)
            kernels.write(lease, KEYS)
            await asyncio.to_thread(supervised.kill)
            with pytest.raises(LeaseLost):
                await lease.commit(KEYS, stream=PASSED)
            releasing = asyncio.create_task(lease.release(stream=kernels.stream))
            with pytest.raises(TierFull):
                await cache.reserve(6, Tier.DEVICE)
            kernels.go()
            await releasing
            await eventually(lambda: tier_stats(client, "c", Tier.DEVICE), lambda stats: stats.free == 8)
    finally:
        assert await asyncio.to_thread(supervised.stop) == 0
