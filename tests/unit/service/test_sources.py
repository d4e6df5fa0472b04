"""Which of a store and some peers an object comes from."""

from collections.abc import Sequence
from typing import cast

import pytest

from kvtierd.service.remote.sources import HOLE_S, UNREADABLE_S, Known, Source, Sources
from kvtierd.tiers.remote.base import ABSENT, FAILED, UNANSWERED, RemoteRefused, RemoteStore, RemoteUnavailable
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


class _Sick:
    """A store that answers so, by name."""

    def __init__(self, **answers: int) -> None:
        self._answers = answers

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        return [True for _ in names]

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        found = [self._answers[name] for name in names]
        if all(size in (FAILED, UNANSWERED) for size in found):
            raise RemoteRefused("sick", of_object=FAILED in found)
        return found


@pytest.mark.parametrize(
    ("asked", "for_s"),
    [
        ({"a": FAILED, "b": SIZE}, UNREADABLE_S),
        ({"a": ABSENT, "b": SIZE}, HOLE_S),
        ({"a": FAILED}, HOLE_S),  # the whole store may be at fault
        ({"a": UNANSWERED, "b": SIZE}, 0.0),
        ({"a": UNANSWERED}, 0.0),
    ],
)
async def test_an_object_that_did_not_come_is_not_asked_for_again_soon(asked: dict[str, int], for_s: float) -> None:
    now = 0.0
    known = Known(lambda: now)
    source = Source("store", Guarded(cast("RemoteStore", _Sick(**asked)), 5.0))
    sources = Sources(source, known, [])
    found = await sources.get(list(asked), [memoryview(bytearray(SIZE)) for _ in asked])
    assert found[0].nbytes == ABSENT
    assert sources.knows_holes() == (for_s > 0)
    if for_s:
        now = for_s * 0.99
        assert await sources.exists(["a"]) == [False]
        assert sources.known.of("a") is False
    now = for_s * 1.01
    assert await sources.exists(["a"]) == [True]
    assert sources.known.of("a") is not False and not sources.knows_holes()
