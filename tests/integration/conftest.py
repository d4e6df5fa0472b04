"""Daemons for the integration tests: one for a module whose tests share it, or as many as a test asks for."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier import AsyncClient, CacheSpec, Tier, connect
from tests.integration.blocks import sizes
from tests.integration.daemon import DaemonProcess, StartDaemon, StartFor
from tests.integration.models import by_hand
from tests.integration.raw import RawClient, attached


@pytest.fixture
def start_daemon() -> Iterator[StartDaemon]:
    with ExitStack() as stack:

        def start(*flags: str, device: int = 0, host: int = 0, disk: int = 0) -> DaemonProcess:
            return _started(stack, sizes(device=device, host=host, disk=disk), flags)

        yield start


@pytest.fixture
def start_for() -> Iterator[StartFor]:
    with ExitStack() as stack:

        def start(spec: CacheSpec, **slots: int) -> DaemonProcess:
            return _started(stack, {tier: sum(shares) for tier, shares in by_hand(spec, **slots).items()})

        yield start


def _started(stack: ExitStack, sizes: Mapping[Tier, int], flags: Sequence[str] = ()) -> DaemonProcess:
    home = Path(tempfile.mkdtemp(prefix="kv-"))
    stack.callback(shutil.rmtree, home)
    daemon = DaemonProcess(home, sizes, flags)
    daemon.start()
    stack.callback(daemon.stop)
    return daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Shared by the tests of a module, each of which opens caches of its own, with budgets."""
    home = Path(tempfile.mkdtemp(prefix="kv-"))
    try:
        process = DaemonProcess(home, sizes(device=1024, host=2048, disk=4096))
        process.start()
        try:
            yield process
        finally:
            process.stop()
    finally:
        shutil.rmtree(home)


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with await connect(daemon.address) as client:
        yield client


@pytest.fixture
async def raw(daemon: DaemonProcess) -> AsyncIterator[RawClient]:
    async with attached(daemon.address) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The test's own, fit for a cache."""
    node: pytest.Item = request.node
    return re.sub(r"[^A-Za-z0-9._-]", "-", node.name)
