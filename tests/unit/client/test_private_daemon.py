"""A daemon of one's own leaves nothing behind, whether it starts or not."""

import os
from pathlib import Path

import pytest

from kvtier.errors import DaemonUnavailable
from kvtier.replay.private import PrivateDaemon, TierSlots
from kvtier.replay.trace import replay_spec
from kvtier.types import Tier

SPEC = replay_spec(4096)


@pytest.fixture
def temporary(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private daemons make their directories during the test."""
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    return short_dir


def test_sizes_are_whole_records() -> None:
    sizes = TierSlots(device=3, host=0, disk=5).as_bytes(replay_spec(4096 + 256))
    assert sizes == {Tier.DEVICE: 3 * 8192, Tier.HOST: 0, Tier.DISK: 5 * 8192}


async def test_it_is_gone_after_its_block_also_after_an_exception(temporary: Path) -> None:
    pids = []
    with pytest.raises(ZeroDivisionError):
        async with PrivateDaemon(TierSlots(2, 2, 0).as_bytes(SPEC)) as daemon:
            assert sorted(os.listdir(daemon.address)) == ["attach.sock", "kvtierd.lock", "kvtierd.sock"]
            pids.append(daemon.pid)
            raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert os.listdir(temporary) == []


async def test_one_that_does_not_start_says_why(temporary: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="no tier is configured"):
        async with PrivateDaemon(TierSlots(0, 0, 0).as_bytes(SPEC)):
            pass
    assert os.listdir(temporary) == []
