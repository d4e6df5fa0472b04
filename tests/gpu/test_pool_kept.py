"""A daemon that is killed under its supervisor finds the pool on the device as it was; or it says why it cannot."""

import asyncio
from typing import Final

import numpy as np
import pytest

from kvtier import BlockResult, Tier
from tests.gpu.kernels import kernels
from tests.gpu.racing import SLOT_BYTES, SPEC, content
from tests.integration.supervised import SupervisedDaemon
from tests.integration.torture_blocks import chain
from tests.integration.waiting import patient

pytestmark = pytest.mark.gpu

ON_DEVICE: Final = chain(0)
IN_HOST: Final = chain(1)
NOT_ADOPTED: Final = "GPU memory is not adopted"


@pytest.mark.parametrize("end", ["kill", "upgrade"])
async def test_blocks_on_the_device_outlive_the_daemon(short_dir, device, end, tell):
    """Without a disk: nothing but memory could bring them back. Those of the host come back in any case."""
    with SupervisedDaemon(short_dir, {Tier.DEVICE: 12 * SLOT_BYTES, Tier.HOST: 12 * SLOT_BYTES}) as daemon:
        at = kernels(device, 0)
        async with await patient(daemon.address) as client:
            cache, stream = await client.open_cache("race", SPEC), at.stream()
            lease = await cache.reserve(len(ON_DEVICE), Tier.DEVICE)
            for index, key in enumerate(ON_DEVICE):
                at.write(lease.view(index), key, stream)
            await lease.commit(ON_DEVICE, release=True, stream=stream)
            blocks = [content(key) for key in IN_HOST]
            assert await cache.put(IN_HOST, blocks, tier=Tier.HOST) == [BlockResult.OK] * len(IN_HOST)

            await asyncio.to_thread(daemon.kill if end == "kill" else daemon.upgrade)
            assert [place.residency for place in await cache.locate(IN_HOST)] == [Tier.HOST.bit] * len(IN_HOST)
            assert all(map(np.array_equal, await cache.get(IN_HOST, tier=Tier.HOST), blocks))
            if NOT_ADOPTED in daemon.log:
                (line,) = [line for line in daemon.log.splitlines() if NOT_ADOPTED in line]
                tell.append(f"the driver gives the pool to no other process: {line}")
                assert (await cache.match(ON_DEVICE)).blocks == 0
            else:
                assert [place.residency for place in await cache.locate(ON_DEVICE)] == [Tier.DEVICE.bit] * 6
                held = await cache.acquire(ON_DEVICE, Tier.DEVICE)
                checks = [at.check(held.view(index), key, stream) for index, key in enumerate(held.keys)]
                await held.release(stream=stream)
                assert sum(wrong() for wrong in checks) == 0
                tell.append("the next daemon has the pool as it was")
