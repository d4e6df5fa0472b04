"""Which of a store and some peers an object comes from."""

from __future__ import annotations

from typing import cast

import pytest

from kvtierd.service.remote.known import Known
from kvtierd.service.remote.sources import Source, Sources
from kvtierd.tiers.remote.base import ABSENT, RemoteStore, RemoteUnavailable
from kvtierd.tiers.remote.breaker import Guarded
from kvtierd.tiers.remote.opening import open_store

SIZE = 64


class _Away:
    """A store that does not answer."""

    async def exists(self, *asked):
        raise RemoteUnavailable("away")

    get = exists


def _source(name: str, seconds_a_byte: float = 0.0) -> Source:
    source = Source(name, Guarded(open_store("memory:///"), 5.0))
    source.seconds_a_byte = seconds_a_byte
    return source


async def _put(source: Source, *names: str) -> None:
    await source.store.put(names, [f"{source.name} has {name}".encode().ljust(SIZE) for name in names])


async def _get(sources: Sources, *names: str) -> list[str]:
    into = [memoryview(bytearray(SIZE)) for _ in names]
    found = await sources.get(names, into)
    return [
        bytes(view[: one.nbytes]).decode().strip() if one.nbytes > 0 else ""
        for one, view in zip(found, into, strict=True)
    ]


@pytest.mark.parametrize(("peer_s", "store_s", "gives"), [(1e-9, 1e-6, "peer"), (1e-6, 1e-9, "store")])
async def test_an_object_comes_from_the_quicker_one(peer_s: float, store_s: float, gives: str) -> None:
    store, peer = _source("store", store_s), _source("peer", peer_s)
    for each in (store, peer):
        await _put(each, "a")
    sources = Sources(store, Known(lambda: 0.0), [peer])
    assert await _get(sources, "a") == [f"{gives} has a"]


async def test_each_object_comes_from_who_has_it() -> None:
    store, peer = _source("store"), _source("peer")
    await _put(store, "a")
    await _put(peer, "b")
    sources = Sources(store, Known(lambda: 0.0), [peer])
    assert await sources.exists(["a", "b", "c"]) == [True, True, False]
    assert await _get(sources, "a", "b", "c") == ["store has a", "peer has b", ""]


async def test_a_peer_that_is_away_is_passed_over() -> None:
    store, away = _source("store"), Source("away", Guarded(cast("RemoteStore", _Away()), 5.0))
    await _put(store, "a")
    sources = Sources(store, Known(lambda: 0.0), [away])
    assert await sources.exists(["a"]) == [True]
    assert await _get(sources, "a") == ["store has a"]


async def test_without_a_store_peers_are_all_there_is() -> None:
    peer = _source("peer")
    await _put(peer, "a")
    sources = Sources(None, Known(lambda: 0.0), [peer])
    assert await sources.exists(["a", "b"]) == [True, False]
    found = await sources.get(["b"], [memoryview(bytearray(SIZE))])
    assert found[0].nbytes == ABSENT


async def test_a_store_that_fails_has_not_said_that_an_object_is_absent() -> None:
    known = Known(lambda: 0.0)
    sources = Sources(Source("away", Guarded(cast("RemoteStore", _Away()), 5.0)), known, [])
    assert await _get(sources, "a") == [""]
    assert known.of("a") is None
    store = _source("store")
    assert await _get(Sources(store, known, []), "a") == [""]
    assert known.of("a") is False
