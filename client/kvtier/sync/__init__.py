"""The client for programs without an event loop: the verbs, names, arguments and errors of the asynchronous client.

:class:`Client` runs an asynchronous client on an event loop in its own thread. Threads may share its objects. A call
that is interrupted (Ctrl-C) is cancelled and leaves nothing held. A forked child cannot use the client.

A name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.sync.cache import (
        SyncAcrossGroups,
        SyncAcrossLease,
        SyncCache,
        SyncLeases,
        SyncReadLease,
        SyncWriteLease,
    )
    from kvtier.sync.client import Client, SyncMirror, SyncWatch

__all__ = [
    "Client",
    "SyncAcrossGroups",
    "SyncAcrossLease",
    "SyncCache",
    "SyncLeases",
    "SyncMirror",
    "SyncReadLease",
    "SyncWatch",
    "SyncWriteLease",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = vars(import_module("kvtier.sync.cache")) | vars(import_module("kvtier.sync.client"))
    globals().update({each: found[each] for each in __all__})
    return found[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
