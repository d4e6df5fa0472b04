"""A scripted daemon, and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kvtier
from tests.unit.client.fake_daemon import FakeDaemon


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[FakeDaemon]:
    async with FakeDaemon(short_dir) as fake:
        yield fake


@pytest.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[kvtier.AsyncClient]:
    async with await kvtier.connect(daemon.address, timeout=5.0) as connected:
        yield connected
