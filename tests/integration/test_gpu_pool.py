"""The device tier in GPU memory, with real daemons on the fake of NVIDIA's bindings: what clients are handed, what a
restart keeps, and what a start says where there is no GPU, or too little of it."""

import asyncio
import os
import re
import tempfile
from pathlib import Path

import pytest

from kvtier import BlockResult, RetryableError, Tier, TierOffline
from kvtier.abi import attach
from kvtier.abi.cuda.opening import uuid_name
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.on_gpu import device_generations, fake_gpu, gpu_daemon, serving, supervised_gpu_daemon
from tests.integration.raw import attached, close_all
from tests.integration.starting import refused
from tests.integration.waiting import PATIENCE_S, patient

MIB = 1 << 20
DEVICE, HOST = 4, 8
GPU_BYTES = 4 * MIB
"""Of a cache, however few slots it has: its two pools begin at multiples of the GPU's pages."""


@pytest.fixture(scope="module")
def daemon():
    """Shared by those who only look: all of it is one cache's, "c"."""
    with tempfile.TemporaryDirectory(prefix="kv-") as home, serving(Path(home), device=DEVICE, host=HOST) as process:
        yield process


@pytest.fixture
def supervised(short_dir):
    with supervised_gpu_daemon(short_dir, sizes(device=DEVICE, host=HOST)) as process:
        yield process


async def test_a_reader_is_told_why_it_gets_none(daemon):
    async with attached(daemon.address) as raw:
        opened = await raw.open("c")
        said, fds = raw.socket.mapped(opened.cache_id, write=False)
        assert said.fds == [attach.CONTROL, attach.HOST]
        assert "no read-only form" in said.unmapped[attach.DEVICE]
        close_all(fds)


@pytest.mark.parametrize("code", [None, "INVALID_VALUE", "NOT_PERMITTED", "NOT_SUPPORTED"])
async def test_memory_that_cannot_be_shared_serves_all_the_same(short_dir, code):
    """The device says that it cannot, or a container has the driver refuse it."""
    refused = {"fail": [{"call": "cuMemCreate", "code": f"CUDA_ERROR_{code}", "times": 0}]}
    with serving(short_dir, device=DEVICE, host=HOST, gpu=refused if code else {"features_off": ["vmm"]}) as daemon:
        async with attached(daemon.address) as raw:
            opened = await raw.open("c")
            said, fds = raw.socket.mapped(opened.cache_id, write=True)
            close_all(fds)
            assert "cannot be shared" in said.unmapped[attach.DEVICE]
        async with await patient(daemon.address) as client:
            cache, keys = await client.open_cache("c", SPEC), chain("unshared", 2)
            await cache.put(keys, blocks(keys), tier=Tier.DEVICE)
            assert_bytes(keys, await cache.get(keys, tier=Tier.DEVICE))


# -- restarts ----------------------------------------------------------------------------------------------------------


IMPORT_FAILS = {"fail": [{"call": "cuMemImportFromShareableHandle", "code": "CUDA_ERROR_INVALID_VALUE"}]}


@pytest.mark.parametrize(
    ("gpu", "changed", "why"),
    [
        (IMPORT_FAILS, "cuda", "cannot import"),
        ({"features_off": ["posix_fd"]}, "cuda", "it was not kept"),
        ({"devices": 2}, "cuda:1", "not CudaHandle"),
    ],
    ids=["import", "never kept", "another GPU"],
)
async def test_gpu_memory_that_is_gone_costs_the_device_tier_alone(short_dir, gpu, changed, why):
    on_device, on_host = chain("gpu", 2), chain("host", 3)
    config, nbytes = short_dir / "kvtierd.toml", sizes(device=DEVICE)[Tier.DEVICE]
    config.write_text(f'device = ["cuda={nbytes}"]')
    with supervised_gpu_daemon(short_dir, sizes(host=HOST), ["--config", str(config)], gpu=gpu) as supervised:
        async with attached(supervised.address) as raw:
            opened = await raw.open("c")
            await raw.store(opened.cache_id, Tier.DEVICE, on_device)
            with raw.socket.descriptors(opened.cache_id, write=True) as fds:
                generations = device_generations(fds[attach.CONTROL])
        assert [int(generation) % 2 for generation in generations] == [0, 0, 1, 1]
        async with opened_cache(supervised.address, "c", wait=PATIENCE_S) as (_, cache):
            await cache.put(on_host, blocks(on_host), tier=Tier.HOST)
            config.write_text(f'device = ["{changed}={nbytes}"]')
            await asyncio.to_thread(supervised.upgrade)
            assert (await cache.match(on_host)).blocks == len(on_host)
            assert_bytes(on_host, await cache.get(on_host))
            assert (await cache.match(on_device)).blocks == 0
        assert all(generations % 2), "nobody takes the new memory for what was in the old"
        assert "device blocks are lost: GPU memory is not adopted" in supervised.log
        assert why in supervised.log
        async with attached(supervised.address) as raw:
            again = await raw.open("c")
            await raw.store(again.cache_id, Tier.DEVICE, chain("after", DEVICE))


# -- starts and sizes --------------------------------------------------------------------------------------------------


async def test_a_cache_that_does_not_fit_is_refused_and_takes_nothing(short_dir):
    """Of three slots two take all that the GPU has, since pools begin at multiples of its pages."""
    with serving(short_dir, device=DEVICE, host=HOST, gpu={"memory": GPU_BYTES}) as daemon:
        async with await patient(daemon.address) as client:
            first = await client.open_cache("first", SPEC, budgets=sizes(device=1, host=1))
            with pytest.raises(RetryableError, match=r"device memory of second = \d+: not enough .* 0 bytes are free"):
                await client.open_cache("second", SPEC, budgets=sizes(device=1, host=1))
            await client.open_cache("other", SPEC, budgets=sizes(host=HOST - 1))
            assert first.slots(Tier.DEVICE) == 1
            await first.close()
            await client.remove_cache("first")
            second = await client.open_cache("second", SPEC, budgets=sizes(device=DEVICE))
            assert second.slots(Tier.DEVICE) == DEVICE


@pytest.mark.parametrize(
    "gpu",
    [{"memory": GPU_BYTES - 1}, {"fail": [{"call": "cuMemsetD8Async", "code": "CUDA_ERROR_INVALID_DEVICE"}]}],
    ids=["taken", "fails"],
)
async def test_a_restart_without_room_on_the_gpu_serves_the_other_tiers(short_dir, gpu):
    daemon = gpu_daemon(short_dir, sizes(device=DEVICE, host=HOST, disk=16))
    daemon.start()
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
        keys = await put_chain(cache, "kept", 3, tier=Tier.HOST)
        await cache.move(keys, Tier.DISK)
    daemon.stop()
    daemon.variables |= fake_gpu(**gpu)
    daemon.start()
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("c")
        assert cache.tiers == (Tier.DEVICE, Tier.HOST, Tier.DISK)
        assert "the device tier is out of service" in cache.unmapped[Tier.DEVICE]
        assert_bytes(keys, await cache.get(keys))
        with pytest.raises(TierOffline):
            await cache.move(keys, Tier.DEVICE)
        assert "cache c: the device tier is out of service until a restart: " in "".join(
            (await client.stats()).problems
        )
    daemon.terminate()
    assert daemon.ended() == 0
    daemon.variables |= fake_gpu()
    daemon.start()
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("c")
        assert await cache.move(keys, Tier.DEVICE) == [BlockResult.OK] * 3
        assert_bytes(keys, await cache.get(keys, tier=Tier.DEVICE))
    daemon.terminate()
    assert daemon.ended() == 0


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FIRST_GPU = uuid_name(b"kvtier fake \0\0\0\0")


@pytest.mark.parametrize(
    ("tables", "variables", "says"),
    [
        (["cuda=1MiB"], NO_GPU, "--device = cuda: .* no CUDA device .*CUDA_VISIBLE_DEVICES="),
        (["cuda:3=1MiB"], {}, "--device = cuda:3: .*not among those that this process sees: cuda:0 GPU-"),
        (["cuda=2GiB"], {}, r"--device = cuda=2147483648: .*must be 1 to the 1073741824 that"),
        (["cuda=1MiB", "cuda:0=2MiB"], {}, "--device = cuda:0: another table names GPU-.* already"),
        ([f"{FIRST_GPU}=1MiB", "cuda=2MiB"], {}, f"--device = cuda: another table names {FIRST_GPU} already"),
        (["stand-in=1MiB", "cuda=2MiB", "stand-in=2MiB"], {}, "--device = stand-in: another table names stand-in"),
    ],
    ids=["none", "no such", "too small", "twice", "twice by uuid", "two stand-ins"],
)
def test_a_start_without_the_gpu_says_what_is_wrong_and_touches_nothing(short_dir, tables, variables, says):
    daemon = gpu_daemon(short_dir, sizes(host=HOST), [part for table in tables for part in ("--device", table)])
    daemon.variables |= variables
    assert re.search(says, refused(daemon, status=2))
    assert not daemon.state_dir.exists() or "must be 1 to" in says


def test_a_start_without_bindings_or_driver_says_so(short_dir):
    """This machine has NVIDIA's bindings and no driver."""
    daemon = gpu_daemon(short_dir, sizes(device=DEVICE))
    daemon.variables = {}
    assert "device = cuda: NVIDIA's driver" in refused(daemon, status=2)
    hidden = short_dir / "hidden"
    (hidden / "cuda").mkdir(parents=True)
    (hidden / "cuda" / "__init__.py").write_text("")
    daemon.variables = {"PYTHONPATH": f"{hidden}:{os.environ.get('PYTHONPATH', '')}"}
    assert "pip install '.[cuda]' in a clone of kvtier" in refused(daemon, status=2)
