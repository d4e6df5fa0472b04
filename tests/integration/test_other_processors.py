"""Where processors do not keep stores in order there is no key index: calls and leases do all the same, and status says
so."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from kvtier import Tier, connect
from kvtier.wire import ReadCounts
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.test_cli import kvtier


class Foreign(DaemonProcess):
    def command(self):
        command = super().command()
        command[command.index("kvtierd.main")] = "tests.integration.foreign_daemon"
        return command


@pytest.fixture(scope="module")
def foreign():
    home = Path(tempfile.mkdtemp(prefix="kv-"))
    try:
        process = Foreign(home, sizes(device=4, host=8, disk=16))
        process.start()
        try:
            yield process
        finally:
            process.stop()
    finally:
        shutil.rmtree(home)


async def test_all_goes_by_calls_and_leases_there(foreign):
    async with await connect(foreign.address) as client:
        cache = await client.open_cache("llama", SPEC)
        assert cache.mapped
        assert cache.lookups == "calls: the daemon keeps no key index on its kind of machine"
        keys = chain("there", 12)
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        assert (await cache.match(keys)).blocks == 12
        assert await cache.prefix_length([*keys, *chain("not there", 2)]) == 12
        assert all(place.residency for place in await cache.locate(keys[-4:]))
        assert_bytes(keys, await cache.get(keys))
        assert_bytes(keys[:2], await cache.get(keys[:2], verify=True))
        async with cache.acquire(keys[:3], Tier.HOST) as lease:
            assert lease.blocks == 3
        assert cache.reads.calls > 0
        assert cache.reads == ReadCounts(calls=cache.reads.calls, hits=cache.reads.hits), "nothing in shared memory"
    assert "lookups by calls" in kvtier("status", "--address", foreign.address).stdout
