"""The clients of sessions: a process behind a unix socket, with a pidfd that shows its end, or a TCP stream."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.abi.attach import VERSION
from kvtier.v1 import session_pb2
from kvtierd.rights import Identity, User

_SO_PEERGROUPS: Final = 59
"""Linux 4.13: supplementary groups of the peer when it connected."""

_SO_PEERPIDFD: Final = 77
"""Linux 6.5: pidfd of the peer, which the kernel takes at connect. A reused pid cannot deceive it."""

_UCRED: Final = struct.Struct("iII")
_GID: Final = struct.Struct("I")
_MAX_GROUPS: Final = 256
"""Limit of the standard library for a socket option. For a peer with more groups only the primary group counts."""
_MAX_COMMAND: Final = 256
HELLO_TIMEOUT_S: Final = 5.0
NO_UID: Final = 2**32 - 1
"""The uid shown for a client that is not a process of this host: the kernel's value for no user."""


class AttachRefused(Exception):
    """The daemon gives the peer no session. ``reason`` is stable and machine readable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


async def hear_hello(first: Awaitable[session_pb2.SessionRequest | None]) -> session_pb2.Hello:
    """The hello of a connection's first message. Raises :class:`AttachRefused`: NO_HELLO, BAD_VERSION."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            request = await first
    except TimeoutError:
        raise AttachRefused("NO_HELLO", f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    if request is None or not request.HasField("hello"):
        raise AttachRefused("NO_HELLO", "the first message must be a hello")
    version = request.hello.version
    if version != VERSION:
        side = "daemon" if version > VERSION else "client"
        says = f"version {version}: this daemon speaks version {VERSION}; upgrade the {side}"
        raise AttachRefused("BAD_VERSION", says)
    return request.hello


@dataclass(slots=True, frozen=True)
class Credentials:
    """Pid and user that the kernel noted when the peer connected."""

    pid: int
    identity: User


@dataclass(slots=True, frozen=True, eq=False)
class PeerProcess:
    """A live process. Owns ``pidfd``, which becomes readable when the process ends."""

    pid: int
    identity: User
    pidfd: int
    command: str

    address: str = ""
    grace_s: None = None
    """An orphaned session lives as long as its process."""
    transport_identity: None = None
    """gRPC over a unix socket proves no identity."""

    @property
    def uid(self) -> int:
        return self.identity.uid

    def is_same(self, other: object) -> bool:
        """Whether the other peer may resume a session of this peer."""
        return isinstance(other, PeerProcess) and (other.pid, other.uid) == (self.pid, self.uid)

    def watch(self, gone: Callable[[], None]) -> None:
        """Calls ``gone`` on the running loop when the process has ended, until :meth:`unwatch`."""
        asyncio.get_running_loop().add_reader(self.pidfd, gone)

    def unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)

    def is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        os.close(self.pidfd)


@dataclass(slots=True, frozen=True, eq=False)
class RemotePeer:
    """A client behind a TCP stream. ``address``: in gRPC's form. ``grace_s``: seconds that its session may stay
    orphaned."""

    identity: Identity
    address: str
    grace_s: float

    pid: int = 0
    uid: int = NO_UID

    @property
    def transport_identity(self) -> Identity:
        """The identity that the transport of each call must prove."""
        return self.identity

    @property
    def command(self) -> str:
        return printable(f"{self.identity} at {self.address}")

    def is_same(self, other: object) -> bool:
        return isinstance(other, RemotePeer) and other.identity == self.identity

    def is_gone(self) -> bool:
        return False

    def watch(self, gone: Callable[[], None]) -> None:
        """Does nothing: a remote client has no process to watch."""

    def unwatch(self) -> None:
        """Does nothing, like :meth:`watch`."""

    def close(self) -> None:
        """Does nothing: the peer holds nothing open."""


SessionPeer = PeerProcess | RemotePeer


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


def identify(sock: socket.socket) -> PeerProcess:
    """The peer as a process. The caller closes it. Raises :class:`AttachRefused`: UNKNOWN_PEER for a process that has
    ended or that its pid namespace hides, TOO_MANY_SESSIONS if no descriptor is left."""
    who = credentials(sock)
    if who.pid == 0:
        raise AttachRefused(
            "UNKNOWN_PEER",
            "the client's process is not visible from the daemon's pid namespace: run the daemon in the host's "
            "(hostPID: true in Kubernetes, --pid=host in Docker and Podman)",
        )
    pidfd = _open_pidfd(sock, who)
    return PeerProcess(who.pid, who.identity, pidfd, command_of(who.pid))


def _open_pidfd(sock: socket.socket, who: Credentials) -> int:
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise _unknown(who, error) from error
        return _open_by_pid(sock, who)
    os.set_inheritable(pidfd, False)
    return pidfd


def _unknown(who: Credentials, error: OSError) -> AttachRefused:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        says = f"the daemon has no file descriptor left for a session, its limit is {most}: {error.strerror}"
        return AttachRefused("TOO_MANY_SESSIONS", says)
    return AttachRefused("UNKNOWN_PEER", f"process {who.pid} is gone: {error.strerror}")


def _open_by_pid(sock: socket.socket, who: Credentials) -> int:
    """A pidfd on older kernels. If the peer's socket is still open afterwards, the pid was not reused before."""
    try:
        pidfd = os.pidfd_open(who.pid)
    except OSError as error:
        raise _unknown(who, error) from error
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    if poll.poll(0):
        os.close(pidfd)
        raise AttachRefused("UNKNOWN_PEER", f"process {who.pid} is gone")
    return pidfd


def command_of(pid: int) -> str:
    """Command line of a process for people, cut; empty if the process has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return printable(raw[:_MAX_COMMAND].rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace"))


def printable(text: str) -> str:
    """A client's text without control characters, fit for a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
