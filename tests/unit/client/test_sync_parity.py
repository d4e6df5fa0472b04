"""The synchronous client has every public name of the asynchronous one, with the same arguments: neither can drift."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvtier import cache, groups, lease, mirror, sync, watch
from kvtier import client as aio
from kvtier.sync.cache import ChainTwin

TWINS: dict[type, type] = {
    aio.AsyncClient: sync.Client,
    cache.Cache: sync.SyncCache,
    groups.AcrossGroups: ChainTwin,
    groups.AcrossLease: sync.SyncAcrossLease,
    lease.WriteLease: sync.SyncWriteLease,
    lease.ReadLease: sync.SyncReadLease,
    watch.Watch: sync.SyncWatch,
    mirror.Mirror: sync.SyncMirror,
}

RENAMED = {
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}

CHAIN_SEAMS = {"reader", "reach", "by_group", "formed", "sources", "begin_get", "end_get"}
SEAMS = {
    cache.Cache: {"open", *CHAIN_SEAMS},  # of its client: the way to call the first is open_cache
    aio.AsyncClient: {"work"},
    groups.AcrossGroups: CHAIN_SEAMS,
    lease.WriteLease: {"binding"},
    mirror.Mirror: {"start"},
    lease.ReadLease: {"binding"},
}
"""Public only because another module of the asynchronous client calls them."""

SPECIAL = {"__aenter__", "__aexit__", "__aiter__", "__anext__", "__len__"}


def public(cls: type) -> list[str]:
    own = {name for each in cls.__mro__ if each is not object for name in [*vars(each), *assigned(each)]}
    return sorted(name for name in own if not name.startswith("_") or name in SPECIAL)


def assigned(cls: type) -> list[str]:
    """Attributes that the constructor sets."""
    code: Any = getattr(vars(cls).get("__init__"), "__code__", None)
    return [name for name in code.co_names if f"self.{name}" in inspect.getsource(cls)] if code else []


def parameters(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults. Not annotations: a lease given to one client's verb is that client's."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


VERBS = [
    pytest.param(one, other, name, id=f"{one.__name__}.{name}")
    for one, other in TWINS.items()
    for name in public(one)
    if name not in SEAMS.get(one, ())
]


def test_there_is_something_to_compare() -> None:
    names = {(one.__name__, name) for one in TWINS for name in public(one)}
    assert {("AsyncClient", "open_cache"), ("Cache", "put"), ("Cache", "name"), ("ReadLease", "matched")} <= names


@pytest.mark.parametrize(("one", "other", "name"), VERBS)
def test_every_public_name_has_its_synchronous_twin(one: type, other: type, name: str) -> None:
    twin = RENAMED.get(name, name)
    assert twin in {*public(other), *dir(other)}, (
        f"kvtier.sync.{other.__name__} lacks {twin}: write it, and its docstring"
    )
    asked, given = inspect.getattr_static(one, name, None), inspect.getattr_static(other, twin, None)
    if not inspect.isfunction(asked):
        assert not inspect.isfunction(given), f"{twin} must be an attribute or a property"
        return
    assert inspect.isfunction(given)
    assert not inspect.iscoroutinefunction(given)
    if twin != "__exit__":
        assert parameters(given) == parameters(asked), f"arguments of kvtier.sync.{other.__name__}.{twin} differ"
    assert given.__doc__ or name.startswith("__"), f"kvtier.sync.{other.__name__}.{twin} says nothing of itself"


def test_the_constructor_takes_what_connect_takes() -> None:
    assert parameters(sync.Client) == parameters(aio.connect)
