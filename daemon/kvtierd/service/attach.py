"""The attach server: it identifies a client, hands out cache memory and takes calls.

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
from google.protobuf.message import DecodeError

from kvtier.abi import attach
from kvtier.v1 import session_pb2
from kvtierd.rights import Right
from kvtierd.service.calls import Access, Dispatcher
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused
from kvtierd.service.peer import AttachRefused, credentials, hear_hello, identify
from kvtierd.service.sessions import GOODBYE, Capacity, ClientSession, SessionRegistry, this_task

TURN: Final = 16
"""Packets of a connection after which its reader waits for its turn."""
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

    def welcome(self, session: ClientSession, *, resumed: bool, **times_ns: int) -> session_pb2.Welcome:
        numbers = asdict(self) | times_ns
        return session_pb2.Welcome(token=session.token, session_id=session.id, resumed=resumed, **numbers)


async def _next(sock: socket.socket) -> session_pb2.SessionRequest | None:
    """The next message; None at the end. The kernel closes descriptors that the peer sends. Raises
    :class:`AttachRefused` (BAD_MESSAGE, TOO_LONG), OSError."""
    packet = await asyncio.get_running_loop().sock_recv(sock, attach.MAX_MESSAGE + 1)
    if len(packet) > attach.MAX_MESSAGE:
        raise AttachRefused("TOO_LONG", f"a message has at most {attach.MAX_MESSAGE} bytes")
    try:
        return session_pb2.SessionRequest.FromString(packet) if packet else None
    except DecodeError:
        raise AttachRefused("BAD_MESSAGE", f"{len(packet)} bytes that are no SessionRequest") from None


class LocalCalls:
    """The calls of a connection. While an answer waits for its reader, no call is taken or begun: a client that reads
    no answer fills its own socket, but not its user's number of open calls."""

    def __init__(self, sock: socket.socket, session: ClientSession, dispatcher: Dispatcher) -> None:
        self._sock: Final = sock
        self._session: Final = session
        self._dispatcher: Final = dispatcher
        self._open: Final[dict[int, asyncio.Task[None]]] = {}
        self._writing: Final = asyncio.Lock()
        self._taken = 0

    async def take(self, call: session_pb2.UnaryCall) -> None:
        """Begins a call. Raises :class:`AttachRefused`. Waiting packets are received in one turn of the loop: a call
        that was given up while the daemon was stopped does not begin."""
        await self._turn()
        if self._taken % TURN == 0:
            await asyncio.sleep(0)  # calls taken before go first
            await self._dispatcher.turns.begin(self._session)
        if call.number in self._open:
            raise AttachRefused("BAD_MESSAGE", f"call {call.number} is open already")
        task = asyncio.create_task(self._serve(call))
        self._open[call.number] = task
        task.add_done_callback(lambda _: self._open.pop(call.number))

    async def give_up(self, number: int) -> None:
        await self._turn()
        if number in self._open:
            self._open[number].cancel()

    async def end(self) -> None:
        """Cancels all calls, since the connection is over."""
        while self._open:
            for task in self._open.values():
                task.cancel()
            await asyncio.wait(self._open.values())

    async def _turn(self) -> None:
        async with self._writing:  # no other answer waits
            self._taken += 1

    async def _serve(self, call: session_pb2.UnaryCall) -> None:
        await self._dispatcher.turns.begin(self._session)
        async with self._writing:
            pass
        await self._dispatcher.local(self._session, call, self._answer)

    async def _answer(self, answer: session_pb2.CallAnswer) -> None:
        packet = session_pb2.SessionReply(answer=answer).SerializeToString()
        if len(packet) > attach.MAX_MESSAGE:
            answer = session_pb2.CallAnswer(number=answer.number, too_long=True)
            packet = session_pb2.SessionReply(answer=answer).SerializeToString()
        with suppress(OSError):  # the peer has hung up; the reader of the connection notices it, too
            async with self._writing:
                await asyncio.get_running_loop().sock_sendall(self._sock, packet)


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
            await self._converse(sock)
        except AttachRefused as error:
            # A client that reconnects after a restart names its old session first.
            level = logging.INFO if error.reason == "UNKNOWN_SESSION" else logging.WARNING
            _log.log(
                level, "attach refused pid=%d reason=%s why=%r", credentials(sock).pid, error.reason, error.message
            )
            with suppress(OSError):  # the connection is closed anyway
                _fail(sock, error.reason, error.message)
        except OSError as error:
            _log.info("attach connection broke error=%r", str(error))
        except Exception:  # noqa: BLE001  other connections go on
            _log.exception("attach connection failed inside the daemon")
        finally:
            if _unread(sock):
                self._count(_end(sock), credentials(sock).identity.uid)
            else:
                sock.close()

    async def _converse(self, sock: socket.socket) -> None:
        token = (await hear_hello(_next(sock))).token
        session = self._admit(sock, token)
        local = LocalCalls(sock, session, self._dispatcher)
        try:
            _send(sock, session_pb2.SessionReply(welcome=self._identity.welcome(session, resumed=bool(token))))
            while (request := await _next(sock)) is not None:
                match request.WhichOneof("message"):
                    case "call":
                        await local.take(request.call)
                    case "give_up":
                        await local.give_up(request.give_up.number)
                    case "map":
                        await self._map(sock, session, request.map)
                    case "forget":
                        self._sessions.give_up(request.forget.token, session)
                    case "bye":
                        self._sessions.end(session, GOODBYE)
                        return
                    case other:
                        raise AttachRefused("UNKNOWN_MESSAGE", f"{other}: must be call, give_up, map, forget or bye")
        finally:
            self._sessions.connection_lost(session, this_task())
            await local.end()

    def _admit(self, sock: socket.socket, token: str) -> ClientSession:
        """The session of a token; empty = a new one. Raises :class:`AttachRefused`."""
        user = credentials(sock).identity
        if not self._access.admits(user):
            raise AttachRefused("PERMISSION_DENIED", f"no [[allow]] rule of the daemon names {user}")
        peer = identify(sock)
        if not token:
            return self._sessions.begin(peer, this_task())
        with closing(peer):
            return self._sessions.resume(token, peer, this_task())

    async def _map(self, sock: socket.socket, session: ClientSession, request: session_pb2.MapCache) -> None:
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
            _fail(sock, refusal.code.name if denied else refusal.detail.reason, refusal.message)
            return
        self._sessions.gets_memory(session, write=request.write)
        shared = cache.runtime.arena.shared(write=request.write)
        cuda = None if shared.cuda is None else session_pb2.CudaMemory(**asdict(shared.cuda))
        mapped = session_pb2.MappedCache(fds=shared.fds, cuda=cuda, unmapped=shared.unmapped)
        try:
            _send(sock, session_pb2.SessionReply(mapped=mapped), list(shared.fds.values()))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.problem = "memory cannot be mapped: too many descriptors sent by the daemon's user are not read yet"
            _log.warning("%s", self.problem)
            _fail(sock, "TOO_MANY_DESCRIPTORS", self.problem)
        else:
            self.problem = None


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


def _fail(sock: socket.socket, reason: str, message: str) -> None:
    _send(sock, session_pb2.SessionReply(failure=session_pb2.AttachFailure(reason=reason, message=message)))


def _send(sock: socket.socket, message: session_pb2.SessionReply, fds: list[int] | None = None) -> None:
    """Sends a reply without waiting: the socket of a client that reads each reply always has room."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([message.SerializeToString()], ancillary)
    except BlockingIOError as error:
        raise ConnectionAbortedError("the client does not read its answers") from error
