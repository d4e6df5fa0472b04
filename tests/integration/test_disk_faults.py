"""A disk that lies, shrinks, fills up or hangs: a miss at worst, and never another block's bytes.

The faults are real: files changed behind the daemon's back, a limit on file sizes put on the running process, the
index's lock held by somebody else.
"""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from kvtier import BlockResult, CacheOptions, CallerError, Cause, Event, EventType, Tier
from kvtier.events import BlockTokens
from kvtier.wire import split_keys
from kvtierd.tiers.disk.records import decode_records
from tests.fake_cuda import FAKES
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.daemon import DaemonProcess
from tests.integration.seeing import cache_stats, last_event, tier_stats
from tests.integration.stored import flip_in_record, stored_in
from tests.integration.stuck import stuck_disk
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, eventually, heard, patient

SLOTS = {"device": 8, "host": 8, "disk": 96}
NAMES = ("left", "hurt", "right")
LENGTH = 12
HURT_AT = 5
"""Position in the chain "hurt" of the block whose bytes are changed."""

daemon = own_daemon(**SLOTS)


@pytest.fixture
async def cache(client):
    """Three chains, only on disk."""
    cache = await client.open_cache("c", SPEC)
    for name in NAMES:
        keys = await put_chain(cache, name, LENGTH)
        assert set(await cache.move(keys, Tier.DISK)) == {BlockResult.OK}
    return cache


def slab(daemon):
    return daemon.disk_dir / "caches" / "c" / "group-0.slab"


def disk_slot(daemon, key):
    """Where the index says that a block lies."""
    stored = stored_in(daemon.disk_dir / "caches" / "c")
    return int(decode_records([key], [stored[key]])["slot"][0])


def limit_files(daemon, nbytes=None):
    """No write of the daemon's goes beyond so many bytes of any file; without a number it may again."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))


def flip_a_bit(daemon, key):
    with slab(daemon).open("r+b") as file:
        file.seek(disk_slot(daemon, key) * SLOT_BYTES + 1234)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("running", [True, False])
async def test_a_flipped_bit_costs_its_block_and_what_stands_on_it(daemon, client, cache, running):
    keys = chain("hurt", LENGTH)
    if not running:
        await asyncio.to_thread(daemon.stop)
    flip_a_bit(daemon, keys[HURT_AT])
    if not running:
        await asyncio.to_thread(daemon.start)
        await heard(client)
    start = await last_event(client)
    assert_bytes(keys[:HURT_AT], await cache.get(keys))
    gone: dict[bytes, Cause | int] = {}
    async with client.watch(since=start, types=[EventType.REMOVED]) as watch:
        while len(gone) < LENGTH - HURT_AT:
            event = await anext(watch)
            assert isinstance(event, Event)
            gone.update(dict.fromkeys(event.keys, event.cause))
    assert gone == {keys[HURT_AT]: Cause.CORRUPT} | dict.fromkeys(keys[HURT_AT + 1 :], Cause.ANCESTOR)
    assert (await cache.match(keys)).blocks == HURT_AT
    assert (await tier_stats(client, "c", Tier.DISK)).quarantined == 1
    for name in ("left", "right"):
        assert_bytes(chain(name, LENGTH), await cache.get(chain(name, LENGTH)))
    # What was lost can be stored again, and the bad place stays out of use over a restart.
    await cache.put(keys, blocks(keys))
    await cache.move(keys, Tier.DISK)
    await asyncio.to_thread(daemon.restart)
    await heard(client)
    assert_bytes(keys, await cache.get(keys))
    assert (await tier_stats(client, "c", Tier.DISK)).quarantined == 1


RECORD = {
    "priority": 10,
    "last use": 16,
    "checksum": 33,
    "parent": 50,
    "duration": 88,
    "deadline": 96,
    "hash": 100,
    "tokens": -2,
}
"""Places in a record of the index."""


@pytest.mark.parametrize("place", RECORD.values(), ids=RECORD.keys())
async def test_a_flipped_bit_of_the_index_is_a_miss_and_never_told(daemon, client, place):
    options = CacheOptions(event_hash="v2_sha256", keep_tokens=True)
    cache = await client.open_cache("told", SPEC, options=options)
    prompt = cache.prompt(range(3 * SPEC.tokens_per_block))
    keys = split_keys(prompt.keys)
    await cache.put(keys, blocks(keys), prompt=prompt)
    assert set(await cache.move(keys, Tier.DISK)) == {BlockResult.OK}
    before = await last_event(client)
    written = await stored_by_key(client, before, oldest=True)
    assert sorted(written) == sorted(keys) and all(tokens and digest for tokens, digest, _ in written.values())
    await asyncio.to_thread(daemon.stop)
    flip_in_record(daemon.disk_dir / "caches" / "told", keys[2], place)
    daemon.forget_log()
    await asyncio.to_thread(daemon.start)
    await heard(client)
    async with asyncio.timeout(PATIENCE_S), client.watch(since=before, types=[EventType.REMOVED]) as watch:
        event = await anext(watch)
    assert (event.cause, event.keys) == (Cause.CORRUPT, [keys[2]])
    assert await stored_by_key(client, await last_event(client), since=before) == {k: written[k] for k in keys[:2]}
    assert "records on disk could not be used cache=told dropped=1 of_these_corrupt=1" in daemon.log
    assert_bytes(keys[:2], await cache.get(keys))


async def stored_by_key(client, end, **start):
    """Tokens, event hash and priority that were told of each block of the cache "told" as it was stored."""
    found: dict[bytes, tuple[BlockTokens, bytes, int]] = {}
    async with asyncio.timeout(PATIENCE_S), client.watch(**start, heartbeats=True, heartbeat_s=0.02) as watch:
        while watch.cursor is None or watch.cursor < end:
            event = await anext(watch)
            if isinstance(event, Event) and event.cache == "told" and event.type is EventType.STORED:
                hashes = event.hashes
                found |= dict(zip(event.keys, zip(event.tokens, hashes, event.priorities, strict=True), strict=True))
    return found


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to make the library with")
@pytest.mark.parametrize("sync", ["batch", "commit"])
async def test_a_power_cut_may_undo_the_last_transaction_unless_each_is_synced(short_dir, sync):
    """What has been written to the index and not to the medium when a move is acknowledged."""
    library, notes = short_dir / "syncs.so", short_dir / "syncs"
    source = FAKES / "syncs.c"
    await asyncio.to_thread(subprocess.run, ["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    daemon = DaemonProcess(short_dir, sizes(host=16, disk=32), ["--sync", sync])
    daemon.variables = {"LD_PRELOAD": str(library), "KVTIER_TEST_SYNCS": str(notes)}
    await asyncio.to_thread(daemon.start)
    try:
        async with opened_cache(daemon.address, "c") as (_, cache):
            for name in ("one", "two"):
                keys = await put_chain(cache, name, 4)
                assert set(await cache.move(keys, Tier.DISK)) == {BlockResult.OK}
                written = notes.read_text()
                assert "s" in written
                assert ("w" in written.rpartition("s")[2]) is (sync == "batch")
    finally:
        await asyncio.to_thread(daemon.stop)


async def test_a_slab_cut_short_while_stopped_costs_what_was_cut_off(daemon, client, cache):
    await asyncio.to_thread(daemon.stop)
    left = min(disk_slot(daemon, key) for name in ("hurt", "right") for key in chain(name, LENGTH))
    os.truncate(slab(daemon), left * SLOT_BYTES)
    await asyncio.to_thread(daemon.start)
    assert "has lost part of its" in daemon.log
    await heard(client)
    assert_bytes(chain("left", LENGTH), await cache.get(chain("left", LENGTH)))
    for name in ("hurt", "right"):
        assert await cache.get(chain(name, LENGTH)) == []
        assert (await cache.match(chain(name, LENGTH))).blocks == 0


async def test_a_slab_cut_short_under_a_running_daemon_is_a_miss(daemon, client, cache):
    """Reads fail, so nothing is known of the bytes: they stay listed, are not served, and health says so."""
    os.truncate(slab(daemon), SLOT_BYTES)
    for name in NAMES:
        keys = chain(name, LENGTH)
        found = await cache.get(keys)
        assert_bytes(keys[: len(found)], found)
        assert len(found) <= 1, "only the first slot is left"
    stats = await client.stats()
    assert any("disk>device is not in use" in problem for problem in stats.problems), stats.problems
    # Memory is as good as ever.
    fresh = await put_chain(cache, "fresh", 4)
    assert_bytes(fresh, await cache.get(fresh))


async def test_writes_that_fail_leave_their_blocks_where_they_are(daemon, client, cache):
    """The far half of the slab cannot be written: what is there stays, what comes is kept in memory or dropped."""
    limit_files(daemon, len(NAMES) * LENGTH * SLOT_BYTES)
    keys = await put_chain(cache, "late", 6)
    for _ in range(3):
        results = await cache.move(keys, Tier.DISK)
        assert set(results) <= {BlockResult.FAILED, BlockResult.NO_ROOM}
    assert not any(residency & Tier.DISK.bit for residency in (await cache.match(keys)).residency)
    assert_bytes(keys, await cache.get(keys))
    stats = await client.stats()
    assert any("device>disk is not in use" in problem for problem in stats.problems), stats.problems
    # More than memory holds: something is dropped, nothing waits for the disk for ever.
    for number in range(8):
        more = await put_chain(cache, f"more {number}", 4, timeout=PATIENCE_S)
        assert_bytes(more, await cache.get(more))
    for name in NAMES:
        assert_bytes(chain(name, LENGTH), await cache.get(chain(name, LENGTH)))
    # The disk has recovered: blocks go down again, and after a while all is well.
    limit_files(daemon)
    last = await put_chain(cache, "last", 2)
    await eventually(lambda: cache.move(last, Tier.DISK), lambda results: set(results) == {BlockResult.OK})
    await eventually(client.stats, lambda stats: not stats.problems)


async def test_deletions_that_fail_cost_no_slot_once_the_disk_is_well(daemon, client, cache):
    limit_files(daemon, 0)
    await cache.drop(chain("hurt", LENGTH))
    disk = await eventually(lambda: tier_stats(client, "c", Tier.DISK), lambda disk: disk.quarantined > 0)
    assert disk.quarantined == LENGTH
    limit_files(daemon)
    # A slot is RETIRING while its record is deleted once more, and free when that is on the disk.
    free = SLOTS["disk"] - (len(NAMES) - 1) * LENGTH
    await eventually(lambda: tier_stats(client, "c", Tier.DISK), lambda disk: disk.free == free)
    await asyncio.to_thread(daemon.crash)
    await heard(client)
    for name in NAMES:
        assert (await cache.match(chain(name, LENGTH))).blocks == (0 if name == "hurt" else LENGTH)


async def test_a_hanging_disk_stops_neither_lookups_nor_memory(daemon, client, cache):
    """A call that waited for the disk would not end: the disk answers at the end of the block."""
    with stuck_disk(daemon, "c"):
        keys = await put_chain(cache, "in memory", 4)
        moving = asyncio.create_task(cache.move(keys, Tier.DISK))
        await eventually(lambda: _queued(client), lambda queued: queued > 0)
        for name in NAMES:
            assert (await cache.match(chain(name, LENGTH))).blocks == LENGTH
            assert len(await cache.locate(chain(name, LENGTH))) == LENGTH
        assert_bytes(keys, await cache.get(keys))
        assert not moving.done()
    assert set(await moving) == {BlockResult.OK}
    assert_bytes(keys, await cache.get(keys))


@pytest.mark.long
async def test_a_hanging_disk_shows_in_health(daemon, client, cache):
    keys = await put_chain(cache, "in memory", 4)
    with stuck_disk(daemon, "c"):
        moving = asyncio.create_task(cache.move(keys, Tier.DISK))
        stats = await eventually(client.stats, lambda stats: stats.problems, within=3 * PATIENCE_S)
        assert "disk-writer-finish: stuck" in stats.problems[0]
    await moving
    assert (await client.stats()).problems == ()


async def _queued(client):
    return sum(edge.queued_blocks for edge in (await cache_stats(client, "c")).edges)


DISK_SLOTS = 256
KEYS = chain("only there", 80)
IN_MEMORY = chain("in memory", 4)


async def test_a_dead_disk_is_given_up_and_a_mended_one_taken_back(start_daemon):
    daemon = start_daemon("--tier-grace-seconds", "0.2", device=8, host=8, disk=DISK_SLOTS)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        await cache.put(KEYS, blocks(KEYS))
        assert set(await cache.move(KEYS, Tier.DISK)) == {BlockResult.OK}
        await cache.put(IN_MEMORY, blocks(IN_MEMORY))
        # Reads find nothing, and no write reaches a slot that is free, or the end of the slab, where the probe goes.
        limit_files(daemon, len(KEYS) // 2 * SLOT_BYTES)
        os.truncate(slab(daemon), 0)
        assert await cache.get(KEYS) == []
        lost = "cache c: the disk tier is out of service, what it held is lost: cannot use "
        await eventually(client.stats, lambda stats: any(problem.startswith(lost) for problem in stats.problems))
        assert (await cache.match(KEYS)).blocks == 0
        disk = await tier_stats(client, "c", Tier.DISK)
        assert (disk.ready, disk.quarantined) == (0, DISK_SLOTS)
        # Memory is as good as ever, and only the top of what is more than it holds is kept.
        assert_bytes(IN_MEMORY, await cache.get(IN_MEMORY))
        for number in range(4):
            more = await put_chain(cache, f"more {number}", 6)
            assert_bytes(more, await cache.get(more))
        # Mended: empty, whole, and in use.
        limit_files(daemon)
        await eventually(client.stats, lambda now: not now.problems)
        assert slab(daemon).stat().st_blocks * 512 >= DISK_SLOTS * SLOT_BYTES
        again = await put_chain(cache, "again", 4)
        assert set(await cache.move(again, Tier.DISK)) == {BlockResult.OK}
        assert_bytes(again, await cache.get(again))


PAGE = 4096
LEAF = b"\x02\0"
"""The flags in the head of a page with records."""
MANY = 96
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
def supervised(short_dir):
    process = SupervisedDaemon(short_dir, sizes(host=MANY, disk=4 * MANY))
    process.start()
    yield process
    process.close()


async def all_on_disk(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=MANY // 2, disk=2 * MANY))
    keys = chain(name, MANY)
    for first in range(0, MANY, 16):
        some = keys[first : first + 16]
        await cache.put(some, blocks(some), parent=keys[first - 1] if first else None)
        await cache.move(some, Tier.DISK)


async def test_an_index_that_ends_the_process_is_left_out(supervised):
    async with await patient(supervised.address) as client:
        for name in ("good", "hurt"):
            await all_on_disk(client, name)
    supervised.stop()
    damage(supervised.plain.disk_dir / "caches" / "hurt" / "index")

    await asyncio.to_thread(supervised.start)
    crashes = supervised.log.count("the daemon died")
    assert 3 <= crashes <= MOST_CRASHES
    async with await patient(supervised.address) as client:
        (problem,) = (await client.stats()).problems
        assert problem.startswith("cache hurt is left out: ") and "LMDB has ended 3 processes" in problem
        with pytest.raises(CallerError, match="cache hurt is left out"):
            await client.open_cache("hurt", SPEC)
        cache, keys = await client.open_cache("good", SPEC), chain("good", MANY)
        assert_bytes(keys, await cache.get(keys))

    supervised.upgrade()
    assert supervised.log.count("the daemon died") == crashes, "nobody opens it any more"
    async with await patient(supervised.address) as client:
        assert len((await client.stats()).problems) == 1
        await client.remove_cache("hurt", force=True)
        await all_on_disk(client, "hurt")
        assert not (await client.stats()).problems
