"""Directories: whose they are, who has them, what damage does to a start. What is refused is not touched."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from kvtier import CacheSpec, CallerError, Event, EventType, Heartbeat, Tier, TierFull, connect
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.daemon import DaemonProcess
from tests.integration.starting import environment, refused, tree
from tests.integration.waiting import PATIENCE_S, eventually

SLOTS = {"device": 8, "host": 16, "disk": 128}
EACH = sizes(device=4, host=8, disk=64)
CHAINS = {name: chain(name, 30) for name in ("good", "hurt")}

DIES_ONCE_IT_HAS = """
import os, signal, sys
from kvtierd.service import daemon

directory = getattr(daemon, sys.argv.pop(1))
opens = directory.open

def opens_and_dies(*arguments, **named):
    opens(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)

directory.open = opens_and_dies
from kvtierd.main import main
main()
"""

AT_ONCE_S = 5.0
"""Most that a refusal may take, the start of the interpreter included."""

daemon = own_daemon(**SLOTS)


@pytest.fixture
def never_started(short_dir):
    return DaemonProcess(short_dir, sizes(**SLOTS))


@pytest.fixture
async def filled(client):
    """A client of a daemon with two caches, each with a chain on disk."""
    for name, keys in CHAINS.items():
        cache = await client.open_cache(name, SPEC, budgets=EACH)
        await cache.put(keys, blocks(keys))
        await cache.move(keys, Tier.DISK)
        await cache.close()
    return client


async def assert_whole(client, *names):
    for name in names:
        cache = await client.open_cache(name)
        assert_bytes(CHAINS[name], await cache.get(CHAINS[name]))
        await cache.close()


def cache_dir(daemon, name):
    return daemon.disk_dir / "caches" / name


# -- not ours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["thesis.tex", "caches/photos/1.jpg", "SUPERBLOCK"])
@pytest.mark.parametrize("which", ["disk", "state"])
def test_a_foreign_directory_is_refused_untouched(never_started, path, which):
    directory = never_started.home / which
    (directory / path).parent.mkdir(parents=True)
    (directory / path).write_bytes(b"the only copy")
    before = tree(directory)
    assert f"kvtierd: {directory}: " in refused(never_started)
    assert tree(directory) == before


@pytest.mark.parametrize("which", ["disk", "state", "run"])
def test_a_file_in_place_of_a_directory_is_refused(never_started, which):
    (never_started.home / which).write_text("not a directory")
    assert str(never_started.home / which) in refused(never_started)
    assert (never_started.home / which).read_text() == "not a directory"


# -- damaged -----------------------------------------------------------------------------------------------------------


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)


SUPERBLOCKS = {
    "a flipped bit": lambda path: flip(path, path.stat().st_size // 2),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 10),
    "empty": lambda path: os.truncate(path, 0),
    "of a later version": lambda path: path.write_bytes(re.sub(rb"^(kvtier \w+) \d+ ", rb"\1 9 ", path.read_bytes())),
}


@pytest.mark.parametrize("damage", SUPERBLOCKS.values(), ids=SUPERBLOCKS.keys())
async def test_a_damaged_superblock_is_refused_untouched(daemon, filled, damage):
    """Of the disk, of the state: nothing starts on it, and once it is mended nothing is missing."""
    daemon.stop()
    for owner in (daemon.disk_dir, daemon.state_dir):
        superblock = owner / "SUPERBLOCK"
        good, times = superblock.read_bytes(), superblock.stat()
        damage(superblock)
        disk = tree(daemon.disk_dir)
        said = refused(daemon)
        assert said.startswith(f"kvtierd: {owner}: ")
        assert "SUPERBLOCK" in said or "format version 9" in said
        assert tree(daemon.disk_dir) == disk
        superblock.write_bytes(good)
        os.utime(superblock, ns=(times.st_atime_ns, times.st_mtime_ns))
    daemon.start()
    await assert_whole(filled, "good", "hurt")
    assert (await filled.stats()).epoch == 1, "a refused start is no unclean stop"


@pytest.mark.parametrize("which", ["state", "disk"])
async def test_a_refusal_of_a_superblock_says_how_to_start_without_it_and_no_block_is_lost(daemon, filled, which):
    last = (await filled.stats()).last_event_id
    daemon.stop()
    superblock = daemon.home / which / "SUPERBLOCK"
    flip(superblock, superblock.stat().st_size // 2)
    said = refused(daemon)
    assert "rename it to SUPERBLOCK.damaged (" in said and "is lost" in said
    superblock.rename(superblock.with_name("SUPERBLOCK.damaged"))
    daemon.start()
    await assert_whole(filled, "good", "hurt")
    assert (await filled.stats()).last_event_id > last, "no id is given out again"
    daemon.restart()
    await assert_whole(filled, "good", "hurt")


@pytest.mark.parametrize("damage", SUPERBLOCKS.values(), ids=SUPERBLOCKS.keys())
async def test_damaged_budgets_are_set_aside_and_the_daemon_serves(daemon, filled, damage):
    daemon.stop()
    budgets = daemon.state_dir / "caches" / "SUPERBLOCK"
    damage(budgets)
    damaged = budgets.read_bytes()
    daemon.forget_log()
    daemon.start()
    assert daemon.log.count("level=warning") == daemon.log.count("the budgets of caches are set aside") == 1
    assert budgets.with_name("SUPERBLOCK.damaged").read_bytes() == damaged
    await assert_whole(filled, "good", "hurt")
    daemon.forget_log()
    daemon.restart()
    assert "the budgets of caches are set aside" not in daemon.log
    await assert_whole(filled, "good", "hurt")


NEEDED = {
    *("disk/LOCK", "state/LOCK", "run/kvtierd.lock"),
    *("disk/SUPERBLOCK", "state/SUPERBLOCK", "state/SUPERBLOCK.new"),
}


async def test_a_fifo_in_the_place_of_any_file_hangs_no_start(daemon, filled):
    """The daemon serves without that file, or names it and ends."""
    daemon.kill()
    files = [path for path in sorted(daemon.home.rglob("*")) if path.is_file() and "good" not in path.parts]
    assert len(files) > 10
    needed = set()
    for file in files:
        if file.exists():
            said = await asyncio.to_thread(started_with_a_fifo, daemon, file)
            named = str(file.parent) in said and f"{file.name} is not a regular file" in said
            assert named or not said, said
            needed |= {str(file.relative_to(daemon.home))} if said else set()
    assert needed == NEEDED
    daemon.start()
    await assert_whole(filled, "good", "hurt")


def started_with_a_fifo(daemon, file):
    """Why the daemon does not start with a FIFO in the place of ``file``; empty where it serves."""
    aside = file.with_name("aside")
    file.rename(aside)
    os.mkfifo(file)
    process = subprocess.Popen(daemon.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout and select.select([process.stdout], [], [], PATIENCE_S)[0], f"{file}: it hangs"
            serves = process.stdout.readline().startswith("kvtierd ready")
        finally:
            process.kill()
        said = [line for line in process.communicate()[1].splitlines() if line.startswith("kvtierd: ")]
    aside.replace(file)
    return "" if serves else "\n".join(said) or "nothing"


INDEXES = {
    "missing": lambda path: path.unlink(),
    "cut short": lambda path: os.truncate(path, 8192),
    "all zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "garbage behind its head": lambda path: path.write_bytes(
        path.read_bytes()[:8192] + os.urandom(path.stat().st_size - 8192)
    ),
}


async def assert_left_out(client, why):
    """That the cache is named and not served, and that the other one is."""
    await assert_whole(client, "good")
    (problem,) = (await client.stats()).problems
    assert problem.startswith("cache hurt is left out: ") and why in problem
    assert [cache.name for cache in await client.caches()] == ["good"]
    with pytest.raises(CallerError, match="cache hurt is left out") as refused:
        await client.open_cache("hurt", SPEC)
    assert refused.value.reason == "DAMAGED_CACHE"
    cleared = {event.cache async for event in past_events(client) if event.type is EventType.CLEARED}
    assert "hurt" in cleared, "who knew its blocks is told that they cannot be had"


async def past_events(client):
    last = (await client.stats()).last_event_id
    async with client.watch(oldest=True, heartbeats=True, heartbeat_s=0.02) as watch:
        async for item in watch:
            if isinstance(item, Event):
                yield item
            elif isinstance(item, Heartbeat) and item.cursor.id >= last:
                return


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *(
            pytest.param("SUPERBLOCK", damage, id=f"superblock {what}")
            for what, damage in SUPERBLOCKS.items()
            if what != "of a later version"  # which is set aside
        ),
        *(pytest.param("index/data.mdb", damage, id=f"index {what}") for what, damage in INDEXES.items()),
    ],
)
async def test_a_damaged_cache_is_left_out_and_back_once_it_is_mended(daemon, filled, file, damage):
    daemon.stop()
    directory = cache_dir(daemon, "hurt")
    damaged = directory / file
    good = damaged.read_bytes()
    damage(damaged)
    hurt = tree(directory)
    daemon.start()
    await assert_left_out(filled, str(damaged.parent))
    daemon.stop()
    left = tree(directory)
    assert left.get(file) == hurt.get(file)
    assert left == hurt or file != "SUPERBLOCK", "of the rest, only an index is opened at all"
    damaged.write_bytes(good)
    daemon.start()
    await assert_whole(filled, "good", "hurt")


async def test_a_cache_without_its_slab_is_left_out_and_can_be_removed(daemon, filled):
    daemon.stop()
    slab = cache_dir(daemon, "hurt") / "group-0.slab"
    slab.rename(daemon.home / "slab")
    daemon.start()
    await assert_left_out(filled, "group-0.slab is missing")
    with pytest.raises(CallerError, match="only force removes it"):
        await filled.remove_cache("hurt")
    await filled.remove_cache("hurt", force=True, dry_run=True)
    assert cache_dir(daemon, "hurt").exists()
    await filled.remove_cache("hurt", force=True)
    assert not cache_dir(daemon, "hurt").exists()
    assert (await filled.stats()).problems == ()
    again = await filled.open_cache("hurt", SPEC, budgets=EACH)
    assert (await again.match(CHAINS["hurt"])).blocks == 0


# -- somebody else's just now ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["state", "disk", "run"])
async def test_a_second_daemon_is_refused_at_once(daemon, filled, short_dir, shared):
    """It says which process has the directory; the one that has it does not notice."""
    second = DaemonProcess(short_dir, sizes(**SLOTS))
    flag = {"state": "--state-dir", "disk": "--disk-dir", "run": "--runtime-dir"}[shared]
    taken = daemon.home / shared
    with daemon.paused():  # so that whatever changes there is the other's doing
        before = tree(taken) if shared != "run" else None
        began = time.monotonic()
        said = refused(second, flag, taken)
        assert time.monotonic() - began < AT_ONCE_S
        assert said == f"kvtierd: {taken}: in use by process {daemon.pid}"
        assert before is None or tree(taken) == before
        assert all(path.is_socket() for path in daemon.sockets)
    await assert_whole(filled, "good", "hurt")
    # What it had taken of its own before it was refused is free again.
    second.start()
    second.stop()


def started(daemon):
    return subprocess.Popen(daemon.command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


async def test_many_starts_at_once_leave_one_daemon(never_started):
    processes = [started(never_started) for _ in range(4)]

    async def running():
        return [process for process in processes if process.poll() is None]

    try:
        (winner,) = await eventually(running, lambda left: len(left) == 1)
        async with await connect(never_started.address, wait=AT_ONCE_S) as client:
            assert (await client.stats()).pid == winner.pid
        winner.terminate()
        for process in processes:
            said = process.communicate(timeout=PATIENCE_S)[1].decode()
            assert process.returncode == (0 if process is winner else 1), said
            assert process is winner or f"in use by process {winner.pid}" in said
    finally:
        for process in processes:
            process.kill()


async def test_what_a_crash_leaves_is_no_hindrance(daemon, filled):
    """Sockets nobody listens on, and lock files that name a process which is alive and has nothing to do with it."""
    daemon.kill()
    assert all(path.is_socket() for path in daemon.sockets)
    locks = [*daemon.home.glob("*/LOCK"), *daemon.home.glob("run/*.lock")]
    assert len(locks) == 3
    for lock in locks:
        lock.write_text(f"{os.getpid()}\n")
    daemon.start()
    await assert_whole(filled, "good", "hurt")


@pytest.mark.parametrize("directory", ["StateDir", "RuntimeDir", "DiskRoot", "EventLog"])
async def test_a_first_start_that_is_killed_is_no_hindrance(never_started, directory):
    """With the disk tier where it is by default: in the directory of the state."""
    never_started.flags = ["--disk-dir", str(never_started.state_dir / "disk")]
    command = [sys.executable, "-c", DIES_ONCE_IT_HAS, directory, *never_started.command()[3:]]
    killed = await asyncio.to_thread(subprocess.run, command, env=environment(), capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    never_started.start()
    async with await connect(never_started.address) as client:
        assert (await client.stats()).epoch == 1, "no life had begun"
    never_started.stop()


# -- too small ---------------------------------------------------------------------------------------------------------


async def test_a_disk_without_the_room_is_refused_before_anything_is_made(short_dir):
    """As much as the file system has in all, and more than leaves its floor free."""
    spec = CacheSpec.single("huge blocks", "uint8", 1, layers=1024, kv_heads=1, head_size=1 << 15)
    status = os.statvfs(short_dir)
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    with DaemonProcess(short_dir, {Tier.DISK: whole}) as daemon:
        async with await connect(daemon.address) as client:
            for asked in (whole, free - (64 << 20)):
                with pytest.raises(TierFull) as error:
                    await client.open_cache("huge", spec, budgets={Tier.DISK: asked})
                assert "stay free" in str(error.value)
            assert await client.caches() == []
            assert list((daemon.disk_dir / "caches").iterdir()) == []
            # A modest one fits, and takes what it asked for.
            cache = await client.open_cache("modest", SPEC, budgets={Tier.DISK: 16 * SLOT_BYTES})
            assert cache.slots(Tier.DISK) == 16
