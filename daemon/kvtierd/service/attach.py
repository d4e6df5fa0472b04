"""The attach server: it identifies a client, hands out cache memory and takes calls. The protocol is that of
``kvtier.abi.attach`` and ``kvtier.abi.calls``.

Each connection is a task. The server closes the connection of a client that sends an unknown message, after an error
reply, and of a client that does not read its replies. Other connections go on.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Coroutine
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import grpc

from kvtier.abi import attach
from kvtier.abi.calls import is_call
from kvtierd.rights import Right
from kvtierd.service.calls import Access, Dispatcher
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused
from kvtierd.service.local import LocalCalls, Packets
from kvtierd.service.peer import AttachRefused, credentials, identify
from kvtierd.service.sessions import GOODBYE, Capacity, ClientSession, SessionRegistry, this_task

HELLO_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 128
_ACCEPT_PAUSE_S: Final = 0.1
STRANGERS: Final = 8
"""Most connections of a uid that no rule names: enough for its clients to receive the refusal."""
_TAKEN_S: Final = 5.0
"""Seconds that a client has to read earlier answers before a map."""
_FIRST_LOOK_S: Final = 0.001
_LAST_LOOK_S: Final = 1.0
"""The kernel does not say when a peer reads: the daemon looks, at first often, then rarely."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class DaemonIdentity:
    """The daemon's numbers in a welcome."""

    epoch: int
    boot: int
    pid: int
    history: int


@dataclass(slots=True, eq=False)
class AttachServer:
    """Serves a ``SOCK_SEQPACKET`` socket. ``_capacity``: of connections, including connections before their hello."""

    _sessions: SessionRegistry
    _catalog: Catalog
    _identity: DaemonIdentity
    _access: Access
    _dispatcher: Dispatcher
    _capacity: Capacity
    _connections: dict[asyncio.Task[None], int] = field(default_factory=dict, init=False)
    """The uid of each connection's peer, kept until the peer has read its last answers."""
    problem: str | None = field(default=None, init=False)
    """Why the last map failed, for health."""
    _listener: socket.socket | None = field(default=None, init=False)
    _accepting: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self, listener: socket.socket) -> None:
        """``listener``: bound and non-blocking; the server owns it."""
        listener.listen(_BACKLOG)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="attach-accept")

    async def stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:  # not in the task, which never runs if it is cancelled before its first step
            self._listener.close()

    async def hang_up(self) -> None:
        """Ends all connections. Their sessions are orphaned, unless the registry is closed."""
        while self._connections:  # a connection with unread answers leaves a second task
            for connection in self._connections:
                connection.cancel()
            await asyncio.wait(self._connections)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                self._begin(sock)
            except OSError as error:  # usually no descriptor is left; open connections go on
                _log.error("cannot accept an attach connection error=%r", str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    def _begin(self, sock: socket.socket) -> None:
        who, most = credentials(sock), self._capacity
        of_uid = sum(uid == who.identity.uid for uid in self._connections.values())
        most_of_uid = most.of_identity if self._access.admits(who.identity) else STRANGERS
        if len(self._connections) >= most.sessions or of_uid >= most_of_uid:
            _log.warning("attach connection dropped why='too many' pid=%d uid=%d", who.pid, who.identity.uid)
            sock.close()
            return
        self._count(self._serve(sock), who.identity.uid)

    def _count(self, serving: Coroutine[Any, Any, None], uid: int) -> None:
        connection = asyncio.create_task(serving, name="attach-connection")
        self._connections[connection] = uid
        connection.add_done_callback(self._connections.pop)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            with closing(Packets(sock)) as packets:
                await self._converse(sock, packets)
        except (AttachRefused, attach.AttachProtocolError) as error:
            # A client that reconnects after a restart names its old session first.
            level = logging.INFO if error.reason == "UNKNOWN_SESSION" else logging.WARNING
            _log.log(
                level, "attach refused pid=%d reason=%s why=%r", credentials(sock).pid, error.reason, error.message
            )
            with suppress(OSError):  # the connection is closed anyway
                _send(sock, attach.Failure(error.reason, error.message))
        except OSError as error:
            _log.info("attach connection broke error=%r", str(error))
        except Exception:  # noqa: BLE001  other connections go on
            _log.exception("attach connection failed inside the daemon")
        finally:
            if _unread(sock):
                self._count(_end(sock), credentials(sock).identity.uid)
            else:
                sock.close()

    async def _converse(self, sock: socket.socket, packets: Packets) -> None:
        hello = await _hear_hello(packets)
        session = self._admit(sock, hello)
        daemon, local = self._identity, LocalCalls(sock, session, self._dispatcher)
        try:
            resumed = hello.token is not None
            _send(sock, attach.Welcome(session.token, session.id, resumed, **asdict(daemon)))
            while packet := await packets.next():
                if is_call(packet):
                    await local.take(packet)
                    continue
                request = attach.decode_request(packet)
                if isinstance(request, attach.Bye):
                    self._sessions.end(session, GOODBYE)
                    return
                if isinstance(request, attach.Forget):
                    self._sessions.give_up(request.token, session)
                    continue
                await self._map(sock, session, request)
        finally:
            self._sessions.connection_lost(session, this_task())
            await local.end()

    def _admit(self, sock: socket.socket, hello: attach.Hello) -> ClientSession:
        """The session of a hello. Raises :class:`AttachRefused`."""
        user = credentials(sock).identity
        if not self._access.admits(user):
            raise AttachRefused("PERMISSION_DENIED", f"no [[allow]] rule of the daemon names {user}")
        peer = identify(sock)
        if hello.token is None:
            return self._sessions.begin(peer, this_task())
        with closing(peer):
            return self._sessions.resume(hello.token, peer, this_task())

    async def _map(self, sock: socket.socket, session: ClientSession, request: attach.Request) -> None:
        if not isinstance(request, attach.Map):
            raise attach.AttachProtocolError("UNKNOWN_OP", "this connection has said hello already")
        # Linux counts unread descriptors against the daemon's user, and at the limit refuses them for all clients.
        try:
            async with asyncio.timeout(_TAKEN_S):
                await _taken(sock)
        except TimeoutError:
            raise ConnectionAbortedError("the client does not read its answers") from None
        try:
            cache = self._catalog.opened(session, request.cache_id)
            self._access.require_on(session, Right.WRITE if request.write else Right.READ, cache.name)
        except CallRefused as refusal:
            denied = refusal.code is grpc.StatusCode.PERMISSION_DENIED
            _send(sock, attach.Failure(refusal.code.name if denied else refusal.detail.reason, refusal.message))
            return
        self._sessions.gets_memory(session, write=request.write)
        shared = cache.runtime.arena.shared(write=request.write)
        try:
            _send(sock, attach.MapReply(tuple(shared.fds), shared.cuda, shared.unmapped), list(shared.fds.values()))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.problem = "memory cannot be mapped: too many descriptors sent by the daemon's user are not read yet"
            _log.warning("%s", self.problem)
            _send(sock, attach.Failure("TOO_MANY_DESCRIPTORS", self.problem))
        else:
            self.problem = None


async def _hear_hello(packets: Packets) -> attach.Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            packet = await packets.next()
    except TimeoutError:
        raise AttachRefused("NO_HELLO", f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    hello = attach.decode_request(packet) if packet else None
    if not isinstance(hello, attach.Hello):
        raise AttachRefused("NO_HELLO", "the first message must be a hello")
    return hello


async def _taken(sock: socket.socket) -> None:
    """Returns when the peer has read every message, or never will."""
    look_s = _FIRST_LOOK_S
    while _unread(sock):
        await asyncio.sleep(look_s)
        look_s = min(2 * look_s, _LAST_LOOK_S)


def _unread(sock: socket.socket) -> int:
    """Bytes of memory that the peer's unread messages take."""
    (nbytes,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(nbytes)


async def _end(sock: socket.socket) -> None:
    """Hangs up, and closes the socket when the last answers are read: until then their descriptors are in flight, and
    the connection counts."""
    with closing(sock), suppress(OSError):  # the peer may hang up at any time
        sock.shutdown(socket.SHUT_RDWR)
        await _taken(sock)


def _send(sock: socket.socket, message: attach.Reply, fds: list[int] | None = None) -> None:
    """Sends a reply without waiting: the socket of a client that reads each reply always has room."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([attach.encode(message)], ancillary)
    except BlockingIOError as error:
        raise ConnectionAbortedError("the client does not read its answers") from error
