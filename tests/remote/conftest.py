"""One store of each engine; the servers run once for all tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtierd.tiers.remote.base import RemoteStore
from kvtierd.tiers.remote.opening import open_store
from tests.remote.servers import Server, mooncake, seaweed


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[Server]:
    with seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_server() -> Iterator[Server]:
    with mooncake() as server:
        yield server


@pytest.fixture(params=["directory", "memory", "s3", "mooncake"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new engine is a line here."""
    match request.param:
        case "directory":
            return f"file://{tmp_path}"
        case "memory":
            return "memory:///"
        case "s3":
            server: Server = request.getfixturevalue("seaweed_server")
        case _:
            server = request.getfixturevalue("mooncake_server")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[RemoteStore]:
    opened = open_store(url)
    yield opened
    await opened.close()
