"""What makes a repeated call harmless: each session's last replies, by call number."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from kvtier.abi.attach import SESSION_METADATA_KEY
from kvtierd.core.ids import CacheId, SessionId
from kvtierd.mover.engine import Engine
from kvtierd.rights import Identity, User
from kvtierd.service.errors import CallRefused, bad_argument, refused
from kvtierd.service.peer import Peer
from kvtierd.service.recovery import Entry, OldLife, Roll

REMEMBERED: Final = 128
"""Replies that are remembered at most, besides those that are kept."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    """``task``: None where the call was given up before it began, or after it ended."""

    digest: bytes
    task: asyncio.Task[T] | None
    waiting: int = 0


class ReplyMemory(Generic[T]):
    """The calls of one session. Loop thread only.

    A call runs once, in a task of its own; a repeat waits for the same task. When the last caller that waits is
    cancelled, the call is cancelled. A call that was cancelled or refused changed nothing and is forgotten.
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
            digest: tells the call's body from every other body.
            kept: whether a reply must not be forgotten yet.
        """
        known = self._calls.get(seq)
        if known is None:
            known = self._calls[seq] = _Call(digest, asyncio.create_task(call()))
            if len(self._calls) > REMEMBERED:
                self._forget_old(kept)
        if known.task is None:
            raise refused(grpc.StatusCode.NOT_FOUND, "GIVEN_UP", f"call {seq} of the session was given up")
        if known.digest != digest:
            raise bad_argument("seq", seq, "a number that no other call of this session had")
        task = known.task
        known.waiting += 1
        try:
            return await asyncio.shield(task)
        finally:
            known.waiting -= 1
            if not known.waiting and _is_void(task) and known.task is task:
                task.cancel()
                self._calls.pop(seq, None)

    async def give_up(self, seq: int) -> T | None:
        """Ends call number ``seq``, and refuses it should it still come. Its reply, where it had one."""
        call = self._calls.setdefault(seq, _Call(b"", None))
        task, call.task = call.task, None
        if task is None:
            return None
        task.cancel()
        await asyncio.wait([task])
        return None if _is_void(task) else task.result()

    def _forget_old(self, kept: Callable[[T], bool]) -> None:
        """Looks at the two oldest calls for each new one, so at most twice as many are remembered as are kept."""
        for _ in range(2):
            seq, call = next(iter(self._calls.items()))
            del self._calls[seq]
            runs = call.task is not None and not call.task.done()
            if runs or (call.task is not None and not _is_void(call.task) and kept(call.task.result())):
                self._calls[seq] = call


def _is_void(task: asyncio.Task[Any]) -> bool:
    """It has no reply: it runs, was cancelled or failed."""
    return not task.done() or task.cancelled() or task.exception() is not None


IDLE_DETACHED_S: Final = 30.0
"""A detached session that holds nothing is kept so long, for the replies it may still be asked for."""

_TOKEN_BYTES: Final = 16

_log = logging.getLogger(__name__)


class SessionPeer(Protocol):
    """Who is behind a session. ``grace_s``: how long it may stay detached; None: while its process lives."""

    @property
    def identity(self) -> Identity: ...
    @property
    def pid(self) -> int:
        """0 for one that is no process of this host."""
        ...

    @property
    def uid(self) -> int: ...
    @property
    def command(self) -> str:
        """For people."""
        ...

    @property
    def transport_identity(self) -> Identity | None:
        """What the transport of its calls must prove; None where that cannot prove anything."""
        ...

    @property
    def grace_s(self) -> float | None: ...

    def is_same(self, other: SessionPeer) -> bool:
        """Whether a session of this one may go on with the other."""
        ...

    def is_gone(self) -> bool: ...
    def watch(self, gone: Callable[[], None]) -> None:
        """Has ``gone`` called on the loop once it is, until :meth:`unwatch`."""
        ...

    def unwatch(self) -> None: ...
    def close(self) -> None: ...


class AttachRefused(Exception):
    """No session for this peer. ``reason`` is stable and machine readable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(slots=True, eq=False)
class Session:
    """``connection``: the task that serves its attach connection, or its stream; None while it is detached.
    ``lapse``: what ends it then, sooner or later.

    ``caches``: how often the session has each cache open, only those it has.
    """

    id: SessionId
    token: str
    peer: SessionPeer
    connection: asyncio.Task[None] | None
    lapse: asyncio.TimerHandle | None = None
    caches: Counter[CacheId] = field(default_factory=Counter)
    replies: ReplyMemory[Message] = field(default_factory=ReplyMemory)
    ended: bool = False
    enrolled: bool = False
    """It stands in the roll."""
    streams: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those that send to its client now."""
    remnant: bool = False
    """Of an earlier life: it cannot be resumed, only given up; see ``service/recovery.py``."""

    @property
    def attached(self) -> bool:
        return self.connection is not None

    @asynccontextmanager
    async def streaming(self) -> AsyncGenerator[None, None]:
        """Around what the running task sends: it is cancelled when the session ends."""
        task = this_task()
        self.streams.add(task)
        try:
            yield
        finally:
            self.streams.discard(task)


@dataclass(slots=True, frozen=True)
class Capacity:
    """Sessions at a time: all, and those of one uid, of one certificate's names, or of all anonymous clients."""

    sessions: int
    of_identity: int


class SessionRegistry:
    """All live sessions. Loop thread only. At capacity, a detached session without a lease gives way."""

    def __init__(
        self,
        engine: Engine,
        capacity: Capacity,
        roll: Roll | None = None,
    ) -> None:
        self._engine = engine
        self._capacity = capacity
        self._by_token: dict[str, Session] = {}
        self._by_id: dict[SessionId, Session] = {}
        self._of: Counter[Identity] = Counter()
        self._ids = count(1)
        self._roll = roll
        self._remnants: dict[str, Session] = {}
        self._keeper = SessionId(0)
        self._gone_before_settled: list[SessionId] | None = None

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def begin(self, peer: SessionPeer, connection: asyncio.Task[None]) -> Session:
        """A new session. ``peer`` is its own, or closed. Raises :class:`AttachRefused` (TOO_MANY_SESSIONS,
        TOO_MANY_OF_IDENTITY)."""
        try:
            self._require_room(_account(peer.identity))
        except AttachRefused:
            peer.close()
            raise
        session = Session(SessionId(next(self._ids)), secrets.token_hex(_TOKEN_BYTES), peer, connection)
        self._by_token[session.token] = self._by_id[session.id] = session
        self._of[_account(peer.identity)] += 1
        peer.watch(partial(self.end, session, "its process is gone"))
        _log.info("session begins session=%d pid=%d uid=%d command=%r", session.id, peer.pid, peer.uid, peer.command)
        return session

    def resume(self, token: str, peer: SessionPeer, connection: asyncio.Task[None]) -> Session:
        """The session of this token, if this is the peer that began it; ``peer`` stays the caller's.

        A connection that the session still has is superseded: the daemon may read its end after the new hello. Raises
        :class:`AttachRefused` (UNKNOWN_SESSION, PERMISSION_DENIED).
        """
        session = self.find(token, peer)
        _stop_lapsing(session)
        superseded, session.connection = session.connection, connection
        if superseded is not None:
            superseded.cancel()
        else:
            self._engine.reattach_session(session.id)
        _log.info("session resumes session=%d pid=%d", session.id, peer.pid)
        return session

    def find(self, token: str, peer: SessionPeer) -> Session:
        """The session of this token, if this is the peer that began it; ``peer`` stays the caller's. Raises
        :class:`AttachRefused` (UNKNOWN_SESSION, PERMISSION_DENIED)."""
        session = self._by_token.get(token)
        if session is not None and session.peer.is_gone():
            self.end(session, "its process is gone")
            session = None
        if session is None:
            raise AttachRefused("UNKNOWN_SESSION", "no session has this token, or it has ended")
        if not session.peer.is_same(peer):
            raise AttachRefused("PERMISSION_DENIED", "the session belongs to another process or client")
        return session

    def connection_lost(self, session: Session, connection: asyncio.Task[None]) -> None:
        """The connection ended. Nothing happens if it no longer is the session's."""
        if session.connection is not connection:
            return
        session.connection = None
        _log.info("session detached session=%d pid=%d", session.id, session.peer.pid)
        self._engine.orphan_session(session.id)
        after_s = IDLE_DETACHED_S if session.peer.grace_s is None else session.peer.grace_s
        session.lapse = asyncio.get_running_loop().call_later(after_s, self._let_go, session)

    def end(self, session: Session, why: str) -> None:
        """Everything the session holds is free again when this returns."""
        if session.ended:
            return
        self._forget(session)
        for stream in session.streams:
            stream.cancel()
        _log.info("session ends session=%d pid=%d why=%r", session.id, session.peer.pid, why)
        self._engine.end_session(session.id)
        if self._roll is not None:
            self._roll.strike(session.id)
        gone = [session.id]
        if session.remnant and not self._remnants:
            self._engine.end_session(self._keeper)
            gone.append(self._keeper)
        if self._gone_before_settled is not None:
            self._gone_before_settled += gone

    def restore(self, entries: Iterable[Entry]) -> OldLife:
        """Sessions of an earlier life whose processes live hold what they held, until they give it up or end. Before
        any other session; :meth:`settle` is to follow."""
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
            session = Session(entry.session, entry.token, peer, None, remnant=True)
            self._remnants[entry.token] = self._by_id[session.id] = session
            peer.watch(partial(self.end, session, "its process is gone"))
            _log.info("session of an earlier life session=%d pid=%d command=%r", session.id, peer.pid, peer.command)
        if self._remnants:
            self._keeper = SessionId(next(self._ids))
        live = frozenset(session.id for session in self._remnants.values())
        return OldLife(live, frozenset(dead), self._keeper)

    def gets_memory(self, session: Session) -> None:
        """From now on its process may touch a cache's memory. To be told before it can: a daemon that dies and comes
        back waits for those alone, and for none whose client never learnt its token."""
        if self._roll is not None and isinstance(session.peer, Peer) and not session.enrolled:
            self._roll.enter(session.token, session.id, session.peer)
            session.enrolled = True

    def settle(self) -> None:
        """Once all that earlier sessions held is known: those that held nothing need not be waited for, and what was
        held by those that have ended meanwhile is free."""
        gone, self._gone_before_settled = self._gone_before_settled, None
        for ended in gone or ():
            self._engine.end_session(ended)
        if not self._engine.session_leases(self._keeper):
            for session in [old for old in self._remnants.values() if not self._engine.session_leases(old.id)]:
                self.end(session, "it held nothing")

    def give_up(self, token: str, by: Session) -> None:
        """A process has done with what its session of an earlier life held. Nothing happens if that is not there."""
        session = self._remnants.get(token)
        if session is not None and session.peer.is_same(by.peer):
            self.end(session, "given up")

    def close(self) -> None:
        """Forgets all sessions without a word to the engine, which is shut down already."""
        for session in list(self._by_id.values()):
            self._forget(session)

    def authenticate(
        self, metadata: Iterable[tuple[str, str | bytes]] | None, caller: Identity | None = None
    ) -> Session:
        """The attached session whose token is in the call's metadata.

        ``caller``: as the call's transport proves it; None: the transport knows nobody, and the token is what counts.
        Raises UNAUTHENTICATED, and PERMISSION_DENIED where the token came by another's way.
        """
        token = next((value for key, value in metadata or () if key == SESSION_METADATA_KEY), None)
        if not isinstance(token, str):
            message = f"metadata {SESSION_METADATA_KEY} is missing: attach first"
            raise refused(grpc.StatusCode.UNAUTHENTICATED, "NO_SESSION", message)
        session = self._by_token.get(token)
        if session is None:
            message = "no session has this token, or it has ended: attach again"
            raise refused(grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION", message)
        if session.peer.transport_identity != caller:
            message = (
                "the token was given to another client: it counts only for calls that come the way its session did"
            )
            raise refused(grpc.StatusCode.PERMISSION_DENIED, "FOREIGN_TOKEN", message)
        require_attached(session)
        return session

    def get(self, session: SessionId) -> Session | None:
        return self._by_id.get(session)

    def owner_of(self, session: SessionId) -> tuple[int, str]:
        """Pid and command, (0, "") for a session that has ended."""
        found = self._by_id.get(session)
        return (found.peer.pid, found.peer.command) if found else (0, "")

    def _let_go(self, session: Session) -> None:
        if session.peer.grace_s is not None:
            self.end(session, f"detached for {session.peer.grace_s:g} s")
        elif self._is_idle(session):
            self.end(session, "detached and holding nothing")

    def _require_room(self, who: Identity) -> None:
        most = self._capacity
        if self._of[who] >= most.of_identity and not self._end_an_idle_one(who):
            name = f"uid {who.uid}" if isinstance(who, User) else str(who)
            message = f"{name} has {self._of[who]} sessions; one identity may have {most.of_identity}"
            raise AttachRefused("TOO_MANY_OF_IDENTITY", message)
        if len(self._by_id) - len(self._remnants) >= most.sessions and not self._end_an_idle_one():
            raise AttachRefused("TOO_MANY_SESSIONS", f"the daemon serves at most {most.sessions} sessions")

    def _end_an_idle_one(self, of: Identity | None = None) -> bool:
        """Of somebody's, or of all."""
        candidates = filter(self._is_idle, self._by_id.values())
        idle = next((one for one in candidates if of is None or _account(one.peer.identity) == of), None)
        if idle is not None:
            self.end(idle, "made room for another")
        return idle is not None

    def _is_idle(self, session: Session) -> bool:
        return not (session.ended or session.attached or session.remnant or self._engine.session_leases(session.id))

    def _forget(self, session: Session) -> None:
        session.ended = True
        del self._by_id[session.id]
        if session.remnant:
            del self._remnants[session.token]
        else:
            del self._by_token[session.token]
            who = _account(session.peer.identity)
            self._of[who] -= 1
            if not self._of[who]:
                del self._of[who]
        _stop_lapsing(session)
        session.peer.unwatch()
        session.peer.close()
        connection, session.connection = session.connection, None
        if connection is not None and connection is not asyncio.current_task():
            connection.cancel()


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not inside a task")
    return task


def _account(who: Identity) -> Identity:
    """Under whom sessions are counted: a user's together, whatever groups their processes are in."""
    return User(who.uid, frozenset()) if isinstance(who, User) else who


def _stop_lapsing(session: Session) -> None:
    if session.lapse is not None:
        session.lapse.cancel()
        session.lapse = None


def require_attached(session: Session) -> None:
    """Raises UNAUTHENTICATED where the session has ended, or lost the connection that proves who it is."""
    if session.ended:
        raise session_ended()
    if session.connection is None:
        raise _dead("DETACHED_SESSION", "the session's attach connection broke: attach again with its token")


def session_ended() -> CallRefused:
    """What all calls of a session get that has."""
    return _dead("UNKNOWN_SESSION", "the session has ended: attach again")


def _dead(reason: str, message: str) -> CallRefused:
    return refused(grpc.StatusCode.UNAUTHENTICATED, reason, message)
