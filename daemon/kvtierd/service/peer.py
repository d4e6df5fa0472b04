"""Who is at the other end of a unix socket, and a handle that tells when that process is gone."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtierd.rights import User

_SO_PEERGROUPS: Final = 59
"""Linux 4.13: the peer's supplementary groups, as the kernel noted them when it connected."""

_SO_PEERPIDFD: Final = 77
"""Linux 6.5: the peer's pidfd, taken by the kernel at connect, so that its pid cannot have been reused meanwhile."""

_UCRED: Final = struct.Struct("iII")
_GID: Final = struct.Struct("I")
_MAX_GROUPS: Final = 256
"""As many as the standard library reads of a socket option. Of a peer with more only the primary one counts."""
_MAX_COMMAND: Final = 256


class UnknownPeer(Exception):
    """The process at the other end cannot be identified: gone already, or in a pid namespace that hides it."""

    reason = "UNKNOWN_PEER"
    """What the peer is told, machine readable."""


class NoDescriptorLeft(UnknownPeer):
    """The daemon has none for a pidfd: the peer is as alive as before, and may come again."""

    reason = "TOO_MANY_SESSIONS"

    def __init__(self, error: OSError) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().__init__(f"the daemon has no file descriptor left for a session, its limit is {most}: {error.strerror}")


@dataclass(slots=True, frozen=True)
class Credentials:
    """As the kernel noted them when the peer connected."""

    pid: int
    identity: User


@dataclass(slots=True, frozen=True, eq=False)
class Peer:
    """A live process. Owns ``pidfd``, which is readable once the process has ended.

    Implements :class:`kvtierd.service.sessions.SessionPeer`.
    """

    pid: int
    identity: User
    pidfd: int
    command: str

    grace_s: None = None
    """A detached session of it lives as long as the process does."""
    transport_identity: None = None
    """gRPC over a unix socket cannot tell who calls."""

    @property
    def uid(self) -> int:
        return self.identity.uid

    def is_same(self, other: object) -> bool:
        return isinstance(other, Peer) and (other.pid, other.uid) == (self.pid, self.uid)

    def watch(self, gone: Callable[[], None]) -> None:
        """Calls ``gone`` on the running loop once the process has ended, until :meth:`unwatch`."""
        asyncio.get_running_loop().add_reader(self.pidfd, gone)

    def unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)

    def is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        os.close(self.pidfd)


def credentials(sock: socket.socket) -> Credentials:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, User(uid, frozenset({gid, *_groups(sock)})))


def _groups(sock: socket.socket) -> list[int]:
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * _GID.size)
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.ENOPROTOOPT):
            raise
        return []
    return [gid for (gid,) in _GID.iter_unpack(packed)]


def identify(sock: socket.socket) -> Peer:
    """The peer as a process. The caller closes it. Raises :class:`UnknownPeer`."""
    who = credentials(sock)
    if who.pid == 0:
        raise UnknownPeer("the client's process is not visible from the daemon's pid namespace")
    pidfd = _open_pidfd(sock, who)
    return Peer(who.pid, who.identity, pidfd, command_of(who.pid))


def _open_pidfd(sock: socket.socket, who: Credentials) -> int:
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise _unknown(who, error) from error
        return _open_by_pid(sock, who)
    os.set_inheritable(pidfd, False)
    return pidfd


def _unknown(who: Credentials, error: OSError) -> UnknownPeer:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return NoDescriptorLeft(error)
    return UnknownPeer(f"process {who.pid} is gone: {error.strerror}")


def _open_by_pid(sock: socket.socket, who: Credentials) -> int:
    """For older kernels. A peer that still holds its end open after the pidfd was made had its pid when it was made."""
    try:
        pidfd = os.pidfd_open(who.pid)
    except OSError as error:
        raise _unknown(who, error) from error
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    if poll.poll(0):
        os.close(pidfd)
        raise UnknownPeer(f"process {who.pid} is gone")
    return pidfd


def command_of(pid: int) -> str:
    """For people; empty for a process that is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""  # it is only shown to people
    return raw[:_MAX_COMMAND].rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
