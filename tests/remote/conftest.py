"""One store of each engine; the servers run once for all tests."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from kvtier import CacheOptions
from kvtierd.tiers.remote.base import RemoteStore
from kvtierd.tiers.remote.opening import open_store
from tests.integration.blocks import SPEC
from tests.integration.conftest import name, pool, start_daemon, start_fresh
from tests.integration.waiting import patient
from tests.remote.servers import Server, mooncake, seaweed
from tests.remote.shared import ROOMY

__all__ = ["name", "pool", "start_daemon", "start_fresh"]


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[Server]:
    with seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_server() -> Iterator[Server]:
    with mooncake() as server:
        yield server


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(f"file://{tmp_path_factory.mktemp('store')}", [], {})


@pytest.fixture(scope="session")
def memory() -> Server:
    return Server("memory:///", [], {})


ENGINES = ["directory", "seaweed_server", "mooncake_server"]
"""Whose objects several processes see. A new engine is a line here."""


def _url(request: pytest.FixtureRequest) -> Iterator[str]:
    server: Server = request.getfixturevalue(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in server.env.items():
            patch.setenv(variable, value)
        yield server.url


url = pytest.fixture(scope="module", params=[*ENGINES, "memory"])(_url)
shared_url = pytest.fixture(scope="module", params=ENGINES)(_url)


@pytest.fixture
async def store(url: str) -> AsyncIterator[RemoteStore]:
    opened = open_store(url)
    yield opened
    await opened.close()


@pytest.fixture
def start(start_daemon, start_fresh, shared_url):
    """``fresh``: it has counted and measured nothing yet."""

    def start(fresh=False, **table):
        flag = json.dumps({"url": shared_url, "write": "through", **table})
        return (start_fresh if fresh else start_daemon)("--remote", flag, host=64, disk=128)

    return start


@pytest.fixture
def opened(name):
    @contextlib.asynccontextmanager
    async def opened(daemon, budgets=ROOMY, spec=SPEC, **options):
        async with await patient(daemon.address) as client:
            yield client, await client.open_cache(name, spec, budgets=budgets, options=CacheOptions(**options))

    return opened
