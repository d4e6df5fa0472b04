"""Several GPUs in one daemon, with real daemons on the fake of NVIDIA's bindings, which has two.

Each GPU has bytes of its own, host and disk are shared, and a cache stays on its GPU.
"""

import asyncio
from itertools import permutations
from typing import Any

import pytest

from kvtier import BlockResult, InvalidArgument, Tier, TierFull, TierOffline
from kvtier.abi.cuda.opening import uuid_name
from kvtier.abi.cuda.views import DeviceView
from kvtier.abi.words import TIERS
from tests.fake_cuda import load_fake, use
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, put_chain, sizes
from tests.integration.on_gpu import calls, gpu_daemon, not_given_back, supervised_gpu_daemon
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually, patient

FIRST, SECOND = (uuid_name(b"kvtier fake " + number.to_bytes(4, "big")) for number in range(2))
DEVICE, HOST, DISK = 6, 16, 96
BUDGETS = sizes(device=DEVICE, host=HOST // 2, disk=DISK // 2)
TWO = {"devices": 2}
BATCH = 256
MANY = 5 * BATCH


def tables(**slots):
    """Flags for devices of so many slots: ``cuda0`` is ``cuda:0``."""
    named = {name.replace("cuda", "cuda:"): sizes(device=count)[Tier.DEVICE] for name, count in slots.items()}
    return [part for name, nbytes in named.items() for part in ("--device", f"{name}={nbytes}")]


@pytest.fixture
def daemon(short_dir):
    """Two GPUs, of which the second has a slot more. Stopped at the end, after which nothing of theirs may be left."""
    process = gpu_daemon(short_dir, sizes(host=HOST, disk=DISK), tables(cuda0=DEVICE, cuda1=DEVICE + 1), gpu=TWO)
    with process:
        pid = process.pid
        yield process
    assert not_given_back(short_dir, pid) == {}


@pytest.fixture
def supervised(short_dir):
    """The same devices in a file, under a supervisor. ``lost``: the second GPU is, once there is such a file."""
    flags = ["--config", str(written(short_dir, f"cuda:0={DEVICE}", f"cuda:1={DEVICE}"))]
    gpu = {**TWO, "lost": str(short_dir / "lost"), "lost_device": 1}
    process = supervised_gpu_daemon(short_dir, sizes(host=HOST, disk=DISK), flags, gpu=gpu)
    process.start()
    yield process
    process.close()


def written(home, *devices):
    """A configuration file with these devices, each ``name=slots``."""
    named = (each.split("=") for each in devices)
    config = home / "kvtierd.toml"
    config.write_text(
        "".join(
            f'[[device]]\nname = "{name}"\nbytes = {sizes(device=int(slots))[Tier.DEVICE]}\n' for name, slots in named
        )
    )
    return config


async def on_both(client, **wanted):
    """A cache on each GPU."""
    return [
        await client.open_cache(device.replace(":", "-"), SPEC, device=device, **wanted)
        for device in ("cuda:0", "cuda:1")
    ]


async def test_caches_on_two_gpus_move_blocks_to_the_shared_host_and_disk(daemon):
    async with await patient(daemon.address) as client:
        caches = await on_both(client, budgets=BUDGETS, mapped=False)
        assert [cache.info.device for cache in caches] == [FIRST, SECOND]

        async def moved(cache, number):
            keys = await put_chain(cache, f"{cache.name} {number}", 2, tier=Tier.DEVICE)
            for src, dst in permutations(TIERS, 2):
                await cache.move(keys, src)
                assert await cache.move(keys, dst) == [BlockResult.OK] * 2, (src, dst)
                assert_bytes(keys, await cache.get(keys))

        await asyncio.gather(*(moved(cache, number) for cache in caches for number in range(2)))
        stats = await client.stats()
        assert [(device.kind, device.name, device.uuid) for device in stats.devices] == [
            ("cuda", "Fake GPU 0", FIRST),
            ("cuda", "Fake GPU 1", SECOND),
        ]
        assert {cache.device for cache in stats.caches} == {FIRST, SECOND}
        with pytest.raises(TierFull, match=r"^host tier: all .* are given out"):
            await client.open_cache("third", SPEC, budgets=sizes(host=1))
    shown = kvtier("status", "--address", daemon.address).stdout
    rows = {row[0]: row for row in map(str.split, shown.splitlines()) if row}
    for number, uuid in enumerate((FIRST, SECOND)):
        assert f"device: Fake GPU {number} {uuid}, 1.0 GiB" in shown
        row = rows[f"cuda-{number}"]
        assert (row[1], row[-1]) == ("4", uuid)


@pytest.fixture
def held(short_dir):
    """Two GPUs that begin nothing while there is a file ``hold``."""
    gpu = {**TWO, "hold": str(short_dir / "hold")}
    process = gpu_daemon(short_dir, sizes(host=2 * MANY), tables(cuda0=MANY, cuda1=MANY), gpu=gpu)
    process.start()
    yield process
    (short_dir / "hold").unlink(missing_ok=True)
    process.stop()


async def test_copies_of_one_gpu_do_not_wait_for_those_of_another(held, short_dir):
    """As many batches are under way as two GPUs can have."""
    async with await patient(held.address) as client:
        caches = await on_both(client, budgets=sizes(device=MANY, host=MANY), mapped=False)
        chains = [chain(cache.name, MANY) for cache in caches]
        for cache, keys in zip(caches, chains, strict=True):
            await cache.put(keys, blocks(keys), tier=Tier.HOST)
        (short_dir / "hold").touch()
        moves = [
            asyncio.create_task(cache.move(keys[first : first + BATCH], Tier.DEVICE))
            for cache, keys in zip(caches, chains, strict=True)
            for first in range(0, MANY, BATCH)
        ]

        async def begun():
            return sum(call["call"].startswith("cuMemcpy") for call in calls(short_dir, held.pid))

        await eventually(begun, lambda batches: batches >= 6)
        (short_dir / "hold").unlink()
        assert await asyncio.gather(*moves) == [[BlockResult.OK] * BATCH] * len(moves)
        for cache, keys in zip(caches, chains, strict=True):
            assert_bytes(keys, await cache.get(keys, tier=Tier.DEVICE))


async def test_a_client_maps_both(daemon, monkeypatch):
    use(load_fake(devices=2, max_delay_ms=1), monkeypatch)
    async with await patient(daemon.address) as client:
        caches = await on_both(client, budgets=BUDGETS)
        chains = [chain(cache.name, 3) for cache in caches]
        for _ in range(2):
            await asyncio.gather(
                *(cache.put(keys, blocks(keys), tier=Tier.DEVICE) for cache, keys in zip(caches, chains, strict=True))
            )
            for ordinal, (cache, keys) in enumerate(zip(caches, chains, strict=True)):
                memory: Any = cache.arena.memory(Tier.DEVICE)
                assert memory.gpu.driver.ordinal == ordinal
                assert_bytes(keys, await cache.get(keys, tier=Tier.DEVICE))
                async with cache.acquire(keys, Tier.DEVICE) as lease:
                    assert isinstance(lease.view(0)[0], DeviceView)
                await cache.reset()


async def test_a_full_device_refuses_and_the_other_one_takes(daemon):
    async with await patient(daemon.address) as client:
        one = sizes(device=1, host=1)
        assert (await client.open_cache("roomiest", SPEC, budgets=one)).info.device == SECOND
        full = await client.open_cache("full", SPEC, budgets=sizes(device=DEVICE), device="cuda:1")
        assert full.info.device == SECOND
        with pytest.raises(TierFull, match=f"^device tier of {SECOND}: all .* are given out .full "):
            await client.open_cache("more", SPEC, budgets=one, device=SECOND)
        assert (await client.open_cache("more", SPEC, budgets=one)).info.device == FIRST
        await full.close()
        await client.remove_cache("full")
        assert (await client.open_cache("again", SPEC, budgets=sizes(device=DEVICE))).info.device == SECOND


async def test_a_device_that_is_unknown_or_not_the_caches_is_refused_and_nothing_changes(daemon):
    async with await patient(daemon.address) as client:
        for unknown in ("cuda:2", "stand-in", "cuda"):
            with pytest.raises(InvalidArgument, match=f"device = {unknown}: must be cuda:0 or {FIRST} or cuda:1 or"):
                await client.open_cache("c", SPEC, device=unknown)
        assert await client.caches() == []
        cache = await client.open_cache("c", SPEC, budgets=BUDGETS, device=FIRST)
        for same in ("cuda:0", FIRST, None):
            assert (await client.open_cache("c", SPEC, device=same)).info.device == FIRST
        with pytest.raises(
            InvalidArgument, match=f"device = cuda:1: must be {FIRST}, the device of cache c"
        ) as refused:
            await client.open_cache("c", SPEC, device="cuda:1")
        assert refused.value.reason == "DEVICE_MISMATCH"
        host = await client.open_cache("host", SPEC, budgets=sizes(host=1))
        assert (cache.info.device, host.info.device) == (FIRST, "")


@pytest.mark.parametrize("end", ["kill", "upgrade"])
@pytest.mark.parametrize("disk", [0, DISK // 2], ids=["memory", "disk"])
async def test_a_restart_finds_both_caches_on_their_gpus(supervised, short_dir, end, disk):
    """Whatever the order of the tables is, and whatever names they have. Not a byte has moved, nor a generation
    changed, and the next daemon copies them."""
    async with await patient(supervised.address) as client:
        caches = await on_both(client, budgets=sizes(device=DEVICE, host=HOST // 2, disk=disk), mapped=False)
        for cache in caches:
            keys = await put_chain(cache, cache.name, DEVICE, tier=Tier.DEVICE)
        places = [await cache.locate(chain(cache.name, DEVICE)) for cache in caches]
        written(short_dir, f"{SECOND}={DEVICE}", f"cuda={DEVICE}")
        await asyncio.to_thread(supervised.kill if end == "kill" else supervised.upgrade)
        for cache, uuid, before in zip(caches, (FIRST, SECOND), places, strict=True):
            keys = chain(cache.name, DEVICE)
            again = await client.open_cache(cache.name)
            assert again.info.device == uuid
            assert {place.residency for place in before} == {Tier.DEVICE.bit}
            assert await again.locate(keys) == before
            assert_bytes(keys, await again.get(keys))
            assert await again.move(keys[-1:], Tier.HOST) == [BlockResult.OK]
            assert_bytes(keys, await again.get(keys))
    assert "not adopted" not in supervised.log and "is dropped" not in supervised.log
    assert supervised.stop() == 0


async def test_a_cache_whose_gpu_is_gone_moves_to_another_one_and_stays_there(supervised, short_dir):
    async with await patient(supervised.address) as client:
        cache = await client.open_cache(
            "c", SPEC, budgets=sizes(device=2, host=4, disk=8), device="cuda:1", mapped=False
        )
        keys = await put_chain(cache, "c", 2, tier=Tier.HOST)
        for devices in ([f"cuda:0={DEVICE}"], [f"cuda:0={DEVICE}", f"cuda:1={2 * DEVICE}"]):
            written(short_dir, *devices)
            await asyncio.to_thread(supervised.upgrade)
            again = await client.open_cache("c", mapped=False)
            assert (again.info.device, again.slots(Tier.DEVICE)) == (FIRST, 2)
            assert_bytes(keys, await again.get(keys))
            assert await again.move(keys, Tier.DEVICE) == [BlockResult.OK] * 2
    assert supervised.log.count("GPU memory is not adopted") == 1
    assert supervised.stop() == 0


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("disk", [0, DISK // 2], ids=["memory", "disk"])
async def test_a_cache_whose_gpu_is_gone_takes_no_room_from_one_that_is_there(supervised, short_dir, disk, names):
    moved, there = names
    async with await patient(supervised.address) as client:
        for name, device in ((moved, "cuda:1"), (there, "cuda:0")):
            cache = await client.open_cache(
                name, SPEC, budgets=sizes(device=DEVICE, host=HOST // 2, disk=disk), device=device, mapped=False
            )
            keys = await put_chain(cache, name, 2, tier=Tier.DEVICE)
        written(short_dir, f"cuda:0={DEVICE}")
        await asyncio.to_thread(supervised.upgrade)
        again, keys = await client.open_cache(there, mapped=False), chain(there, 2)
        assert [place.residency for place in await again.locate(keys)] == [Tier.DEVICE.bit] * 2
        assert_bytes(keys, await again.get(keys))
    assert supervised.stop() == 0


async def test_one_of_two_gpus_is_lost_and_costs_its_own_device_tiers_alone(supervised, short_dir):
    """While the daemon runs, and over restarts with and without it."""
    async with await patient(supervised.address) as client:
        caches = await on_both(client, budgets=BUDGETS, mapped=False)
        chains = [chain(cache.name, 3) for cache in caches]
        there = chain("on the host", 4)
        for cache, keys in zip(caches, chains, strict=True):
            await cache.put(keys, blocks(keys), tier=Tier.DEVICE)
            await cache.put(there, blocks(there), tier=Tier.HOST)
        lost = short_dir / "lost"
        lost.touch()

        async def assert_one_is_lost():
            stats = await eventually(client.stats, lambda stats: len(stats.problems) == 2)
            assert [device.uuid for device in stats.devices] == [FIRST, SECOND]
            assert stats.problems[0].startswith(f"GPU {SECOND} (cuda:1) is lost")
            assert stats.problems[1].startswith("cache cuda-1: the device tier is out of service")
            caches = [await client.open_cache(name, mapped=False) for name in ("cuda-0", "cuda-1")]
            assert [(await cache.match(keys)).blocks for cache, keys in zip(caches, chains, strict=True)] == [3, 0]
            assert_bytes(chains[0], await caches[0].get(chains[0], tier=Tier.DEVICE))
            for cache in caches:
                assert_bytes(there, await cache.get(there, tier=Tier.HOST))
            with pytest.raises(TierOffline):
                await caches[1].move(there, Tier.DEVICE)

        pid = supervised.pid
        await assert_one_is_lost()
        assert supervised.pid == pid
        for end in (supervised.kill, supervised.upgrade):
            await asyncio.to_thread(end)
            await assert_one_is_lost()
        shown = kvtier("status", "--address", supervised.address).stdout
        assert f"problem: GPU {SECOND} (cuda:1) is lost" in shown
        lost.unlink()
        await asyncio.to_thread(supervised.upgrade)
        assert (await client.stats()).problems == ()
        assert await (await client.open_cache("cuda-1", mapped=False)).move(there, Tier.DEVICE) == [BlockResult.OK] * 4
    assert supervised.stop() == 0


async def test_a_gpu_that_is_not_listed_any_more_is_the_one_that_is_missing(supervised, short_dir, monkeypatch):
    """The driver counts what it finds: the first GPU is gone, and ``cuda:0`` is the second one from now on."""
    async with await patient(supervised.address) as client:
        caches = await on_both(client, budgets=BUDGETS, mapped=False)
        for cache in caches:
            keys = await put_chain(cache, cache.name, 2, tier=Tier.HOST)
            await cache.put(chain(f"{cache.name} device", 2), blocks(chain(f"{cache.name} device", 2)))
    assert supervised.stop() == 0
    supervised.plain.variables["CUDA_VISIBLE_DEVICES"] = SECOND
    supervised.start()
    async with await patient(supervised.address) as client:
        first, second = [await client.open_cache(cache.name, mapped=False) for cache in caches]
        assert [first.info.device, second.info.device] == [FIRST, SECOND]
        assert any(problem.startswith(f"GPU {FIRST} (cuda:1) is lost") for problem in (await client.stats()).problems)
        with pytest.raises(TierOffline):
            await first.move(chain("cuda-0", 2), Tier.DEVICE)
        keys = await put_chain(second, "more", 2, tier=Tier.DEVICE)
        assert_bytes(keys, await second.get(keys, tier=Tier.DEVICE))
    assert supervised.stop() == 0
