"""Connections to the gRPC sockets for which no session accounts: a few may be open, the oldest gives way.

gRPC does not say who connects. The kernel does: the daemon looks through its own descriptors for sockets of these
addresses, and shuts down those that are too many; gRPC then closes them.
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
"""Connections that a session accounts for: clients have one."""
MAX_STRANGERS: Final = 128
"""Connections without a session, after a look; a quarter of them may be of one uid or TCP host."""
LOOK_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, order=True)
class _Connection:
    """``inode``: rises with the time of the connection."""

    inode: int
    fd: int
    owner: int | str
    identity: int | str


class Connections:
    """Looks every :data:`LOOK_S` seconds, and through all descriptors only where there are many more than before.

    ``path``: of the unix socket. ``port``: of the TCP listener; None = none. ``owners``: how many sessions the
    client of a pid, or of a TCP address as gRPC writes it, has.
    """

    def __init__(self, path: str, port: int | None, owners: Callable[[], Counter[int | str]]) -> None:
        self._path: Final = path
        self._port: Final = port
        self._owners: Final = owners
        self._fewest = len(_descriptors())
        self._crowded = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            closed = await asyncio.to_thread(self._look, self._owners())
            if closed:
                _log.warning("connections without a session are closed count=%d", closed)

    def _look(self, owners: Counter[int | str]) -> int:
        """How many were shut down. It needs no descriptor: the daemon may have none left."""
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
        """What is known of a descriptor; None if it is no accepted connection."""
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
    """gRPC's socket; it stays gRPC's. Raises OSError for another descriptor."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _shut(connection: _Connection) -> bool:
    """False where it is closed already, and its number another's."""
    with suppress(OSError), _borrowed(connection.fd) as sock:
        if os.fstat(connection.fd).st_ino == connection.inode:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _descriptors() -> Collection[int]:
    """Of this process."""
    try:
        return [int(fd) for fd in os.listdir("/proc/self/fd")]
    except OSError:  # none is left to read the directory with: all are taken
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _give_memory_back() -> None:
    """What a crowd has taken stays with malloc otherwise."""
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
