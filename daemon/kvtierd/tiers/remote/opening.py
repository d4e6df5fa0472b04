"""Opens the store that a URL names. An engine's libraries are imported with its first store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.remote.base import RemoteStore

FIELD: Final = "remote.url"
"""The key of the configuration that has the URL."""


def open_store(url: str) -> RemoteStore:
    """The store at ``url``: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, ``file:///directory`` or ``mooncake://…``.

    Raises:
        TierConfigError: the URL is wrong or has credentials in it, or the engine is not installed.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise TierConfigError(FIELD, "", "must be a URL") from None
    # Whatever a URL may have in it that is secret stands before the host or after the path.
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in _ENGINES:
        raise TierConfigError(FIELD, shown, f"must begin with one of {', '.join(f'{name}://' for name in _ENGINES)}")
    if "@" in parts.netloc:
        raise TierConfigError(FIELD, shown, "must not have credentials; the engine takes them from its environment")
    if parts.query and parts.scheme != "mooncake":
        raise TierConfigError(FIELD, shown, "must not have a query")
    extra, opened = _ENGINES[parts.scheme]
    try:
        return opened(url)
    except ModuleNotFoundError as missing:
        raise TierConfigError(FIELD, shown, f"needs pip install 'kvtier[{extra}]' ({missing})") from missing
    except ValueError as wrong:
        raise TierConfigError(FIELD, shown, str(wrong)) from None


def _bucket(url: str) -> RemoteStore:
    from kvtierd.tiers.remote.bucket import open_bucket

    return open_bucket(url)


def _mooncake(url: str) -> RemoteStore:
    from kvtierd.tiers.remote.mooncake import open_mooncake

    return open_mooncake(url)


_ENGINES: Final[Mapping[str, tuple[str, Callable[[str], RemoteStore]]]] = {
    "s3": ("remote", _bucket),
    "gs": ("remote", _bucket),
    "az": ("remote", _bucket),
    "file": ("remote", _bucket),
    "memory": ("remote", _bucket),
    "mooncake": ("mooncake", _mooncake),
}
"""By the URL's scheme: the extra that installs the engine, and the engine."""
