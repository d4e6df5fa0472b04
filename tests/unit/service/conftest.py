"""A daemon inside the test's loop and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtierd.service.daemon import Daemon
from tests.unit.service.rig import Client, attached, config, running


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[Daemon]:
    async with running(config(short_dir, device=8, host=16)) as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with attached(daemon) as client:
        yield client
