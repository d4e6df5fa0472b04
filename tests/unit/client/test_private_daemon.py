"""A daemon of one's own leaves nothing behind, whether it starts or not."""

import os
from pathlib import Path

import pytest

from kvtier.errors import DaemonUnavailable
from kvtier.replay.private import PrivateDaemon
from kvtier.types import Tier

SIZES = {Tier.DEVICE: 8192, Tier.HOST: 8192}


@pytest.fixture
def temporary(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private daemons make their directories during the test."""
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    return short_dir


async def test_it_is_gone_after_its_block_also_after_an_exception(temporary: Path) -> None:
    pids = []
    with pytest.raises(ZeroDivisionError):
        async with PrivateDaemon(SIZES) as daemon:
            assert sorted(os.listdir(daemon.address)) == ["attach.sock", "kvtierd.lock", "kvtierd.sock"]
            pids.append(daemon.pid)
            raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert os.listdir(temporary) == []


async def test_one_that_does_not_start_says_why(temporary: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="no tier is configured"):
        async with PrivateDaemon({}):
            pass
    assert os.listdir(temporary) == []
