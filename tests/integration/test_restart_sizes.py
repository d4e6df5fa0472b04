"""What a restart keeps if the tiers' sizes, or what is free, are not what they were."""

import asyncio

import pytest

from kvtier import CallerError, Cause, Cursor, Event, EventType, Tier
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.on_gpu import gpu_daemon, supervised_gpu_daemon
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, patient

MIB = 1 << 20


@pytest.mark.parametrize("end", ["kill", "upgrade"])
async def test_a_cache_in_memory_that_fits_no_more_is_lost_alone(short_dir, ending, end):
    file = short_dir / "kvtierd.toml"
    file.write_text(f"host_bytes = {12 * SLOT_BYTES}")
    daemon = SupervisedDaemon(short_dir, {}, ["--config", str(file)])
    daemon.start()
    ending.callback(daemon.close)
    keys = chain("kept", 4)
    async with await patient(daemon.address) as client:
        for name, slots in (("large", 8), ("small", 4)):
            cache = await client.open_cache(name, SPEC, budgets=sizes(host=slots))
            await cache.put(keys, blocks(keys))
        stats = await client.stats()
        file.write_text(f"host_bytes = {6 * SLOT_BYTES}")
        await asyncio.to_thread(daemon.kill if end == "kill" else daemon.upgrade)
        assert_bytes(keys, await (await client.open_cache("small")).get(keys))
        with pytest.raises(CallerError, match=r"^cache large is not served: no room for its "):
            await client.open_cache("large")
        async with asyncio.timeout(PATIENCE_S):
            async for event in client.watch(since=Cursor(stats.epoch, stats.last_event_id), types=[EventType.CLEARED]):
                if isinstance(event, Event) and event.cache == "large":
                    assert event.cause is (Cause.LOST if end == "kill" else Cause.SHUTDOWN)
                    break
        assert len((await client.stats()).problems) == 1
        again = await client.open_cache("large", SPEC, budgets=sizes(host=2))
        assert not (await client.stats()).problems
        assert (await again.match(keys)).blocks == 0
    assert f"cache large is not served: no room for its {8 * SLOT_BYTES // 1024}.0 KiB of host" in daemon.log
    assert daemon.stop() == 0


async def test_a_share_of_a_gpu_stays_what_it_came_to_while_an_engine_takes_the_rest(short_dir, ending):
    gpu = {"memory": 32 * MIB, "shared": str(short_dir)}
    daemon = supervised_gpu_daemon(short_dir, sizes(host=4), ["--device", "cuda=50%"], gpu=gpu)
    daemon.start()
    ending.callback(daemon.close)
    engine_dir = short_dir / "e"
    engine_dir.mkdir()
    engine = gpu_daemon(engine_dir, {Tier.DEVICE: 12 * MIB}, gpu=gpu)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        assert cache.slots(Tier.DEVICE) == 16 * MIB // SLOT_BYTES
        keys = await put_chain(cache, "kept", 4, tier=Tier.DEVICE)
        await cache.put(keys[:2], blocks(keys[:2]), tier=Tier.HOST)
        engine.start()
        ending.callback(engine.stop)
        async with await patient(engine.address) as other:
            await other.open_cache("engine", SPEC)
            await asyncio.to_thread(daemon.kill)
            assert_bytes(keys, await (await client.open_cache("c")).get(keys))
            assert (await client.open_cache("c")).slots(Tier.DEVICE) == 16 * MIB // SLOT_BYTES
    assert "not adopted" not in daemon.log and "is dropped" not in daemon.log
    assert daemon.stop() == 0
