"""The process that has a store's library, started with ``MEMORY_BYTES UMASK FD``. ``process.py`` has the protocol.

``FD`` is the memory shared with the daemon.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from kvtierd.tiers.remote.base import Listed, RemoteError, RemoteRefused, RemoteStore, RemoteUnavailable
from kvtierd.tiers.remote.opening import load
from kvtierd.tiers.remote.process import MOST_LINE_BYTES, encoded_error

_PR_SET_PDEATHSIG: Final = 1
_PAGE: Final = 1000
_Verb = Callable[[Sequence[str], Sequence[memoryview]], Awaitable[Any]]
"""Returns the value of a reply, from names and the places of their objects."""


class _Host:
    """Answers requests until the daemon hangs up."""

    def __init__(self, room: memoryview, reader: asyncio.StreamReader, replies: int) -> None:
        self._room: Final = room
        self._reader: Final = reader
        self._replies: Final = replies
        self._store: RemoteStore | None = None
        self._calls: Final[dict[int, asyncio.Task[None]]] = {}
        self._listings: Final[dict[str, AsyncIterator[Listed]]] = {}
        self._verbs: Final[Mapping[str, _Verb]] = {
            "open": self._open,
            "exists": lambda names, places: self._opened.exists(names),
            "get": self._get,
            "begins": self._begins,
            "put": self._put,
            "delete": lambda names, places: self._opened.delete(names),
            "list": self._list,
        }

    async def run(self) -> None:
        while line := await self._reader.readline():
            number, *request = json.loads(line)
            if request:
                self._calls[number] = asyncio.create_task(self._answer(number, *request))
                self._calls[number].add_done_callback(lambda _, number=number: self._calls.pop(number))  # type: ignore[misc]
                await asyncio.sleep(0)  # a task cancelled before its first step would not answer
            elif number in self._calls:
                self._calls[number].cancel()
            else:
                self._listings.pop(str(number), None)

    async def _answer(self, number: int, verb: str, names: Sequence[str], sizes: Sequence[int], at: int) -> None:
        error, value = None, None
        try:
            places = [self._room[start:end] for start, end in pairwise(accumulate(sizes, initial=at))]
            value = await self._verbs[verb](names, places)
        except RemoteError as failed:
            error = encoded_error(failed)
        except asyncio.CancelledError:
            error = encoded_error(RemoteUnavailable(f"{verb}: cancelled"))
        except BaseException as failed:  # noqa: BLE001  an error of the library, also a panic
            error = encoded_error(RemoteUnavailable(f"{verb}: {type(failed).__name__}"))
        reply = json.dumps([number, error, value]).encode() + b"\n"
        while reply:
            reply = reply[os.write(self._replies, reply) :]

    @property
    def _opened(self) -> RemoteStore:
        if self._store is None:
            raise RemoteRefused("the store is not open")
        return self._store

    async def _open(self, names: Sequence[str], places: Sequence[memoryview]) -> None:
        try:
            self._store = load(names[0])
        except (ValueError, ImportError) as wrong:
            raise RemoteRefused(str(wrong)) from None

    async def _get(self, names: Sequence[str], places: Sequence[memoryview]) -> Sequence[int]:
        return await self._opened.get(names, places)

    async def _begins(self, names: Sequence[str], places: Sequence[memoryview]) -> Sequence[int]:
        begins = await self._opened.begins(names, len(places[0]) if places else 0)
        for begin, place in zip(begins, places, strict=True):
            place[: len(begin)] = begin
        return [len(begin) for begin in begins]

    async def _put(self, names: Sequence[str], places: Sequence[memoryview]) -> Sequence[Any]:
        ends = await self._opened.put(names, [bytes(place) for place in places])
        return [None if end is None else encoded_error(end) for end in ends]

    async def _list(self, names: Sequence[str], places: Sequence[memoryview]) -> Sequence[tuple[str, int, float]]:
        """A page of the listing ``number/prefix``; an empty page ends the listing."""
        number, _, prefix = names[0].partition("/")
        listing = self._listings.setdefault(number, self._opened.listing(prefix))
        page: list[tuple[str, int, float]] = []
        async for each in listing:
            page.append((each.name, each.nbytes, each.modified_s))
            if len(page) == _PAGE:
                break
        return page


async def _serve(room: memoryview, requests: int, replies: int) -> None:
    reader = asyncio.StreamReader(limit=MOST_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(requests, "rb", 0))
    await _Host(room, reader, replies).run()


def main(memory_bytes: str, umask: str, fd: str, daemon: str) -> None:
    """Serves until the daemon ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a call of the library may outlive the daemon
    if os.getppid() != int(daemon):  # the daemon ended before this process asked for the signal
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent by the daemon's terminal or service manager
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault("TOKIO_WORKER_THREADS", "4")  # obstore's default is one per core, whose stacks take memory
    os.umask(int(umask, 8))
    requests, replies, nowhere = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # libraries may write to them
        os.dup2(nowhere, stream)
    asyncio.run(_serve(memoryview(mmap.mmap(int(fd), 0)), requests, replies))
    os._exit(0)  # skips the library's shutdown, which may wait for a silent store


if __name__ == "__main__":
    main(*sys.argv[1:])
