"""Objects in Mooncake Store: memory that other hosts lend to its master. It cannot list.

``mooncake://master:port/prefix?protocol=tcp&devices=&metadata=P2PHANDSHAKE``: the query is optional and has Mooncake's
words. Two processes call its library, so two calls are under way at a time. A call that is cancelled ends its process.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kvtierd.tiers.remote.base import (
    ABSENT,
    FAILED,
    Listed,
    RemoteError,
    RemoteFull,
    RemoteRefused,
    RemoteStore,
    RemoteUnavailable,
)

_PROCESSES: Final = 2
_ROOM_BYTES: Final = 32 << 20
"""Of each process for the objects of a request."""
_SETTINGS: Final[Mapping[str, str]] = {"protocol": "tcp", "devices": "", "metadata": "P2PHANDSHAKE"}
_PORT: Final = 50051

MASTER_GONE: Final = -900
TOO_LONG: Final = -600
_ABSENT: Final = frozenset({-703, -704, -707})
"""Not written to its end, not there, evicted while it was read."""
_OF_OBJECT: Final = frozenset({-400, TOO_LONG})
_ERRORS: Final[Mapping[int, tuple[type[RemoteError], str]]] = {
    -200: (RemoteFull, "it has no room"),
    -400: (RemoteRefused, "it refuses the key"),
    TOO_LONG: (RemoteRefused, "it refuses the object"),
    -800: (RemoteUnavailable, "the transfer failed"),
    MASTER_GONE: (RemoteUnavailable, "its master cannot be reached"),
    -901: (RemoteUnavailable, "its master does not answer"),
}


class Mooncake:
    """A store that Mooncake's master knows. ``arguments``: of its processes, without the memory they share."""

    replaces: Final = False

    def __init__(self, shown: str, prefix: str, arguments: Sequence[str]) -> None:
        self._shown = shown
        self._prefix = prefix
        self._arguments = arguments
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(_PROCESSES)

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        async with self._worker() as worker:
            codes = await worker.call("exists", self._keys(names), [0] * len(names))
        return [count > 0 for count in self._some(codes, "exists")]

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        found: list[int] = []
        for part in self._parts(into, "get"):
            sizes = [len(view) for view in into[part]]
            async with self._worker() as worker:
                codes = await worker.call("get", self._keys(names[part]), sizes)
                start = 0
                for code, view in zip(codes, into[part], strict=True):
                    if 0 < code <= len(view):
                        view[:code] = worker.room[start : start + code]
                    start += len(view)
            found += self._some(codes, "get")
        return found

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        """Reads whole objects: Mooncake gives no part of an object."""
        sizes = await self.get(names, [memoryview(bytearray(nbytes)) for _ in names])
        buffers = [memoryview(bytearray(max(size, 1))) for size in sizes]
        lengths = await self.get(names, buffers)
        return [bytes(view[: min(nbytes, max(n, 0))]) for view, n in zip(buffers, lengths, strict=True)]

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        refused: list[RemoteError | None] = []
        for part in self._parts(objects, "put"):
            async with self._worker() as worker:
                start = 0
                for data in objects[part]:
                    worker.room[start : start + len(data)] = data
                    start += len(data)
                codes = await worker.call("put", self._keys(names[part]), [len(data) for data in objects[part]])
            some = self._some(codes, "put")
            why = RemoteRefused(f"{self._shown}: put: it refuses the object", of_object=True)
            refused += [why if code == FAILED else None for code in some]
        return refused

    async def delete(self, names: Sequence[str]) -> None:
        async with self._worker() as worker:
            codes = await worker.call("delete", self._keys(names), [0] * len(names))
        self._counts(codes, "delete")

    def listing(self, prefix: str) -> AsyncIterator[Listed]:
        raise RemoteRefused(f"{self._shown}: Mooncake does not list its objects")

    async def close(self) -> None:
        for worker in self._idle:
            await worker.end()

    def _keys(self, names: Sequence[str]) -> list[str]:
        return [f"{self._prefix}{name}" for name in names]

    def _parts(self, buffers: Sequence[bytes | memoryview], verb: str) -> Iterator[slice]:
        """Runs of buffers that fit into a process's room together."""
        first = nbytes = 0
        for i, buffer in enumerate(buffers):
            if len(buffer) > _ROOM_BYTES:
                reason = f"an object has {len(buffer)} bytes; it must have at most {_ROOM_BYTES}"
                raise RemoteRefused(f"{self._shown}: {verb}: {reason}")
            if nbytes + len(buffer) > _ROOM_BYTES:
                yield slice(first, i)
                first, nbytes = i, 0
            nbytes += len(buffer)
        yield slice(first, len(buffers))

    def _counts(self, codes: Sequence[int], verb: str) -> list[int]:
        """The numbers of bytes or objects that Mooncake answered; raises what the first code means that is none."""
        for code in codes:
            if code < 0 and code not in _ABSENT:
                error, reason = _ERRORS.get(code, (RemoteUnavailable, f"it answered {code}"))
                raise error(f"{self._shown}: {verb}: {reason}", of_object=code in _OF_OBJECT)
        return [max(code, ABSENT) for code in codes]

    def _some(self, codes: Sequence[int], verb: str) -> list[int]:
        """The same; ``FAILED`` where an error is of one object among others."""
        bad = {code for code in codes if code in _OF_OBJECT}
        if bad and len(bad) == len(set(codes)):
            self._counts(codes, verb)
        return [FAILED if code in bad else self._counts([code], verb)[0] for code in codes]

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[_Worker]:
        """A process for one call. It ends if the call does not, as a later reply would be taken for another call's."""
        async with self._free:
            worker = self._idle.pop() if self._idle else None
            try:
                if worker is None:
                    worker = await _Worker.start(self._arguments)
                    self._counts(await worker.reply(), "connect")
                yield worker
            except BaseException:
                if worker is not None:
                    await worker.end()
                raise
            self._idle.append(worker)


@dataclass(slots=True, frozen=True)
class _Worker:
    """A process that calls Mooncake, and the memory it shares with it."""

    process: Process
    room: memoryview

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> _Worker:
        fd = os.memfd_create("kvtier-mooncake")
        try:
            os.ftruncate(fd, _ROOM_BYTES)
            room = memoryview(mmap.mmap(fd, _ROOM_BYTES))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", f"{__name__}_process", *arguments, str(fd)),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(fd,),
            )
        except OSError as failed:
            raise RemoteUnavailable(f"a process for Mooncake did not start: {failed.strerror}") from None
        finally:
            os.close(fd)
        return cls(process, room)

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def call(self, verb: str, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """Mooncake's code for each key."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, keys, sizes]).encode() + b"\n")
        return await self.reply()

    async def reply(self) -> list[int]:
        assert self.process.stdout is not None
        if line := await self.process.stdout.readline():
            codes: list[int] = json.loads(line)
            return codes
        raise RemoteUnavailable("the process for Mooncake has ended")


def open_mooncake(url: str) -> RemoteStore:
    """The store of a URL without credentials.

    Raises:
        ModuleNotFoundError: Mooncake is not installed.
        ValueError: the URL names no master, or a setting that is none. The message says what it must be.
    """
    if find_spec("mooncake") is None:
        raise ModuleNotFoundError("No module named 'mooncake'")
    parts = urlsplit(url)
    settings = dict(parse_qsl(parts.query))
    if not parts.hostname or not settings.keys() <= _SETTINGS.keys():
        raise ValueError(f"must be mooncake://host:port/prefix, with any of {', '.join(_SETTINGS)} in its query")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    master, folder = f"{host}:{parts.port or _PORT}", parts.path.strip("/")
    arguments = (master, *({**_SETTINGS, **settings}.values()))
    return Mooncake(f"mooncake://{master}/{folder}".rstrip("/"), f"{folder}/" if folder else "", arguments)
