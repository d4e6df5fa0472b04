"""Sessions of clients, from begin to end, and the remembered replies that make a repeated call harmless."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import Any, Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from kvtier.abi.attach import SESSION_METADATA_KEY
from kvtierd.core.ids import CacheId, SessionId
from kvtierd.mover.engine import Engine
from kvtierd.rights import Identity, User
from kvtierd.service.errors import CallRefused, bad_argument, refused
from kvtierd.service.peer import AttachRefused, PeerProcess, SessionPeer
from kvtierd.service.recovery import OldLife, Roll, RollEntry

RECEIVED: Final = 8
"""Calls of a session whose messages are received at a time."""
REMEMBERED: Final = 128
"""Most remembered replies of a session, besides replies that name a live lease."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    """``reply``: cancelled if the call was cancelled or refused; None if its client gave the call up."""

    digest: bytes
    reply: asyncio.Future[T] | None
    runner: asyncio.Task[Any] | None = None


class ReplyMemory(Generic[T]):
    """The calls of one session. Loop thread only.

    A call runs once, in the task of its caller. A repeat of the call waits for its reply. A cancelled or refused call
    changed nothing and is forgotten: a repeat that waits runs it anew.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call[T]] = {}

    async def answer(
        self,
        seq: int,
        digest: bytes,
        call: Callable[[], Coroutine[Any, Any, T]],
        kept: Callable[[T], bool] = lambda reply: False,
    ) -> T:
        """The reply to call number ``seq``.

        Args:
            digest: Hash of the method and the request.
            kept: Whether the reply must stay remembered.
        """
        while known := self._calls.get(seq):
            if known.reply is None:
                raise refused(grpc.StatusCode.NOT_FOUND, "GIVEN_UP", f"call {seq} of the session was given up")
            if known.digest != digest:
                raise bad_argument("seq", seq, "a number that no earlier call of this session had")
            if known.reply.done():
                return known.reply.result()
            await asyncio.wait([known.reply])
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[seq] = _Call(digest, reply, asyncio.current_task())
        if len(self._calls) > REMEMBERED:
            self._forget_old(kept)
        try:
            reply.set_result(await call())
        except BaseException:
            del self._calls[seq]
            reply.cancel()
            raise
        return reply.result()

    async def give_up(self, seq: int) -> T | None:
        """Cancels call number ``seq``, now or when it comes. Returns its reply if it has already answered. If this
        method is cancelled, it has taken no reply: its next call gets the reply."""
        while True:
            call = self._calls.setdefault(seq, _Call(b"", None))
            if (reply := call.reply) is None:
                return None
            if reply.done():
                call.reply = None
                return reply.result()
            if call.runner is not None:
                call.runner.cancel()
            await asyncio.wait([reply])

    def _forget_old(self, kept: Callable[[T], bool]) -> None:
        """Forgets up to two of the oldest calls, so the memory shrinks to the calls that must stay."""
        for _ in range(2):
            seq, call = next(iter(self._calls.items()))
            del self._calls[seq]
            if call.reply is not None and (not call.reply.done() or kept(call.reply.result())):
                self._calls[seq] = call


COMES_BACK_S: Final = 5.0
"""Seconds after the end of the daemon's start in which clients of its earlier life attach again."""
IDLE_ORPHANED_S: Final = 30.0
"""Life of an orphaned local session without a lease: its client may come back for a reply."""

_TOKEN_BYTES: Final = 16

GOODBYE: Final = "goodbye"
"""The reason of a session's end that its client asked for."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientSession:
    """A client's session.

    Args:
        connection: Task of its attach connection or stream; None while orphaned.
        lapse: Timer that ends an orphaned session.
        caches: Open count of each cache that the session has open.
    """

    id: SessionId
    token: str
    peer: SessionPeer
    connection: asyncio.Task[None] | None
    lapse: asyncio.TimerHandle | None = None
    caches: Counter[CacheId] = field(default_factory=Counter)
    replies: ReplyMemory[Message] = field(default_factory=ReplyMemory)
    receiving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RECEIVED))
    ended: bool = False
    enrolled: bool = False
    writes: bool = False
    """Whether its process was given memory to write."""
    streams: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks that send to the client; they are cancelled with the session."""
    step_s: float = inf
    """Seconds that a step of its calls takes; infinite until it is known. See ``service/turns.py``."""
    remnant: bool = False
    """Whether the session is of an earlier daemon or kicked: it can only be given up. See ``service/recovery.py``."""

    @property
    def attached(self) -> bool:
        return self.connection is not None

    @asynccontextmanager
    async def streaming(self) -> AsyncGenerator[None, None]:
        """Cancels the running task when the session ends."""
        task = this_task()
        self.streams.add(task)
        try:
            yield
        finally:
            self.streams.discard(task)


@dataclass(slots=True, frozen=True)
class Capacity:
    """Most sessions at a time: of all clients, and of one identity. All anonymous clients are one identity."""

    sessions: int
    of_identity: int


@dataclass(slots=True, eq=False)
class SessionRegistry:
    """All live sessions. Loop thread only. At capacity, an orphaned session without a lease gives way."""

    _engine: Engine
    _capacity: Capacity
    _roll: Roll | None = None
    _by_token: dict[str, ClientSession] = field(default_factory=dict, init=False)
    _by_id: dict[SessionId, ClientSession] = field(default_factory=dict, init=False)
    _of: Counter[Identity] = field(default_factory=Counter, init=False)
    _ids: count[int] = field(default_factory=partial(count, 1), init=False)
    _remnants: dict[str, ClientSession] = field(default_factory=dict, init=False)
    _keeper: SessionId = field(default=SessionId(0), init=False)
    _gone_before_settled: list[SessionId] | None = field(default=None, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    left: dict[CacheId, float] = field(default_factory=dict, init=False)
    """When a session last closed the cache, or ended with it."""
    users: dict[CacheId, Identity] = field(default_factory=dict, init=False)
    """The user of the last opening."""

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(self._by_id.values())

    def begin(self, peer: SessionPeer, connection: asyncio.Task[None]) -> ClientSession:
        """A new session, which owns ``peer``. Raises :class:`AttachRefused` (TOO_MANY_SESSIONS,
        TOO_MANY_OF_IDENTITY) and closes ``peer``."""
        try:
            self._require_room(account(peer.identity))
        except AttachRefused:
            peer.close()
            raise
        session = ClientSession(SessionId(next(self._ids)), secrets.token_hex(_TOKEN_BYTES), peer, connection)
        self._by_token[session.token] = self._by_id[session.id] = session
        self._of[account(peer.identity)] += 1
        peer.watch(partial(self.end, session, "its process is gone"))
        _log.debug("session begins session=%d pid=%d uid=%d command=%r", session.id, peer.pid, peer.uid, peer.command)
        return session

    def resume(self, token: str, peer: SessionPeer, connection: asyncio.Task[None]) -> ClientSession:
        """Attaches a connection to the session of a token. ``peer`` stays the caller's.

        The new connection replaces an old one: the daemon may read the old one's end after the new hello. Raises
        :class:`AttachRefused` (UNKNOWN_SESSION, PERMISSION_DENIED).
        """
        session = self._by_token.get(token)
        if session is not None and session.peer.is_gone():
            self.end(session, "its process is gone")
            session = None
        if session is None:
            raise AttachRefused("UNKNOWN_SESSION", "no session has this token, or it has ended")
        if not session.peer.is_same(peer):
            raise AttachRefused("PERMISSION_DENIED", "the session belongs to another process or client")
        _stop_lapsing(session)
        superseded, session.connection = session.connection, connection
        if superseded is not None:
            superseded.cancel()
        else:
            self._engine.reattach_session(session.id)
        _log.info("session resumes session=%d pid=%d", session.id, peer.pid)
        return session

    def connection_lost(self, session: ClientSession, connection: asyncio.Task[None]) -> None:
        """Detaches the session, unless another connection has replaced this one."""
        if session.connection is not connection:
            return
        session.connection = None
        _log.info("session orphaned session=%d pid=%d", session.id, session.peer.pid)
        self._engine.orphan_session(session.id)
        after_s = IDLE_ORPHANED_S if session.peer.grace_s is None else session.peer.grace_s
        session.lapse = asyncio.get_running_loop().call_later(after_s, self._let_go, session)

    def end(self, session: ClientSession, why: str) -> None:
        """Ends the session and releases everything it holds."""
        if self._by_id.get(session.id) is not session:
            return
        self._forget(session)
        level = logging.DEBUG if why == GOODBYE else logging.INFO  # each command of the CLI is a session
        _log.log(level, "session ends session=%d pid=%d why=%r", session.id, session.peer.pid, why)
        self._engine.end_session(session.id)
        if self._roll is not None:
            self._roll.strike(session.id)
        gone = [session.id]
        if session.id < self._keeper and all(one.id > self._keeper for one in self._remnants.values()):
            self._engine.end_session(self._keeper)
            gone.append(self._keeper)
        if self._gone_before_settled is not None:
            self._gone_before_settled += gone

    def kick(self, session: ClientSession, why: str) -> None:
        """Ends the session, except blank slots that a live process of this host may still write: the slots stay out of
        use until the process gives them up or ends."""
        if (session.writes or session.remnant) and not session.peer.is_gone():
            self._engine.disown_session(session.id)
            if self._engine.session_leases(session.id):
                _log.info("session is kicked session=%d pid=%d why=%r", session.id, session.peer.pid, why)
                self._shut_out(session)
                session.remnant = True
                self._remnants[session.token] = session
                return
        self.end(session, why)

    def restore(self, entries: Iterable[RollEntry]) -> OldLife:
        """Takes over the sessions of an earlier daemon whose processes live; the sessions hold their slots until they
        give them up or end. Call before any other session begins; :meth:`settle` follows."""
        self._gone_before_settled = []
        dead: set[SessionId] = set()
        for entry in entries:
            self._ids = count(max(next(self._ids), entry.session + 1))
            peer = entry.peer()
            if peer is None:
                if self._roll is not None:
                    self._roll.strike(entry.session)
                dead.add(entry.session)
                continue
            session = ClientSession(entry.session, entry.token, peer, None, remnant=True)
            self._remnants[entry.token] = self._by_id[session.id] = session
            peer.watch(partial(self.end, session, "its process is gone"))
            _log.info("session of an earlier life session=%d pid=%d command=%r", session.id, peer.pid, peer.command)
        if self._remnants:
            self._keeper = SessionId(next(self._ids))
        live = frozenset(session.id for session in self._remnants.values())
        return OldLife(live, frozenset(dead), self._keeper)

    def gets_memory(self, session: ClientSession, *, write: bool) -> None:
        """Enters the session in the roll, before its process gets a cache's memory. A restarted daemon waits for the
        sessions in the roll only."""
        session.writes |= write
        if self._roll is not None and isinstance(session.peer, PeerProcess) and not session.enrolled:
            self._roll.enter(session.token, session.id, session.peer)
            session.enrolled = True

    def settle(self) -> None:
        """Ends sessions of an earlier daemon without slots, and releases the slots of sessions that have ended. Call
        when all slots of earlier sessions are known."""
        gone, self._gone_before_settled = self._gone_before_settled, None
        self._began = time.monotonic()
        for ended in gone or ():
            self._engine.end_session(ended)
        if not self._engine.session_leases(self._keeper):
            for session in [old for old in self._remnants.values() if not self._engine.session_leases(old.id)]:
                self.end(session, "it held nothing")

    def give_up(self, token: str, by: ClientSession) -> None:
        """Ends the remnant session of a token, if there is one: its process no longer uses the slots."""
        session = self._remnants.get(token)
        if session is not None and session.peer.is_same(by.peer):
            self.end(session, "given up")

    def close(self) -> None:
        """Forgets all sessions. The engine is shut down already."""
        for session in list(self._by_id.values()):
            self._forget(session)

    def idle_s(self, cache: CacheId) -> int | None:
        """Seconds since a session last had the cache open, in this daemon's life; None = a session has."""
        if any(cache in session.caches for session in self):
            return None
        return int(time.monotonic() - self.left.get(cache, self._began))

    def last_open(self, cache: CacheId) -> float | None:
        """When a session last had the cache open, on the monotonic clock; 0 = in an earlier life of the daemon. None: a
        session has it open, or a client of the earlier life may still come back to it."""
        if any(cache in session.caches for session in self):
            return None
        starting = self._gone_before_settled is not None
        comes_back = starting or time.monotonic() - self._began < COMES_BACK_S
        return self.left.get(cache, None if comes_back else 0.0)

    def authenticate(
        self, metadata: Iterable[tuple[str, str | bytes]] | None, caller: Identity | None = None
    ) -> ClientSession:
        """The attached session whose token is in the call's metadata.

        Args:
            caller: The identity that the call's transport proves; None = the transport proves none, the token counts.

        Raises:
            CallRefused: UNAUTHENTICATED, or PERMISSION_DENIED if another client got the token.
        """
        token = next((value for key, value in metadata or () if key == SESSION_METADATA_KEY), None)
        if not isinstance(token, str):
            message = f"metadata {SESSION_METADATA_KEY} is missing: {_way(caller)} first"
            raise refused(grpc.StatusCode.UNAUTHENTICATED, "NO_SESSION", message)
        session = self._by_token.get(token)
        if session is None:
            message = f"no session has this token, or it has ended: {_way(caller)} again"
            raise refused(grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION", message)
        if session.peer.transport_identity != caller:
            message = "the token belongs to another client"
            raise refused(grpc.StatusCode.PERMISSION_DENIED, "FOREIGN_TOKEN", message)
        require_attached(session)
        return session

    def get(self, session: SessionId) -> ClientSession | None:
        return self._by_id.get(session)

    def owners(self) -> Counter[int | str]:
        """The number of sessions of each client, by its pid or TCP address."""
        return Counter(session.peer.pid or session.peer.address for session in self._by_id.values())

    def owner_of(self, session: SessionId) -> tuple[int, str]:
        """Pid and command of a session; (0, "") if it has ended."""
        found = self._by_id.get(session)
        return (found.peer.pid, found.peer.command) if found else (0, "")

    def _let_go(self, session: ClientSession) -> None:
        if session.peer.grace_s is not None:
            self.end(session, f"orphaned for {session.peer.grace_s:g} s")
        elif self._is_idle(session):
            self.end(session, "orphaned and holding nothing")

    def _require_room(self, who: Identity) -> None:
        most = self._capacity
        if self._of[who] >= most.of_identity and not self._end_an_idle_one(who):
            name = f"uid {who.uid}" if isinstance(who, User) else str(who)
            message = f"{name} has {self._of[who]} sessions; one identity may have {most.of_identity}"
            raise AttachRefused("TOO_MANY_OF_IDENTITY", message)
        if len(self._by_id) - len(self._remnants) >= most.sessions and not self._end_an_idle_one():
            raise AttachRefused("TOO_MANY_SESSIONS", f"the daemon serves at most {most.sessions} sessions")

    def _end_an_idle_one(self, of: Identity | None = None) -> bool:
        """Ends an idle session, of one identity or of all. Returns whether a session was idle."""
        candidates = filter(self._is_idle, self._by_id.values())
        idle = next((one for one in candidates if of is None or account(one.peer.identity) == of), None)
        if idle is not None:
            self.end(idle, "made room for another session")
        return idle is not None

    def _is_idle(self, session: ClientSession) -> bool:
        return not (session.ended or session.attached or session.remnant or self._engine.session_leases(session.id))

    def _forget(self, session: ClientSession) -> None:
        self._shut_out(session)
        del self._by_id[session.id]
        self.left.update(dict.fromkeys(session.caches, time.monotonic()))
        self._remnants.pop(session.token, None)
        session.peer.unwatch()
        session.peer.close()

    def _shut_out(self, session: ClientSession) -> None:
        """Takes the session away from its client."""
        session.ended = True
        for stream in session.streams:
            stream.cancel()
        if not session.remnant:
            del self._by_token[session.token]
            who = account(session.peer.identity)
            self._of[who] -= 1
            if not self._of[who]:
                del self._of[who]
        _stop_lapsing(session)
        connection, session.connection = session.connection, None
        if connection is not None and connection is not asyncio.current_task():
            connection.cancel()


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not inside a task")
    return task


def account(who: Identity) -> Identity:
    """The identity that sessions count for: a user counts once, whatever groups its processes are in."""
    return User(who.uid, frozenset()) if isinstance(who, User) else who


def _stop_lapsing(session: ClientSession) -> None:
    if session.lapse is not None:
        session.lapse.cancel()
        session.lapse = None


def require_attached(session: ClientSession) -> None:
    """Raises UNAUTHENTICATED if the session has ended or is orphaned."""
    if session.ended:
        raise session_ended()
    if session.connection is None:
        way = _way(session.peer.transport_identity)
        message = f"the session's connection broke: {way} with its token"
        raise refused(grpc.StatusCode.UNAUTHENTICATED, "ORPHANED_SESSION", message)


def _way(caller: Identity | None) -> str:
    """The way to begin a session. ``caller``: the identity that the transport proves; None = a unix socket."""
    return "attach" if caller is None else "open Sessions.Session"


def session_ended() -> CallRefused:
    """UNAUTHENTICATED for a call of an ended session."""
    message = "the session has ended: begin a new one"
    return refused(grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION", message)
