"""Daemons for the integration tests: one for a module whose tests share it, or as many as a test asks for."""

import re
from contextlib import ExitStack
from functools import partial

import pytest

from tests.integration.blocks import SPEC, sizes
from tests.integration.models import by_hand
from tests.integration.pool import DaemonPool
from tests.integration.raw import attached
from tests.integration.waiting import patient
from tests.tls import Authority


@pytest.fixture(scope="session")
def pool():
    pool = DaemonPool()
    yield pool
    pool.close()


@pytest.fixture
def start_daemon(pool):
    """Lends daemons that other tests may have used before."""
    with ExitStack() as stack:
        yield partial(_lend, pool, stack, False)


@pytest.fixture
def start_fresh(pool):
    """Starts daemons that have served nobody before: their event ids, directories, logs and counters begin anew."""
    with ExitStack() as stack:
        yield partial(_lend, pool, stack, True)


def _lend(pool, stack, fresh, *flags, device=0, host=0, disk=0):
    daemon = pool.take(sizes(device=device, host=host, disk=disk), flags, fresh=fresh)
    stack.callback(pool.give_back, daemon)
    return daemon


def own_daemon(*flags, fresh=False, **slots):
    """Makes the fixture ``daemon`` of a module whose tests share none."""

    @pytest.fixture
    def daemon(pool):
        with ExitStack() as stack:
            yield _lend(pool, stack, fresh, *flags, **slots)

    return daemon


@pytest.fixture
def start_for(pool):
    with ExitStack() as stack:

        def start(spec, **slots):
            daemon = pool.take({tier: sum(shares) for tier, shares in by_hand(spec, **slots).items()})
            stack.callback(pool.give_back, daemon)
            return daemon

        yield start


@pytest.fixture(scope="module")
def daemon(pool):
    """Shared by the tests of a module, each of which opens caches of its own, with budgets."""
    daemon = pool.take(sizes(device=1024, host=2048, disk=4096))
    yield daemon
    pool.give_back(daemon)


@pytest.fixture
async def client(daemon):
    async with await patient(daemon.address) as client:
        yield client


other = client


def own_cache(**slots):
    """Makes the fixture ``cache`` of a module: a cache of the test's own."""

    @pytest.fixture
    async def cache(client, name):
        return await client.open_cache(name, SPEC, budgets=sizes(**slots))

    return cache


cache = own_cache(device=8, host=16, disk=32)


@pytest.fixture
def at(daemon):
    """The daemon, in a command."""
    return ("--address", daemon.address)


@pytest.fixture
async def raw(daemon):
    async with attached(daemon.address) as client:
        yield client


@pytest.fixture
def name(request):
    """The test's own, fit for a cache."""
    node: pytest.Item = request.node
    return re.sub(r"[^A-Za-z0-9._-]", "-", node.name)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def ending():
    """Ends what a test has started, however the test ends."""
    with ExitStack() as stack:
        yield stack
