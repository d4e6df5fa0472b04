"""A cache that has less than it was promised: it is told, it gets its budget back, and no start forgets it."""

import pytest

from kvtier import CallerError, KvtierError, Tier, TierFull
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.scraping import LISTEN, scrape
from tests.integration.starting import kvtierd, refused
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_cli import kvtier
from tests.integration.waiting import PATIENCE_S, patient

NAMES = ("a", "b", "c")
SHRUNK = ("cache b: only 24.0 KiB of its 48.0 KiB of host", "cache c: no room for its 48.0 KiB of host")
RESTS = "it has slots on disk, and no disk tier is configured (disk_bytes)"


@pytest.fixture
async def daemon(short_dir, ending):
    """Three caches with room for all, each with four blocks."""
    daemon = DaemonProcess(short_dir, sizes(host=12, disk=24), LISTEN)
    ending.callback(daemon.stop)
    daemon.start()
    async with await patient(daemon.address) as client:
        for name in NAMES:
            cache = await client.open_cache(name, SPEC, budgets=sizes(host=4, disk=8))
            await cache.move(await put_chain(cache, name, 4), Tier.DISK)
    return daemon


def again(daemon, **slots):
    """Stops the daemon. Returns what a check says of other sizes, with which it then starts."""
    daemon.stop()
    daemon.forget_log()
    daemon.sizes = sizes(**slots)
    ended = check(daemon)
    assert (ended.returncode, ended.stdout) == (0, "kvtierd: the configuration is right\n"), ended
    daemon.start()
    return tuple(line.removeprefix("kvtierd: warning: ") for line in ended.stderr.splitlines())


def check(daemon):
    return kvtierd(*daemon.command()[3:], "--check-config")


async def problems(daemon):
    async with await patient(daemon.address) as client:
        return (await client.stats()).problems


async def test_a_smaller_tier_is_told_and_a_larger_one_gives_the_budgets_back(daemon):
    for _ in range(2):  # the second start still knows the promises
        assert again(daemon, host=6, disk=24) == await problems(daemon) == SHRUNK
        assert [daemon.log.count(says) for says in SHRUNK] == [1, 1]
    shown = kvtier("status", "--address", daemon.address).stdout
    assert all(says in shown for says in SHRUNK)
    seen = await scrape(daemon)
    missing = seen.values("kvtier_missing_bytes", tier="host")
    assert missing == {("a",): 0, ("b",): 2 * SLOT_BYTES, ("c",): 4 * SLOT_BYTES}
    assert seen.value("kvtier_problems") == 2
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S, budgets=sizes(host=4)) as (client, cache):
        with pytest.raises(CallerError, match=r"^cache c has only disk: start kvtierd with --host-bytes .*status"):
            await cache.put(chain("more", 1), blocks(chain("more", 1)))
    assert again(daemon, host=12, disk=24) == await problems(daemon) == ()
    async with await patient(daemon.address) as client:
        for name in NAMES:
            cache = await client.open_cache(name, SPEC, budgets=sizes(host=4, disk=8))
            assert_bytes(chain(name, 4), await cache.get(chain(name, 4)))


async def test_a_promise_is_no_room_that_others_may_not_take(daemon):
    again(daemon, host=6, disk=64)
    async with await patient(daemon.address) as client:
        await client.remove_cache("c")
        assert (await client.stats()).problems == SHRUNK[:1]
        await client.remove_cache("a")
        await client.open_cache("aa", SPEC, budgets=sizes(host=4))
    assert again(daemon, host=8, disk=64) == await problems(daemon) == ()
    async with await patient(daemon.address) as client:
        assert [info.name for info in await client.caches()] == ["b"], "a stop ends a cache in memory only"


@pytest.mark.parametrize(("reopened", "host"), [(None, 4), ({}, 4), (sizes(host=3), 3)])
async def test_without_a_disk_tier_its_caches_are_told_and_come_back(daemon, reopened, host):
    rest = tuple(f"cache {name}: {RESTS}" for name in NAMES)
    assert again(daemon, host=12) == rest
    assert await problems(daemon) == tuple(f"cache {name} is not served: {RESTS}" for name in NAMES)
    listed, seen = kvtier("cache", "ls", "--address", daemon.address).stdout, await scrape(daemon)
    assert all(f"cache {name} is not served: {RESTS}\n" in listed for name in NAMES)
    for tier, slots in ((Tier.HOST, 4), (Tier.DISK, 8)):
        assert seen.values("kvtier_missing_bytes", tier=str(tier)) == {(name,): slots * SLOT_BYTES for name in NAMES}
    async with await patient(daemon.address) as client:
        with pytest.raises(CallerError, match=r"^cache a is not served: it has slots on disk"):
            await client.open_cache("a")
        assert [(info.name, info.not_served) for info in await client.caches()] == [(name, RESTS) for name in NAMES]
        for name in () if reopened is None else NAMES:
            await client.open_cache(name, SPEC, budgets=reopened)
        lacks = tuple(f"cache {name}: no room for its 96.0 KiB of disk" for name in NAMES)
        assert reopened is None or (await client.stats()).problems == lacks
    assert again(daemon, host=12) == rest, "the promise is still known"
    async with await patient(daemon.address) as client:
        with pytest.raises(KvtierError, match="only force"):
            await client.remove_cache("c")
        await client.remove_cache("c", force=True)
    assert len(await problems(daemon)) == 2
    assert again(daemon, host=12, disk=24) == await problems(daemon) == ()
    async with opened_cache(daemon.address, "a", wait=PATIENCE_S) as (_, cache):
        assert (cache.slots(Tier.HOST), cache.slots(Tier.DISK)) == (host, 8)
        assert_bytes(chain("a", 4), await cache.get(chain("a", 4)))


async def test_a_check_fails_as_the_start_would_and_harms_no_running_daemon(daemon):
    daemon.sizes = sizes(host=12, disk=8)
    before = {path: path.read_bytes() for path in daemon.state_dir.rglob("SUPERBLOCK*")}
    ended = check(daemon)
    wanted = f"at least {2 * 8 * SLOT_BYTES}, the bytes of the stored caches up to b"
    says = f"kvtierd: command line: --disk-bytes = {8 * SLOT_BYTES}: {wanted}\n"
    assert (ended.returncode, ended.stderr) == (2, says), ended
    assert {path: path.read_bytes() for path in daemon.state_dir.rglob("SUPERBLOCK*")} == before
    assert await problems(daemon) == ()
    (damaged := daemon.state_dir / "caches/SUPERBLOCK").write_text("kvtier")
    assert (check(daemon).returncode, "warning: tiers are not compared" in check(daemon).stderr) == (0, True)
    assert damaged.read_text() == "kvtier"


@pytest.mark.parametrize(("tier", "says"), [(Tier.HOST, "this machine has"), (Tier.DISK, "the file system of")])
def test_a_check_refuses_sizes_above_the_machines(short_dir, tier, says):
    daemon = DaemonProcess(short_dir, {tier: 1 << 49})
    ended = check(daemon)
    assert (ended.returncode, ended.stderr) == (2, f"{refused(daemon, status=2)}\n") and says in ended.stderr


async def test_kept_memory_without_room_is_dropped_in_words(short_dir, ending):
    file = short_dir / "kvtierd.toml"
    size = f"disk_bytes = {16 * SLOT_BYTES}\nhost_bytes = "
    file.write_text(f"{size}{4 * SLOT_BYTES}")
    daemon = SupervisedDaemon(short_dir, {}, ["--config", str(file)])
    daemon.start()
    ending.callback(daemon.close)
    async with await patient(daemon.address) as client:
        for name in ("first", "second"):
            await client.open_cache(name, SPEC, budgets=sizes(host=2, disk=8))
    file.write_text(f"{size}{2 * SLOT_BYTES}")
    daemon.upgrade()
    assert "memory of cache second is dropped: no room for its host tier any more" in daemon.log
    assert daemon.stop() == 0


async def test_a_cache_without_memory_is_refused_where_there_is_a_memory_tier(start_fresh):
    daemon, disk_only = start_fresh(host=4, disk=16), start_fresh(disk=16)
    async with await patient(daemon.address) as client:
        await client.open_cache("first", SPEC, budgets=sizes(host=4, disk=4))
        with pytest.raises(TierFull, match=r"^host tier: all .* are given out \(first .*kvtier cache rm NAME"):
            await client.open_cache("second", SPEC)
    async with opened_cache(disk_only.address, "c", wait=PATIENCE_S) as (_, cache):
        for call in (cache.put(chain("c", 1), blocks(chain("c", 1))), cache.acquire(chain("c", 1))):
            with pytest.raises(CallerError, match=r"^cache c has only disk: .*budgets=.Tier.HOST"):
                await call
