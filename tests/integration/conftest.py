"""Daemons for the integration tests: one for a module whose tests share it, or as many as a test asks for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from kvtier import AsyncClient, CacheSpec, connect
from tests.integration.blocks import sizes
from tests.integration.daemon import DaemonProcess, StartDaemon, StartFor
from tests.integration.models import by_hand
from tests.integration.pool import DaemonPool
from tests.integration.raw import RawClient, attached


@pytest.fixture(scope="session")
def pool() -> Iterator[DaemonPool]:
    pool = DaemonPool()
    yield pool
    pool.close()


@pytest.fixture
def start_daemon(pool: DaemonPool) -> Iterator[StartDaemon]:
    """Lends daemons that other tests may have used before."""
    with ExitStack() as stack:
        yield partial(_lend, pool, stack, False)


@pytest.fixture
def start_fresh(pool: DaemonPool) -> Iterator[StartDaemon]:
    """Starts daemons that have served nobody before: their event ids, directories, logs and counters begin anew."""
    with ExitStack() as stack:
        yield partial(_lend, pool, stack, True)


def _lend(
    pool: DaemonPool, stack: ExitStack, fresh: bool, *flags: str, device: int = 0, host: int = 0, disk: int = 0
) -> DaemonProcess:
    daemon = pool.take(sizes(device=device, host=host, disk=disk), flags, fresh=fresh)
    stack.callback(pool.give_back, daemon)
    return daemon


@pytest.fixture
def start_for(pool: DaemonPool) -> Iterator[StartFor]:
    with ExitStack() as stack:

        def start(spec: CacheSpec, **slots: int) -> DaemonProcess:
            daemon = pool.take({tier: sum(shares) for tier, shares in by_hand(spec, **slots).items()})
            stack.callback(pool.give_back, daemon)
            return daemon

        yield start


@pytest.fixture(scope="module")
def daemon(pool: DaemonPool) -> Iterator[DaemonProcess]:
    """Shared by the tests of a module, each of which opens caches of its own, with budgets."""
    daemon = pool.take(sizes(device=1024, host=2048, disk=4096))
    yield daemon
    pool.give_back(daemon)


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
