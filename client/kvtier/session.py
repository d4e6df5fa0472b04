"""A session with a daemon, kept alive over broken connections and restarts.

The attach connection proves the client's identity; its token goes with every RPC. When the connection breaks, a
background task attaches again: with the old token if the daemon still knows it (leases live on), else as a new session
(leases are lost; holders see the new :attr:`Link.session`).

While a call waits for its answer, the client asks the daemon for a sign of life. A daemon that gives none for the
client's patience, or refuses to let the client attach, is away: running calls end, and later calls send nothing, until
the daemon is heard again. Deadlines are the client's own: gRPC does not end a call whose request it cannot write, for
example to a stopped daemon.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet

import grpc
from grpc.aio import AioRpcError

from kvtier import errors
from kvtier.deadline import PASSED, Backoff, Deadline, Fence, Stream, Unknown, all_of
from kvtier.transport import Link, TlsFiles, transport_to
from kvtier.v1 import session_pb2

DEFAULT_PATIENCE_S: Final = 5.0
_FAIR_S: Final = 0.1
"""A daemon that leaves a call unanswered for this many seconds counts as away. A shorter wait proves nothing."""
_DOUBT_SHARE: Final = 0.2
"""The client asks for a sign of life after this share of the patience, and waits for it for the rest."""
_BUSY_S: Final = 1.0
"""Least seconds of patience with a running daemon process on this host, which may only be short of CPU time."""
_RUNNING: Final = frozenset("RSDI")
"""States in ``/proc/<pid>/stat`` of a process that is neither stopped nor dead."""
_LATE_S: Final = 0.01
"""A timer that fires this many seconds late was starved with its process, which may not have read the answer yet."""
_STOPPING: Final = "SHUTTING_DOWN"
_STOPPING_S: Final = 0.1
"""Seconds between questions to a stopping daemon whether another daemon has taken over."""
_FIRST_PROBE_S: Final = 0.5
_LONGEST_PROBE_S: Final = 30.0
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"
"""The health service's answer on the wire: status SERVING."""

_ATTACH_TIMEOUT_S: Final = 5.0
_CLOSE_GRACE_S: Final = 2.0
_HEAL_GRACE_S: Final = 0.5
"""Seconds that :meth:`Session.close` waits for a broken link, so that it can say goodbye."""

_WORK_GRACE_S: Final = 5.0
"""Seconds that :meth:`Session.close` waits for this process's GPU work before the goodbye."""

_RECEIVES_STATUS: Final = "_AioCall._handle_status_once_received"
"""Name of gRPC's own task that ends with a call."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Follower(Protocol):
    def session_changed(self, session: int) -> None:
        """Called when the daemon has forgotten the last session; ``session`` is the new :attr:`Link.session`."""

    def work(self, stream: Stream | None) -> Fence:
        """The point that this process's own work on the held slots has reached. Raises :class:`DeviceError`."""

    def rest(self) -> None:
        """Called when that work is over and no more follows."""


class _LinkBroke(Exception):
    """The link broke before the call had its answer."""

    def __init__(self, failure: errors.DaemonUnavailable) -> None:
        self.failure: Final = failure


class Session:
    """A client's session: make calls through :meth:`call`, end it with :meth:`close`. Belongs to the loop that opened
    it."""

    def __init__(
        self, address: str, tls: TlsFiles | None, *, insecure: bool, wait: float = 0.0, patience: float
    ) -> None:
        """See :func:`kvtier.transport.transport_to` and :func:`kvtier.connect`."""
        self.address = address
        self._transport = transport_to(address, tls, insecure=insecure)
        self.can_map: Final = self._transport.can_map
        """Whether caches' memory can be mapped; False over TCP."""
        self._wait = wait
        self._patience = patience
        self._link: Link | None = None
        self._changed = asyncio.Event()
        """Set when the link or the daemon's reachability changes. A waiter clears the event and looks again."""
        self._fatal: errors.KvtierError | None = None
        self.closed = False
        self._numbers = count(1)
        self._seq = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self.reachable = True
        """False while the daemon is away. A task keeps asking for its next answer. Thread-safe."""
        self._heard = 0.0
        """Time of the daemon's last answer, by the loop's clock."""
        self._waiting: set[asyncio.Timeout] = set()
        """Timeout scopes of the calls that wait for an answer."""
        self._listener: asyncio.Task[None] | None = None
        self.followers: Final[WeakSet[Follower]] = WeakSet()
        """Notified of each new session, before any call goes through it."""
        self._lent: Counter[int] = Counter()
        self._forgotten_by_daemon: dict[int, str] = {}

    async def open(self) -> None:
        """Attaches, retrying for ``wait`` seconds (0: one attempt). Raises :class:`DaemonUnavailable`."""
        self._set_link(await self._attach_within(self._wait, None))
        self._keeper = asyncio.create_task(self._keep_attached())
        _open.add(self)

    @property
    def torn_down(self) -> bool:
        """Whether the session is closed, or the loop cancels all its tasks, as at the end of ``asyncio.run``: it would
        not end a task that begins now."""
        return self.closed or (self._keeper is not None and self._keeper.cancelling() > 0)

    @property
    def number(self) -> int:
        """The present :attr:`Link.session`, or the last number while the link is down."""
        return self._link.session if self._link else 0

    @property
    def live_link(self) -> Link | None:
        """The link; None while it is down."""
        return None if self._link is None or self._link.attach.closed.is_set() else self._link

    @property
    def welcome(self) -> session_pb2.Welcome:
        if self._link is None:
            raise errors.ClientClosed("the client was never connected", reason="CLOSED")
        return self._link.welcome

    def next_seq(self) -> int:
        """A sequence number for a mutating call, never given twice."""
        return next(self._seq)

    async def call(
        self, attempt: Callable[[Link], Awaitable[T]], deadline: Deadline, *, wait: float | None = None
    ) -> T:
        """Runs ``attempt(link)`` until it gets an answer, repeating it when the link breaks.

        An attempt must be safe to repeat: a lookup, a call with a sequence number, or a call that checks
        ``link.session``. ``wait``: seconds to wait for a daemon that is away; None: the client's ``wait``.

        Raises :class:`DaemonUnavailable` if the daemon is away, :class:`DeadlineExceeded`, and the errors of the
        daemon's answer: see :func:`kvtier.errors.error_of`.
        """
        loop = asyncio.get_running_loop()
        began, backoff = loop.time(), Backoff()
        failure: errors.DaemonUnavailable | None = None
        while True:
            scope, link = asyncio.timeout_at(deadline.at), None
            try:
                async with scope:
                    if failure is not None:
                        await asyncio.sleep(backoff.next())
                    link = await self._link_within(self._wait if wait is None else wait, failure)
                    failure = None
                    self._waiting.add(scope)  # so that it ends if the daemon falls silent
                    self._start_listening()
                    return await self._answer(attempt, link)
            except _LinkBroke as broke:
                failure = broke.failure
            except TimeoutError:
                if scope.expired() and loop.time() < deadline.at:
                    continue  # the daemon has fallen silent
                if loop.time() - max(began, self._heard) >= _FAIR_S:
                    self._lose()
                late = errors.DeadlineExceeded(
                    f"the daemon at {self.address} did not answer in time", reason="DEADLINE"
                )
                raise failure or (late if link is not None else self._unavailable()) from None
            finally:
                self._waiting.discard(scope)

    async def _answer(self, attempt: Callable[[Link], Awaitable[T]], link: Link) -> T:
        """Runs an attempt. Raises :class:`_LinkBroke` if the link breaks, and the errors of the daemon's answer."""
        try:
            answer = await attempt(link)
        except AioRpcError as error:
            fault = errors.fault_of(error)
            if not errors.link_is_broken(fault):
                self._answered()
                raise errors.error_of(fault) from None
            if fault.code is grpc.StatusCode.UNAUTHENTICATED:
                link.attach.close()  # so that the session attaches again
            if fault.reason == _STOPPING:
                self._lose()
            raise _LinkBroke(
                errors.DaemonUnavailable(f"{self.address}: {fault.message}", reason=fault.reason)
            ) from None
        except errors.DaemonUnavailable as error:
            raise _LinkBroke(error) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            raise _LinkBroke(self.channel_closed_by(error)) from error
        self._answered()
        return answer

    async def link(self) -> Link:
        while (link := self.live_link) is None:
            await self._change()
        self._require_open()
        return link

    async def _link_within(self, wait: float, failure: errors.DaemonUnavailable | None) -> Link:
        """Waits up to ``wait`` seconds for the live link to a reachable daemon. Raises ``failure`` if there is none."""
        until = asyncio.get_running_loop().time() + wait
        while (link := self.live_link) is None or not self.reachable:
            self._start_listening()
            try:
                async with asyncio.timeout_at(None if self.reachable else until):
                    await self._change()
            except TimeoutError:
                raise failure or self._unavailable() from None
        self._require_open()
        return link

    async def _change(self) -> None:
        self._require_open()
        self._changed.clear()
        await self._changed.wait()

    def _unavailable(self) -> errors.DaemonUnavailable:
        if self.live_link is None:
            return errors.DaemonUnavailable(f"no daemon answers at {self.address}", reason="NO_DAEMON")
        return errors.DaemonUnavailable(f"the daemon at {self.address} gives no sign of life", reason="SILENT")

    def _answered(self) -> None:
        self._heard = asyncio.get_running_loop().time()
        if not self.reachable:
            self.reachable = True
            self._changed.set()

    def _lose(self) -> None:
        self.reachable = False
        self._changed.set()
        self._start_listening()

    def _end_waiting(self) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._waiting:
            if not scope.expired():
                scope.reschedule(now)

    def _start_listening(self) -> None:
        if not self.torn_down and (self._listener is None or self._listener.done()):
            self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        """Asks for signs of life while calls wait, and while the daemon is away. An open question costs nothing, so
        later questions wait longer."""
        probes = Backoff(_FIRST_PROBE_S, _LONGEST_PROBE_S)
        with suppress(errors.CallerError, errors.DaemonError):  # the client is closed, or cannot attach any more
            while self._waiting or not self.reachable or self.live_link is None:
                if self.reachable:
                    probes = Backoff(_FIRST_PROBE_S, _LONGEST_PROBE_S)
                    await self._doubt()
                    continue
                answer = await self._health(probes.next())
                if answer == _SERVING:
                    self._answered()
                elif answer is None:
                    self._end_waiting()
                else:
                    await asyncio.sleep(_STOPPING_S)

    async def _doubt(self) -> None:
        """Marks the daemon as away if it answers neither the calls nor a question for a sign of life."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(self._patience * _DOUBT_SHARE)
        if self.live_link is not None and (not self._waiting or self._heard >= began):
            return
        patience = self._patience * (1 - _DOUBT_SHARE)
        if await self._health(patience) is not None or (self._is_running() and await self._health(_BUSY_S) is not None):
            self._heard = loop.time()
        elif self._heard < began:
            self._lose()
            self._end_waiting()

    def _is_running(self) -> bool:
        """Whether the daemon is a process of this host that is neither stopped nor dead. A daemon in another pid
        namespace is not seen."""
        if self._link is None or not self.can_map or self._patience >= _BUSY_S:
            return False
        try:
            stat = Path(f"/proc/{self._link.welcome.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in _RUNNING

    async def _health(self, seconds: float) -> bytes | None:
        """The daemon's answer to a health check; None if none comes within ``seconds``."""
        loop = asyncio.get_running_loop()
        asking = asyncio.create_task(self._ask_health())
        try:
            for _ in range(2):
                until = loop.time() + seconds
                await asyncio.wait([asking], timeout=seconds)
                if asking.done() or loop.time() < until + _LATE_S:
                    break
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()

    async def _ask_health(self) -> bytes:
        backoff = Backoff()
        while True:
            link = await self.link()
            check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = link.channel.unary_unary(_HEALTH)
            try:
                return await check(b"")
            except AioRpcError as error:
                if not errors.link_is_broken(errors.fault_of(error)):
                    return b""  # a refusal is a sign of life too
            except (asyncio.CancelledError, grpc.aio.UsageError) as error:
                self.channel_closed_by(error)
            await asyncio.sleep(backoff.next())

    def channel_closed_by(self, error: asyncio.CancelledError | grpc.aio.UsageError) -> errors.DaemonUnavailable:
        """The error for a call that gRPC ended because its channel was closed during or before the call.

        The session has another link then. Raises :class:`ClientClosed` if :meth:`close` closed the channel, and
        ``error`` if the task itself is being cancelled.
        """
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
        if self.closed:
            raise errors.ClientClosed("the client was closed during the call", reason="CLOSED") from error
        return errors.DaemonUnavailable(f"{self.address}: attached anew during the call", reason="LINK_REPLACED")

    def lend(self, session: int) -> None:
        """Notes a granted lease of this :attr:`Link.session`: its memory may be touched until :meth:`give_back`."""
        self._lent[session] += 1

    def give_back(self, session: int) -> None:
        """Notes that a lease's memory is no longer touched, whether or not the daemon knows."""
        self._lent[session] -= 1
        self._settle()

    def _settle(self) -> None:
        """Lets the daemon forget earlier sessions whose memory this process no longer touches: a restarted daemon keeps
        their slots until then."""
        if self._link is None or self._link.attach.closed.is_set():
            return
        for session in [one for one in self._forgotten_by_daemon if self._lent[one] == 0]:
            self._link.attach.forget(self._forgotten_by_daemon.pop(session))
            self._lent.pop(session, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that outlives its caller, until :meth:`close`; later work is dropped."""
        if self.torn_down:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def work(self, stream: Stream | None) -> Fence:
        """Like :meth:`Follower.work`, for all followers. If a device fails, the fence raises the error when asked."""
        try:
            return all_of(follower.work(stream) for follower in list(self.followers) if not self.closed)
        except errors.DeviceError as error:
            return Unknown(error)

    async def given_up(self) -> errors.KvtierError:
        """Waits until the daemon refuses this client for good. Returns the error."""
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        return self._fatal or errors.ClientClosed("the client is closed", reason="CLOSED")

    async def close(self, work: Fence = PASSED) -> None:
        """Closes the session. Background work gets a moment to end.

        The goodbye gives back all held slots, so it is sent only after ``work`` (see :meth:`work`) has passed. If that
        takes too long, the daemon takes the slots back when this process ends.
        """
        if self.closed:
            return
        at_rest = await _over(work)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_GRACE_S)
            for task in late:
                task.cancel()
        with suppress(TimeoutError, errors.KvtierError):  # no daemon, so no goodbye
            async with asyncio.timeout(_HEAL_GRACE_S):
                await self.link()
        self.closed = True
        for ending in (self._keeper, self._listener):
            if ending is not None:
                ending.cancel()
                await asyncio.wait([ending])
        self._changed.set()
        if self._link is not None:
            if at_rest:
                for follower in list(self.followers):
                    follower.rest()
                self._lent.clear()  # the memory of all leases goes with this client
                self._settle()
                await self._link.attach.say_bye()
            self._link.attach.close()
            await self._link.channel.close()
        for task in self._tasks:
            task.cancel()  # begun meanwhile; without a link such work cannot reach the daemon
        await self._calls_ended()

    async def _calls_ended(self) -> None:
        """Waits for the ends of the channel's cancelled calls. gRPC would deliver them to a loop that is closed by
        then, from the loop of another client, which prints a traceback."""
        loop = asyncio.get_running_loop()
        if not any(other._keeper and other._keeper.get_loop() is loop for other in _open if not other.closed):
            ends = [
                task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == _RECEIVES_STATUS
            ]
            if ends:
                await asyncio.wait(ends, timeout=_CLOSE_GRACE_S)

    def _require_open(self) -> None:
        if self.closed:
            raise errors.ClientClosed("the client is closed", reason="CLOSED")
        if self._fatal is not None:
            raise self._fatal

    def _set_link(self, link: Link) -> None:
        before, self._link = self._link, link
        if before is not None and before.session != link.session:
            self._forgotten_by_daemon[before.session] = before.welcome.token
            for follower in list(self.followers):
                follower.session_changed(link.session)
        self._settle()
        self._answered()
        self._changed.set()

    async def _keep_attached(self) -> None:
        while self._link is not None:
            await self._link.attach.closed.wait()
            try:
                self._set_link(await self._attach_within(math.inf, self._link))
            except (errors.CallerError, errors.DaemonError) as error:
                return self._give_up(error)  # the daemon refuses this client for good
            except Exception as error:  # noqa: BLE001  a client bug: no task attaches any more, so calls must not wait
                _log.exception("the client cannot attach again address=%s", self.address)
                self._link.attach.close()
                failure = errors.DaemonError(f"{self.address}: cannot attach again: {error!r}", reason="CLIENT_BROKEN")
                failure.__cause__ = error
                return self._give_up(failure)

    def _give_up(self, error: errors.KvtierError) -> None:
        """Makes every later call raise the error."""
        self._fatal = error
        self.reachable = False
        self._changed.set()

    async def _attach_within(self, seconds: float, old: Link | None) -> Link:
        until, backoff = asyncio.get_running_loop().time() + seconds, Backoff()
        while True:
            try:
                return await self._attach(old)
            except errors.RetryableError:
                delay = backoff.next()
                if asyncio.get_running_loop().time() + delay > until:
                    raise
                if old is not None:
                    self._lose()
                await asyncio.sleep(delay)

    async def _attach(self, old: Link | None) -> Link:
        """Attaches and returns a new link; the old session continues if the daemon knows it."""
        try:
            async with asyncio.timeout(_ATTACH_TIMEOUT_S):
                try:
                    known = (None, None) if old is None else (old.welcome.token, old.channel)
                    attached = await self._transport.attach(*known)
                except errors.CallerError as error:
                    if old is None or error.reason != "UNKNOWN_SESSION":
                        raise
                    attached = await self._transport.attach(None, None)
        except TimeoutError:
            raise errors.DaemonUnavailable(f"the daemon at {self.address} does not answer", reason="HUNG") from None
        if old is not None and old.channel is not attached.channel:
            # Running calls fail by themselves, with a status that their callers can retry. Closing without grace would
            # cancel them, which looks like a cancelled task.
            self.spawn(old.channel.close(grace=_CLOSE_GRACE_S))
        number = old.session if old is not None and attached.welcome.resumed else next(self._numbers)
        return replace(attached, session=number)


_open: Final[WeakSet[Session]] = WeakSet()
"""Sessions that were opened."""


async def _over(work: Fence) -> bool:
    if work is PASSED:
        return True
    from kvtier.memory.gpu import passing  # for clients that held leases

    try:
        await passing(work, Deadline(_WORK_GRACE_S))
    except (errors.DeadlineExceeded, errors.DeviceError) as error:
        _log.warning("leased slots go back to the daemon only when this process ends: %s", error)
        return False
    return True
