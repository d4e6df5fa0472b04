"""Tensors in and out of a cache, and slots as tensors; torch is not imported for callers that do not use it."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from kvtier import CacheSpec, Client, buffers, errors
from kvtier.types import BlockResult, Tier
from tests.integration.blocks import chain

SPEC = CacheSpec.single("tensors", "bfloat16", tokens_per_block=16, layers=2, kv_heads=2, head_size=16)
SHAPE = (2, 2, 2, 16, 16)
BUDGET = {Tier.HOST: 8 * SPEC.record_bytes(0)}
KEYS = chain("tensors", 3)
OK = [BlockResult.OK] * 3


@pytest.fixture
async def cache(client, name):
    return await client.open_cache(name, SPEC, budgets=BUDGET)


def some():
    return torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.parametrize("way", ["mapped", "streamed"])
async def test_tensors_go_in_and_come_out(client, cache, way):
    one = cache if way == "mapped" else await client.open_cache(cache.name, SPEC, mapped=False)
    blocks = some().requires_grad_()
    assert await one.put(KEYS, blocks) == OK
    out = torch.zeros(3, *SHAPE, dtype=torch.bfloat16)
    found = await one.get(KEYS, out)
    assert torch.equal(out, blocks)
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in out]
    arrays = await one.get(KEYS)
    assert all(isinstance(array, np.ndarray) for array in arrays)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8], ids=str)
async def test_any_dtype_of_the_right_size(cache, dtype):
    raw = torch.randint(0, 100, (3, SPEC.block_bytes(0)), dtype=torch.uint8)
    assert await cache.put(KEYS, raw.view(dtype)) == OK
    out = [torch.zeros(SPEC.block_bytes(0), dtype=torch.uint8).view(dtype) for _ in KEYS]
    await cache.get(KEYS, out)
    assert torch.equal(torch.stack([each.view(torch.uint8) for each in out]), raw)


async def test_a_tensor_of_another_size_is_refused(cache):
    with pytest.raises(errors.InvalidArgument, match=r"blocks\[0\]"):
        await cache.put(KEYS, some().to(torch.float32))
    with pytest.raises(errors.InvalidArgument, match=r"out\[0\]"):
        await cache.get(KEYS, some()[:, :1])


async def test_slots_are_tensors_in_place(cache):
    blocks = some()
    async with cache.reserve(1) as lease:
        (slot,) = lease.tensors(0)
        assert slot.dtype is torch.bfloat16
        slot.copy_(blocks[0].reshape(-1))
        await lease.commit(KEYS[:1])
    async with cache.acquire(KEYS[:1]) as reading:
        (seen,) = reading.tensors(0)
        assert torch.equal(seen.view(SHAPE), blocks[0])
        (view,) = reading.view(0)
        assert seen.data_ptr() == view.ctypes.data


async def test_a_mapping_that_is_read_only_can_be_read_as_a_tensor(client, cache):
    await cache.put(KEYS, some())
    reader = await client.open_cache(cache.name, SPEC, write=False)
    async with reader.acquire(KEYS) as lease:
        assert torch.equal(lease.tensors(2)[0].view(SHAPE), some()[2])


@pytest.mark.parametrize(("mapped", "verify"), [(True, False), (True, True), (False, False)])
def test_the_synchronous_client_fills_tensors_in_the_callers_thread(daemon, name, monkeypatch, mapped, verify):
    """Whose current streams the caller's work on them is in, where they are on a GPU."""
    threads = set()
    fill = buffers.fill

    def seen(late):
        threads.add(threading.get_ident())
        fill(late)

    monkeypatch.setattr(buffers, "fill", seen)
    blocks = [block.transpose(0, 2) for block in some()]
    out = [torch.zeros_like(block) for block in blocks]
    assert not out[0].is_contiguous()
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=BUDGET)
        assert cache.put(KEYS[:2], blocks[:2]) == OK[:2]
        found = client.open_cache(name, mapped=mapped).get(KEYS, out, verify=verify)
        assert [id(each) for each in found] == [id(each) for each in out[:2]]
        with cache.acquire(KEYS) as lease:
            assert torch.equal(lease.tensors(1)[0].view(SHAPE), some()[1].transpose(0, 2).reshape(SHAPE))
    assert all(torch.equal(one, other) for one, other in zip(found, blocks, strict=False))
    assert threads == {threading.get_ident()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU")
async def test_tensors_of_a_gpu(cache):
    blocks = some().cuda()
    assert await cache.put(KEYS, blocks) == OK
    out = torch.zeros_like(blocks)
    await cache.get(KEYS, out)
    assert torch.equal(out, blocks)


def test_who_does_not_use_tensors_does_not_import_torch(daemon, name):
    program = (
        "import sys, numpy, kvtier\n"
        "spec = kvtier.CacheSpec.single('light', 'uint8', 16, 1, 1, 64)\n"
        "with kvtier.Client(sys.argv[1]) as client:\n"
        "    cache = client.open_cache(sys.argv[2], spec, budgets={kvtier.Tier.HOST: 1 << 16})\n"
        "    cache.put([bytes(31) + b'x'], numpy.zeros((1, spec.block_bytes(0)), numpy.uint8))\n"
        "    print(len(cache.get([bytes(31) + b'x'])), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, daemon.address, name], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.stdout, done.stderr) == ("1 False\n", "")
