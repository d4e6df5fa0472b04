"""Every byte that a get returns is right, every time: whoever evicts, writes, reads or is killed meanwhile.

A block's bytes follow from its key, so whoever gets one can tell. That the test can tell is tested, too: with each of
two faults planted in the daemon, some reader finds wrong bytes.
"""

import asyncio
import random
import time
from pathlib import Path

import pytest

from kvtier import Tier, connect
from kvtier.abi.layout import INDEXES_HERE
from tests.integration.daemon import DaemonProcess
from tests.integration.faulty_daemon import SEEN_BY_READERS
from tests.integration.seeing import cache_stats
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_crash import SEED
from tests.integration.torture import SIZES, Crowd
from tests.integration.torture_blocks import SPEC
from tests.integration.waiting import eventually

PARTS = ("read_in_threads", "read_and_hold", "put", "fill")
COVERED = ("repeats", "blocks", "hits", "calls", "reuses", "verified", "misses", "leases", "puts", "stored")
"""What a run goes on for until it has seen it."""
pytestmark = pytest.mark.skipif(not INDEXES_HERE, reason="no reads without calls on this processor")


@pytest.fixture(autouse=True)
def _say_seed():
    print(f"KVTIER_SEED={SEED}")


def torture(address, kill, seed, *, parts, turns, ends, seconds):
    """Kills the daemon again and again, so many times and for so long at least: whenever every part has had some turns
    since it came back, ``turns`` at most."""
    rng = random.Random(seed)
    restarts, over = 0, time.monotonic() + seconds
    with Crowd(address, parts, rng.randrange(1 << 32)) as crowd:
        while restarts < ends or time.monotonic() < over:
            crowd.await_turns(rng.randint(1, turns))
            kill()
            restarts += 1
        crowd.await_turns(turns)
        crowd.await_all(COVERED)
        return crowd.stop(restarts)


def assert_right(report):
    print(report)
    assert not report.faults
    assert report.sums["wrong"] == 0
    assert all(report.sums[counter] > 0 for counter in COVERED)
    assert report.sums["hits"] > report.sums["blocks"] // 4, "most blocks came by calls"


def settle(address):
    """Nobody holds anything any more, and the daemon has nothing to complain about."""

    async def look():
        async with await connect(address) as client:
            await client.open_cache("c", SPEC)
            await eventually(
                lambda: cache_stats(client, "c"), lambda now: not any(tier.held or tier.orphaned for tier in now.tiers)
            )
            assert (await client.stats()).problems == ()

    asyncio.run(look())


def supervised(home, seed, *, parts, turns, ends, seconds, flags=()):
    """The host tier outlives the daemon. Now and then it is upgraded instead of killed: the supervisor's pauses between
    deaths would grow."""
    rng = random.Random(seed)
    with SupervisedDaemon(home, SIZES, flags) as daemon:

        def kill():
            end = rng.choice((daemon.kill, daemon.kill, daemon.upgrade))
            end()

        report = torture(daemon.address, kill, seed, parts=parts, turns=turns, ends=ends, seconds=seconds)
        assert_right(report)
        assert daemon.log.count("memory adopted cache=c") == report.restarts
        settle(daemon.address)
        pids = (daemon.pid, daemon.supervisor)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(path.exists() for path in daemon.plain.sockets)
    assert "Traceback" not in daemon.log
    return report


def unsupervised(home, seed, *, parts, turns, ends, seconds, flags=()):
    """Memory is lost with the daemon, but for those who have mapped it; what is on disk comes back."""
    daemon = DaemonProcess(home, SIZES, flags)

    with daemon:
        report = torture(daemon.address, daemon.crash, seed, parts=parts, turns=turns, ends=ends, seconds=seconds)
        assert_right(report)
        settle(daemon.address)
    return report


@pytest.mark.parametrize(("variant", "ends"), [(supervised, 2), (unsupervised, 1)])
def test_every_byte_is_right(short_dir, variant, ends):
    variant(short_dir, SEED, parts=PARTS, turns=15, ends=ends, seconds=0)


def find_wrong_bytes(daemon, parts):
    """Until a part has found some."""
    daemon.start()
    try:
        with Crowd(daemon.address, parts, SEED, verifies=False) as crowd:
            crowd.await_all(["wrong"])
            report = crowd.stop(0)
        print(report)
        assert any("words are wrong" in found for found in report.faults), report.faults
    finally:
        daemon.kill()


@pytest.mark.long
def test_a_reader_that_does_not_look_whether_its_slots_are_still_the_same_is_found(short_dir):
    """So the others do go the way that they look in: chains that are read once more."""
    daemon = DaemonProcess(short_dir, {Tier.HOST: SIZES[Tier.HOST]})
    find_wrong_bytes(daemon, ("read_blindly", "read_blindly", "put", "fill"))


@pytest.mark.parametrize("fault", [fault.__name__ for fault in SEEN_BY_READERS])
def test_a_planted_fault_is_found(short_dir, fault):
    daemon = DaemonProcess(short_dir, {Tier.HOST: SIZES[Tier.HOST]})
    daemon.program = ["tests.integration.faulty_daemon", fault]
    find_wrong_bytes(daemon, PARTS)
