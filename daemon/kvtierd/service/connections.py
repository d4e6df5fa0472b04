"""Limits connections to the gRPC sockets without a session: a few may be open, the oldest gives way.

gRPC does not identify its peers, so the daemon looks through its own descriptors for sockets of these addresses, asks
the kernel, and shuts down surplus sockets; gRPC then closes them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from kvtierd.service.peer import credentials

OF_SESSION: Final = 4
"""Connections that a session accounts for; a client usually has a single connection."""
MAX_STRANGERS: Final = 128
"""Most connections without a session after a look; a uid or TCP host may have a quarter of them."""
LOOK_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, order=True)
class _Connection:
    """An accepted connection. ``inode``: rises with the time of the connection."""

    inode: int
    fd: int
    owner: int | str
    identity: int | str


class Connections:
    """Looks every :data:`LOOK_S` seconds; through all descriptors only if there are many more than before.

    ``path``: of the unix socket. ``port``: of the TCP listener; None = no listener. ``owners``: returns the number of
    sessions by pid, or by TCP address in gRPC's form.
    """

    def __init__(self, path: str, port: int | None, owners: Callable[[], Counter[int | str]]) -> None:
        self._path: Final = path
        self._port: Final = port
        self._owners: Final = owners
        self._fewest = len(_descriptors())
        self._crowded = False

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            closed = await asyncio.to_thread(self._look, self._owners())
            if closed:
                _log.warning("connections without a session are closed count=%d", closed)

    def _look(self, owners: Counter[int | str]) -> int:
        """Returns how many connections were shut down. Needs no descriptor: the daemon may have none left."""
        descriptors = _descriptors()
        self._fewest = min(self._fewest, len(descriptors))
        if len(descriptors) < self._fewest + MAX_STRANGERS // 4:
            if self._crowded:
                _give_memory_back()
            self._crowded = False
            return 0
        closed = sum(map(_shut, self._surplus(descriptors, owners)))
        self._fewest, self._crowded = len(descriptors) - closed, self._crowded or closed > 0
        return closed

    def _surplus(self, descriptors: Collection[int], owners: Counter[int | str]) -> Iterator[_Connection]:
        left = Counter({owner: OF_SESSION * sessions for owner, sessions in owners.items()})
        strangers: list[_Connection] = []
        for connection in sorted(filter(None, (self._connection(fd) for fd in descriptors))):
            if left[connection.owner]:
                left[connection.owner] -= 1
            else:
                strangers.append(connection)
        kept: Counter[int | str] = Counter()
        for stranger in reversed(strangers):
            if kept.total() >= MAX_STRANGERS or kept[stranger.identity] >= MAX_STRANGERS // 4:
                yield stranger
            else:
                kept[stranger.identity] += 1

    def _connection(self, fd: int) -> _Connection | None:
        """The connection of a descriptor; None if it is not an accepted connection."""
        with suppress(OSError), _borrowed(fd) as sock:
            inode = os.fstat(sock.fileno()).st_ino
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            if sock.family == socket.AF_UNIX and sock.getsockname() == self._path:
                who = credentials(sock)
                return _Connection(inode, fd, who.pid, who.identity.uid)
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self._port:
                host, port = sock.getpeername()[:2]
                address = f"ipv4:{host}:{port}" if sock.family == socket.AF_INET else f"ipv6:[{host}]:{port}"
                return _Connection(inode, fd, address, host)
        return None


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Wraps gRPC's socket without owning it. Raises OSError for a descriptor that is not a socket."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _shut(connection: _Connection) -> bool:
    """Shuts a connection down. Returns False if it is closed already and its number reused."""
    with suppress(OSError), _borrowed(connection.fd) as sock:
        if os.fstat(connection.fd).st_ino == connection.inode:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _descriptors() -> Collection[int]:
    try:
        return [int(fd) for fd in os.listdir("/proc/self/fd")]
    except OSError:  # no descriptor is left to read the directory, so all are taken
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _give_memory_back() -> None:
    """Returns freed memory to the kernel, which malloc would keep after a crowd of connections."""
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
