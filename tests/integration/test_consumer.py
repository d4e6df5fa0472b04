"""The consumer that the documentation shows: it runs, and what it says is what the daemon lists."""

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

from tests.integration.blocks import opened_cache
from tests.integration.load import Load
from tests.integration.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]


async def test_the_documented_consumer_knows_where_every_block_is_over_restarts(start_daemon):
    follow = runpy.run_path(str(ROOT / "examples/consumer.py"))["follow"]
    daemon = start_daemon("--chaos-seed", "4", device=6, host=12, disk=24)
    blocks: dict[bytes, int] = {}
    async with opened_cache(daemon.address, "followed", wait=PATIENCE_S) as (client, cache):
        consumer = asyncio.create_task(follow(client, "followed", blocks))
        async with Load(daemon.address, "followed", chains=6, workers=2, seed=4) as load:
            for end in (daemon.kill, daemon.stop, daemon.kill):
                before = load.done.total()

                async def done():
                    load.check()
                    return load.done.total()

                await eventually(done, lambda count, before=before: count > before + 20)  # type: ignore[misc]
                await asyncio.to_thread(end)
                await asyncio.to_thread(daemon.start)

        async def agreement():
            assert not consumer.done(), consumer.result()
            return blocks == {row.key: row.residency async for row in cache.blocks()}

        await eventually(agreement, bool)
        assert blocks, "nothing was left to compare"
        consumer.cancel()
        await asyncio.wait([consumer])


def test_the_consumer_says_how_it_is_used():
    done = subprocess.run([sys.executable, ROOT / "examples/consumer.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "usage: consumer.py CACHE [ADDRESS]\n")
