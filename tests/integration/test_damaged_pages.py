"""A page that LMDB cannot read without the end of the process costs a few crashes, not one at every start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from kvtier import CallerError, Tier, connect
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.supervised import SupervisedDaemon

PAGE = 4096
LEAF = b"\x02\0"
"""The flags in the head of a page with records."""
LENGTH = 96
MOST_CRASHES = 4
"""The first, which may come after the opening, and three while it is opened again."""
READS_ALL = """
import lmdb, sys
with lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=16, lib_version=0) as env:
    with env.begin() as txn:
        names = [name for name, _ in txn.cursor()]
    for name in names:
        with env.begin(db=env.open_db(name, create=False)) as txn:
            list(txn.cursor())
"""


def dies(environment):
    """Whether LMDB ends a process that reads all of it."""
    reader = subprocess.run([sys.executable, "-c", READS_ALL, str(environment)], capture_output=True, check=False)
    return reader.returncode == -signal.SIGABRT


def damage(environment):
    """Zeroes a page without which LMDB ends the process."""
    with open(environment / "data.mdb", "r+b", buffering=0) as file:
        data = file.read()
        for place in range(2 * PAGE, len(data), PAGE):
            page = data[place : place + PAGE]
            if page[10:12] != LEAF:
                continue
            file.seek(place)
            file.write(bytes(PAGE))
            if dies(environment):
                return
            file.seek(place)
            file.write(page)
    pytest.fail("LMDB survives the loss of any page")


@pytest.fixture
def daemon(short_dir):
    process = SupervisedDaemon(short_dir, sizes(host=LENGTH, disk=4 * LENGTH))
    process.start()
    yield process
    process.close()


async def on_disk(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=LENGTH // 2, disk=2 * LENGTH))
    keys = chain(name, LENGTH)
    for first in range(0, LENGTH, 16):
        some = keys[first : first + 16]
        await cache.put(some, blocks(some), parent=keys[first - 1] if first else None)
        await cache.move(some, Tier.DISK)


async def test_an_index_that_ends_the_process_is_left_out(daemon):
    async with await connect(daemon.address) as client:
        for name in ("good", "hurt"):
            await on_disk(client, name)
    daemon.stop()
    damage(daemon.plain.disk_dir / "caches" / "hurt" / "index")

    await asyncio.to_thread(daemon.start)
    crashes = daemon.log.count("the daemon died")
    assert 3 <= crashes <= MOST_CRASHES
    async with await connect(daemon.address) as client:
        (problem,) = (await client.stats()).problems
        assert problem.startswith("cache hurt is left out: ") and "LMDB has ended 3 processes" in problem
        with pytest.raises(CallerError, match="cache hurt is left out"):
            await client.open_cache("hurt", SPEC)
        cache, keys = await client.open_cache("good", SPEC), chain("good", LENGTH)
        assert_bytes(keys, await cache.get(keys))

    daemon.upgrade()
    assert daemon.log.count("the daemon died") == crashes, "nobody opens it any more"
    async with await connect(daemon.address) as client:
        assert len((await client.stats()).problems) == 1
        await client.remove_cache("hurt", force=True)
        await on_disk(client, "hurt")
        assert not (await client.stats()).problems
