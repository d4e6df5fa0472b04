"""Objects in Mooncake Store: memory that other hosts lend to its master. Mooncake cannot list its objects.

``mooncake://master:port/prefix?protocol=tcp&devices=&metadata=P2PHANDSHAKE``: the query is optional and has Mooncake's
words. This module runs in the processes of ``hosted.py``, which Mooncake's library blocks while its master is silent.
So each process has one call at a time, and a cancelled call ends its process.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvtierd.tiers.remote import base
from kvtierd.tiers.remote.process import Hosting
from kvtierd.tiers.remote.urls import mooncake_settings

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_ROOM_BYTES: Final = 32 << 20
HOSTING: Final = Hosting(
    processes=2, calls=1, cancels=False, room_bytes=_ROOM_BYTES, memory_bytes=4 << 30, replaces=False
)
_CONNECT_S: Final = 2.0

_MASTER_GONE: Final = -900
_TOO_LONG: Final = -600
_ABSENT: Final = frozenset({-703, -704, -707})
"""Codes of an object that is incomplete, absent, or was evicted during the read."""
_OF_OBJECT: Final = frozenset({-400, _TOO_LONG})
_ERRORS: Final[Mapping[int, tuple[type[base.RemoteError], str]]] = {
    -200: (base.RemoteFull, "it has no room"),
    -400: (base.RemoteRefused, "it refuses the key"),
    _TOO_LONG: (base.RemoteRefused, "it refuses the object"),
    -800: (base.RemoteUnavailable, "the transfer failed"),
    _MASTER_GONE: (base.RemoteUnavailable, "its master cannot be reached"),
    -901: (base.RemoteUnavailable, "its master does not answer"),
}


class Mooncake:
    """A store of Mooncake's master. Every call blocks. ``room``: memory that the library may use."""

    replaces: Final = HOSTING.replaces

    def __init__(self, store: MooncakeDistributedStore, room: mmap.mmap, shown: str, prefix: str) -> None:
        self._store = store
        self._room = memoryview(room)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        self._shown = shown
        self._prefix = prefix

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        return [count > 0 for count in self._some(self._store.batch_is_exist(self._keys(names)), "exists")]

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        keys, sizes = self._keys(names), [len(view) for view in into]
        found = self._store.batch_get_into(keys, self._places(sizes), sizes)
        codes = [
            self._store.get_size(key) if code == _TOO_LONG else code for key, code in zip(keys, found, strict=True)
        ]
        start = 0
        for code, view in zip(codes, into, strict=True):
            if 0 < code <= len(view):
                view[:code] = self._room[start : start + code]
            start += len(view)
        return self._some(codes, "get")

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        """Reads whole objects: Mooncake gives no part of an object."""
        begins: list[bytes] = []
        for name in names:
            (size,) = await self.get([name], [memoryview(bytearray(nbytes))])
            whole = memoryview(bytearray(min(max(size, 1), _ROOM_BYTES)))
            (size,) = await self.get([name], [whole])
            begins.append(bytes(whole[: min(nbytes, max(size, 0))]))
        return begins

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[base.RemoteError | None]:
        start = 0
        for data in objects:
            self._room[start : start + len(data)] = data
            start += len(data)
        sizes = [len(data) for data in objects]
        some = self._some(self._store.batch_put_from(self._keys(names), self._places(sizes), sizes), "put")
        why = base.RemoteRefused(f"{self._shown}: put: it refuses the object", of_object=True)
        return [why if code == base.FAILED else None for code in some]

    async def delete(self, names: Sequence[str]) -> None:
        self._counts(self._store.batch_remove(self._keys(names), True), "delete")

    def listing(self, prefix: str) -> AsyncIterator[base.Listed]:
        raise base.RemoteRefused(f"{self._shown}: Mooncake does not list its objects")

    async def close(self) -> None:
        """Does nothing: the connection ends with the process."""

    def connect(self, master: str, protocol: str, devices: str, metadata: str) -> None:
        """Connects to the master. Raises RemoteError."""
        host, _, port = master.rpartition(":")
        try:
            # The library would try for minutes. The connection also gives the address of this host for other hosts.
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as tried:
                local = tried.getsockname()[0]
        except OSError:
            code = _MASTER_GONE
        else:
            code = int(self._store.setup(local, metadata, 0, 0, protocol, devices, master))
        self._counts([code or self._store.register_buffer(self._start, len(self._room))], "connect")

    def _keys(self, names: Sequence[str]) -> list[str]:
        return [f"{self._prefix}{name}" for name in names]

    def _places(self, sizes: Sequence[int]) -> list[int]:
        """The addresses of consecutive objects in the room."""
        return [self._start + at for at in accumulate(sizes, initial=0)][: len(sizes)]

    def _counts(self, codes: Sequence[int], verb: str) -> list[int]:
        """Mooncake's counts of bytes or objects. Raises the error of the first error code."""
        for code in codes:
            if code < 0 and code not in _ABSENT:
                error, reason = _ERRORS.get(code, (base.RemoteUnavailable, f"it answered {code}"))
                raise error(f"{self._shown}: {verb}: {reason}", of_object=code in _OF_OBJECT)
        return [max(code, base.ABSENT) for code in codes]

    def _some(self, codes: Sequence[int], verb: str) -> list[int]:
        """Like :meth:`_counts`, but with ``FAILED`` for errors of single objects, unless all objects failed."""
        bad = {code for code in codes if code in _OF_OBJECT}
        if bad and len(bad) == len(set(codes)):
            self._counts(codes, verb)
        return [base.FAILED if code in bad else self._counts([code], verb)[0] for code in codes]


def open_mooncake(url: str) -> base.RemoteStore:
    """Connects to the store of a URL. Raises ImportError, RemoteError."""
    from mooncake.store import MooncakeDistributedStore

    parts = urlsplit(url)
    master, *others = mooncake_settings(parts)
    folder = parts.path.strip("/")
    shown = f"mooncake://{master}/{folder}".rstrip("/")
    store = Mooncake(MooncakeDistributedStore(), mmap.mmap(-1, _ROOM_BYTES), shown, f"{folder}/" if folder else "")
    store.connect(master, *others)
    return store
