"""Opens the store of a URL in a process of its own, which imports the store's library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.remote import mooncake
from kvtierd.tiers.remote.base import RemoteError, RemoteStore
from kvtierd.tiers.remote.process import Hosting, ProcessStore
from kvtierd.tiers.remote.urls import DIRECTORY, check, shown

FIELD: Final = "remote.url"
_PRIVATE: Final = "077"
_OF_GROUP: Final = "007"


def open_store(url: str, *, group_access: bool = False) -> ProcessStore:
    """The store at ``url``: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, ``file:///directory`` or ``mooncake://…``.

    Args:
        group_access: Whether the group of a directory gets the objects, too.

    Raises:
        TierConfigError: The URL is wrong or has credentials in it, or the engine is not installed.
    """
    try:
        parts = urlsplit(check(url))
        if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
            raise ValueError(DIRECTORY)
        engine = _ENGINES[parts.scheme]
        if find_spec(engine.module) is None:
            raise ValueError(f"needs pip install '.[{engine.extra}]' in a clone of kvtier (no module {engine.module})")
    except ValueError as wrong:
        raise TierConfigError(FIELD, shown(url), str(wrong)) from None
    umask = _OF_GROUP if group_access else _PRIVATE
    return ProcessStore(shown(url), engine.hosting, url, umask)


async def require_opens(store: ProcessStore) -> None:
    """Opens a store, if that needs no network. Raises TierConfigError."""
    if not store.url.startswith("mooncake:"):
        try:
            await store.open()
        except RemoteError as error:
            raise TierConfigError(FIELD, store.url, str(error)) from error


def load(url: str) -> RemoteStore:
    """The store itself, for the process that has its library. Raises ValueError, ImportError, RemoteError."""
    return _ENGINES[urlsplit(url).scheme].load(url)


@dataclass(slots=True, frozen=True)
class _Engine:
    """The library of a URL scheme. ``extra``: the extra of kvtier that installs ``module``."""

    extra: str
    module: str
    load: Callable[[str], RemoteStore]
    hosting: Hosting


def _bucket(url: str) -> RemoteStore:
    from kvtierd.tiers.remote.bucket import open_bucket

    return open_bucket(url)


_OBSTORE: Final = Hosting(
    processes=1, calls=64, cancels=True, room_bytes=256 << 20, memory_bytes=1 << 30, replaces=True
)
_ENGINES: Final[Mapping[str, _Engine]] = {
    **dict.fromkeys(("s3", "gs", "az", "file", "memory"), _Engine("remote", "obstore", _bucket, _OBSTORE)),
    "mooncake": _Engine("mooncake", "mooncake", mooncake.open_mooncake, mooncake.HOSTING),
}
"""The engine of each URL scheme."""
