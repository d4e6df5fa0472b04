"""URLs of stores: checked, and shown without their secrets. Imports no library of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

DIRECTORY: Final = "must be file:// and the absolute path of a directory that is there"
_SETTINGS: Final[Mapping[str, str]] = {"protocol": "tcp", "devices": "", "metadata": "P2PHANDSHAKE"}
_PORT: Final = 50051


def shown(url: str) -> str:
    """The URL without credentials and query."""
    scheme, mark, rest = url.partition("?")[0].rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def check(url: str) -> str:
    """Checks a URL without any access to the store. Returns it. Raises ValueError, which names the limit."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("must be a URL") from None
    if parts.scheme not in _CHECKS:
        raise ValueError(f"must begin with one of {', '.join(f'{name}://' for name in _CHECKS)}")
    if "@" in (parts.netloc if parts.scheme == "file" else url):
        raise ValueError("must not have credentials; the engine takes them from its environment")
    if parts.query and parts.scheme != "mooncake":
        raise ValueError("must not have a query")
    _CHECKS[parts.scheme](parts)
    return url


def _require_bucket(parts: SplitResult) -> None:
    if not parts.netloc:
        raise ValueError("must name a bucket")


def _require_path(parts: SplitResult) -> None:
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError(DIRECTORY)


def mooncake_settings(parts: SplitResult) -> tuple[str, ...]:
    """Master, protocol, devices and metadata of a URL. Raises ValueError, which names the limit."""
    given = dict(parse_qsl(parts.query))
    if not parts.hostname or not given.keys() <= _SETTINGS.keys():
        raise ValueError(f"must be mooncake://host:port/prefix, with any of {', '.join(_SETTINGS)} in its query")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or _PORT}", *{**_SETTINGS, **given}.values()


_CHECKS: Final[Mapping[str, Callable[[SplitResult], object]]] = {
    **dict.fromkeys(("s3", "gs", "az"), _require_bucket),
    **dict.fromkeys(("file", "memory"), _require_path),
    "mooncake": mooncake_settings,
}
"""The check of each URL scheme."""
