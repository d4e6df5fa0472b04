"""One store of each engine; the servers run once for all tests."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvtierd.tiers.remote.base import RemoteStore
from kvtierd.tiers.remote.opening import open_store
from tests.integration.conftest import name, pool, start_daemon, start_fresh
from tests.remote.servers import Server, mooncake, seaweed

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
