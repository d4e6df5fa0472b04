"""Objects in a bucket (S3-compatible, GCS, Azure), in a directory that hosts share, or in memory.

obstore takes endpoint, region, time limits and credentials from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``)
and from the files and services that the environment names. This runs in the process of ``hosted.py``.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from kvtierd.tiers.remote import base

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig  # names of its type stubs

_T = TypeVar("_T")

_REQUESTS: Final = 64
"""Most requests under way at a time."""
_PAGE: Final = 1000
"""Objects per step of a listing."""
_RETRIES: Final[RetryConfig] = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
"""For single requests that an overloaded store turns away. The caller decides how long to wait for a store."""

_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_OF_STORE: Final = ("401", "407", "429", "503")
"""Status codes that concern the store, not an object."""
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_ERRNO: Final = re.compile(r"\(os error (\d{1,3})\)")
_MEANINGS: Final[Sequence[tuple[re.Pattern[str], type[base.RemoteError]]]] = (
    (re.compile(r"status code: 507\b|QuotaExceeded|StorageFull|os error (28|122)\b"), base.RemoteFull),
    (re.compile(r"status code: (408|429)\b"), base.RemoteUnavailable),
    (re.compile(r"status code: 4|Received redirect|BadScheme|os error (1|2|13|20|21|30|36)\b"), base.RemoteRefused),
)
"""Maps the text of obstore's errors to the contract's; the first match counts."""
_REASONS: Final = (
    ("BadScheme", "its endpoint is http, which AWS_ALLOW_HTTP=true allows"),
    ("Received redirect", "the bucket is in another region"),
    ("kind: Connect", "it cannot be reached"),
    ("Timeout", "it did not answer in time"),
)


class Bucket:
    """A store that obstore can reach. ``root``: of a directory store."""

    replaces: Final = True

    def __init__(self, store: ObjectStore, shown: str, root: Path | None = None) -> None:
        self._store = store
        self._shown = shown
        self._root = root
        self._requests = asyncio.Semaphore(_REQUESTS)

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        found = await self._each([_settled(self._exists(name)) for name in names])
        return [there is True for there in _some(found)]

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        found = await self._each([_settled(self._get(*pair)) for pair in zip(names, into, strict=True)])
        return [_size(size) for size in _some(found)]

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        found = await self._each([_settled(self._begin(name, nbytes)) for name in names])
        refused = [b"" if isinstance(begin, base.RemoteError) and begin.of_object else begin for begin in found]
        return [begin if isinstance(begin, bytes) else b"" for begin in _some(refused)]

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[base.RemoteError | None]:
        ends = await self._each([_settled(self._put(*pair)) for pair in zip(names, objects, strict=True)])
        for end in ends:
            if isinstance(end, base.RemoteFull):
                raise end
        return _some(ends)

    async def delete(self, names: Sequence[str]) -> None:
        for end in await self._each([_settled(self._delete(name)) for name in names]):
            if end is not None:
                raise end

    async def listing(self, prefix: str) -> AsyncIterator[base.Listed]:
        folder = prefix.rpartition("/")[0]  # obstore wants whole parts of a name
        obstacle = cache(self._obstacle)
        async with self._request("list"):
            async for page in obstore.list(self._store, folder or None, chunk_size=_PAGE):
                for meta in page:
                    if meta["path"].startswith(prefix) and obstacle(meta["path"].rpartition("/")[0]) is None:
                        yield base.Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())

    async def close(self) -> None:
        del self._store

    async def _exists(self, name: str) -> bool:
        async with self._request("head", name):
            try:
                await obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
            return True

    async def _get(self, name: str, into: memoryview) -> int:
        async with self._request("get", name):
            try:
                found = await obstore.get_async(self._store, name)
                if found.meta["size"] > len(into):
                    return found.meta["size"]
                body = memoryview(await found.bytes_async())
            except FileNotFoundError:
                return base.ABSENT
        into[: len(body)] = body
        return len(body)

    async def _begin(self, name: str, nbytes: int) -> bytes:
        async with self._request("get", name):
            try:
                return bytes(await obstore.get_range_async(self._store, name, start=0, length=nbytes))
            except FileNotFoundError:
                return b""

    async def _put(self, name: str, data: bytes) -> None:
        async with self._request("put", name):
            await obstore.put_async(self._store, name, data, use_multipart=False)

    async def _delete(self, name: str) -> None:
        async with self._request("delete", name):
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._store, name)

    async def _each(self, calls: Sequence[Coroutine[None, None, _T]]) -> list[_T]:
        """The results of all calls. The first failure cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call) for call in calls]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def _obstacle(self, name: str) -> Path | None:
        """The first part of an object's path in a directory store that is not a directory or a regular file."""
        if self._root is None or not name:
            return None
        path = self._root
        for part in name.split("/"):
            path = path / part
            try:
                mode = path.lstat().st_mode
            except OSError:
                return None  # obstore reports the error
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                return path
        return None

    @asynccontextmanager
    async def _request(self, request: str, name: str = "") -> AsyncIterator[None]:
        """Waits for a free request, and turns obstore's errors into the contract's."""
        if (obstacle := self._obstacle(name)) is not None:  # obstore would follow a link, and wait for a FIFO
            says = f"{self._shown}: {request}: {obstacle} is not a regular file"
            raise base.RemoteRefused(says, of_object=True)
        async with self._requests:
            try:
                yield
            except (BaseError, OSError) as failed:
                error, reason = _meaning(failed)
                status = _STATUS.search(str(failed))
                of_object = status is not None and status[1] not in _OF_STORE
                # Not `from failed`: obstore's errors have whole requests and answers, with credentials.
                raise error(f"{self._shown}: {request}: {reason}", of_object=of_object) from None


async def _settled(call: Coroutine[None, None, _T]) -> _T | base.RemoteError:
    """The result of a call, or the error that it raised."""
    try:
        return await call
    except base.RemoteError as failed:
        return failed


def _size(found: int | base.RemoteError) -> int:
    if isinstance(found, base.RemoteError):
        return base.FAILED if found.of_object else base.UNANSWERED
    return found


def _some(found: Sequence[_T | base.RemoteError]) -> Sequence[_T | base.RemoteError]:
    """The results, some of which may be errors. Raises the first error if all are errors."""
    errors = [error for error in found if isinstance(error, base.RemoteError)]
    if errors and len(errors) == len(found):
        raise errors[0]
    return found


def open_bucket(url: str) -> base.RemoteStore:
    """The bucket or the directory of a URL that ``opening.py`` has checked. Raises ValueError if the environment lacks
    the account or the endpoint."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Bucket(from_url(url), url, Path(unquote(parts.path)))
    if parts.scheme == "memory":
        return Bucket(from_url(url), url)
    _stay_on_hosts(parts.scheme)
    try:
        return Bucket(from_url(url, retry_config=_RETRIES), url)
    except (BaseError, ValueError, OSError):
        raise ValueError("must name a bucket; obstore takes account and endpoint from the environment") from None


_PREFIXES: Final[Mapping[str, str]] = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_HOSTS: Final[Mapping[str, Sequence[str]]] = {
    "AWS": ("amazonaws.com", "amazonaws.com.cn"),
    "GOOGLE": ("googleapis.com", "accounts.google.com"),
    "AZURE": ("core.windows.net", "fabric.microsoft.com", "microsoftonline.com"),
}
_METADATA_HOSTS: Final = (
    *("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23"),
    "metadata.google.internal",
)
"""Hosts that give credentials to a machine or a container."""
_CREDENTIALS: Final = re.compile(
    r"AWS_ACCESS_KEY_ID|GOOGLE_(SERVICE_ACCOUNT|APPLICATION).*|AZURE_.*(_KEY|SECRET|SAS.*)"
)
"""With one of these variables, obstore asks no metadata host."""
_URL: Final = re.compile(r"https?://[^\s\"]+", re.IGNORECASE)


def _stay_on_hosts(scheme: str) -> None:
    """Keeps obstore from following a redirect to a host that neither the provider nor the environment names.

    obstore follows redirects and has no option against them. This function gives obstore a proxy without a listener,
    and names the hosts that obstore reaches without the proxy. If the operator has named a proxy, that proxy decides.
    """
    prefix = _PREFIXES[scheme]
    if any(re.fullmatch(r"(HTTPS?|ALL)_PROXY|\w+_PROXY_URL", name, re.IGNORECASE) for name in os.environ):
        return
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith((prefix, "IDENTITY_", "MSI_", "AZURITE_", "GCE_"))
    }
    named = [urlsplit(url).hostname or "" for value in own.values() for url in _URL.findall(value)]
    named += [value for name, value in own.items() if name.startswith("GCE_METADATA_")]
    metadata = () if any(map(_CREDENTIALS.fullmatch, own)) else _METADATA_HOSTS
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))
    os.environ[f"{prefix}_PROXY_URL"] = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    os.environ[f"{prefix}_PROXY_EXCLUDES"] = ",".join([*_HOSTS[prefix], *metadata, *named])
    nobody.detach()  # stays bound while the process lives, and never listens


def _meaning(failed: BaseError | OSError) -> tuple[type[base.RemoteError], str]:
    """The contract's error for an error of obstore, and its reason without any text of the request."""
    text = str(failed)
    error = next((error for pattern, error in _MEANINGS if pattern.search(text)), base.RemoteUnavailable)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return error, f"it answered {status[1]}" + (f" {code[1]}" if code else "")
    if errno := _ERRNO.search(text):
        return error, os.strerror(int(errno[1]))
    return error, next((reason for sign, reason in _REASONS if sign in text), type(failed).__name__)
