"""The daemon's files: modes whatever the umask, links in their place, directories that others may write."""

import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from kvtier import CallerError, Client, Tier, connect
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.starting import tree
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually

KEYS = chain("private", 8)
SIZES = sizes(host=8, disk=32)


def fill(address):
    with Client(address) as client:
        cache = client.open_cache("c", SPEC)
        cache.put(KEYS, blocks(KEYS))
        cache.move(KEYS, Tier.DISK)
        cache.drop(KEYS[-1:])


# -- modes -------------------------------------------------------------------------------------------------------------


class BelowMissing(DaemonProcess):
    """Makes the directory above its runtime directory, too."""

    @property
    def address(self) -> str:
        return str(self.home / "run" / "a")


def modes(*roots):
    return {path: stat.filemode(path.lstat().st_mode) for root in roots for path in (root, *root.rglob("*"))}


def umask_of(pid):
    return next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Umask" in line)


@pytest.mark.parametrize("supervised", [False, True])
async def test_what_a_daemon_makes_is_its_own_whatever_the_umask(short_dir, supervised):
    store = short_dir / "store"
    store.mkdir(0o700)
    flags = ["--remote", f'{{"url": "file://{store}", "write": "through"}}']
    running = SupervisedDaemon(short_dir, SIZES, flags)
    daemon = running.plain = BelowMissing(short_dir, SIZES, ["--supervise", *flags] if supervised else flags)
    daemon.within = ["sh", "-c", 'umask 0; exec "$@"', "sh"]
    with running:
        fill(daemon.address)
        await eventually(lambda: [path for path in store.rglob("*") if path.is_file()], bool)
        assert {umask_of(pid) for pid in (running.pid, running.supervisor)} == {"0077"}
        made = modes(short_dir / "run", daemon.state_dir, daemon.disk_dir, store)
    made |= modes(short_dir / "run", daemon.state_dir, daemon.disk_dir, store)
    for_group = {path: mode for path, mode in made.items() if mode[4:] != "------"}
    assert for_group == {
        short_dir / "run": "drwxr-x---",
        Path(daemon.address): "drwxr-x---",
        **dict.fromkeys(daemon.sockets, "srw-rw----"),
    }


# -- directories of others ---------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(short_dir):
    daemon = DaemonProcess(short_dir, SIZES)
    yield daemon
    daemon.stop()


OTHERS = {
    "run": lambda path: path.chmod(0o770),
    "state": lambda path: path.chmod(0o777),
    "disk": lambda path: os.chown(path, 2001, 2001),
}


async def test_a_directory_that_others_may_write_to_is_told(daemon):
    says = {
        f"others may write to {daemon.home / 'run'}: it has the mode 0770 and belongs to uid 0",
        f"others may write to {daemon.home / 'state'}: it has the mode 0777 and belongs to uid 0",
        f"others may write to {daemon.home / 'disk'}: it has the mode 0700 and belongs to uid 2001",
    }
    daemon.start()
    assert "healthy" in kvtier("status", "--address", daemon.address).stdout
    daemon.stop()
    for name, spoil in OTHERS.items():
        spoil(daemon.home / name)
    daemon.start()
    async with await connect(daemon.address) as client:
        assert set((await client.stats()).problems) == says
        shown = kvtier("status", "--address", daemon.address).stdout
        assert all(line in shown and line in daemon.log for line in says)
        for name in OTHERS:
            os.chown(daemon.home / name, 0, 0)
            (daemon.home / name).chmod(0o750)
        os.kill(daemon.pid, signal.SIGHUP)
        await eventually(client.stats, lambda stats: not stats.problems)


# -- links -------------------------------------------------------------------------------------------------------------


DIRECTORIES = ("run", "state", "disk")


@pytest.fixture
def seed(short_dir):
    """What a daemon has left."""
    daemon = DaemonProcess(short_dir, SIZES)
    daemon.start()
    fill(daemon.address)
    daemon.stop()
    (daemon.disk_dir / "caches/c/index/OPEN").touch()
    for each in DIRECTORIES:
        (short_dir / each).rename(short_dir / f"seed-{each}")
    return daemon


def started_with_a_link(daemon, name):
    """Starts on the seed with a link in place of a file or directory. Returns what the daemon says of links."""
    home, place, behind = daemon.home, daemon.home / name, daemon.home / "behind"
    for each in DIRECTORIES:
        shutil.copytree(home / f"seed-{each}", home / each)
    place.rename(behind)
    place.symlink_to(behind)
    before = tree(behind)
    try:
        daemon.start()
        fill(daemon.address)
        daemon.stop()
    except (AssertionError, CallerError):  # refused, or without the cache
        if daemon.running:
            daemon.kill()
    assert tree(behind) == before, name
    said = [line for line in daemon.log.splitlines() if "symbolic link" in line and str(place.parent) in line]
    daemon.forget_log()
    for each in (*(home / each for each in DIRECTORIES), behind):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    return said


def test_no_file_or_directory_is_opened_through_a_link(seed):
    found = [path for each in DIRECTORIES for path in (seed.home / f"seed-{each}").rglob("*")]
    names = {str(path.relative_to(seed.home)).removeprefix("seed-") for path in found}
    assert {"run/kvtierd.lock", "state/LOCK", "disk/LOCK", "disk/caches/c/index/data.mdb", "state/events"} <= names
    assert not {name for name in sorted(names) if not started_with_a_link(seed, name)}
