"""Turns of clients on the event loop: the client that has computed least is served first.

Python runs one step of a call at a time, so a client could hold others up with many calls, or with long calls. Time is
shared by lanes: an account (a uid, a certificate, or all anonymous clients together) has a lane for short calls and a
lane for long calls. Within a lane, it is shared by sessions.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Final, Generic, TypeVar

from kvtierd.core.ids import SessionId
from kvtierd.rights import Identity
from kvtierd.service.sessions import ClientSession, account

SLICE_S: Final = 0.00025
"""Computed time between two looks at the sockets. While no call waits, calls begin at once within this time."""
REMEMBERED_S: Final = 0.05
"""Computed time over which the length of steps is averaged."""
LOOKS: Final = 4
"""Looks at the sockets between two slices, in which a packet that has arrived becomes a call before the next slice."""

K = TypeVar("K")
T = TypeVar("T")
_Lane = tuple[Identity, bool]
"""An account, and whether its calls are short. Short and long calls have equal shares of the time."""


class _Times(Generic[K]):
    """Seconds computed, by client. A client that comes back starts level with the client that was served last."""

    def __init__(self) -> None:
        self._of: dict[K, float] = {}
        self._level = 0.0

    def enter(self, client: K) -> None:
        self._of[client] = max(self._of.get(client, 0.0), self._level)

    def first(self, clients: Iterable[K]) -> K:
        """The client that has computed least."""
        return min(clients, key=self._of.__getitem__)

    def serve(self, clients: Iterable[K]) -> K:
        """Like :meth:`first`, and serves the client now."""
        found = self.first(clients)
        self._level = self._of[found]
        return found

    def add(self, client: K, seconds: float) -> None:
        self._of[client] = self._of.get(client, self._level) + seconds

    def of(self, client: K) -> float:
        return self._of[client]


@dataclass(slots=True)
class _Turn:
    """A call that waits. ``number``: in order of arrival. ``leads``: it begins its slice."""

    number: int
    session: ClientSession
    given: asyncio.Future[None]
    leads: bool = False


class Turns:
    """Loop thread only. Times count from the last moment without a waiting call."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._numbers = count()
        self._waiting: dict[_Lane, dict[SessionId, deque[_Turn]]] = {}
        self._queued: Counter[SessionId] = Counter()
        """Calls of each session that wait, or have their turn and have not begun."""
        self._lanes = _Times[_Lane]()
        self._sessions: dict[_Lane, _Times[SessionId]] = {}
        self._lane_of: dict[SessionId, _Lane] = {}
        """The lane of each session's last call."""
        self._typical_s = 0.0
        """Expected length of the step in which the loop is at a random moment."""
        self._spent_s = 0.0
        self._round: asyncio.Handle | None = None

    async def begin(self, session: ClientSession) -> None:
        """Returns when it is the session's turn. Calls of a session begin in their order."""
        if not self._queued[session.id]:
            lane = self._enter(session)
            if not self._waiting and self._spent_s < SLICE_S:
                return
            if (
                self._waiting
                and self._rank(lane, session.id) < self._first()
                and self._spent_s + session.step_s < SLICE_S
            ):
                return  # a short call fits between the slices of other clients
        turn = _Turn(next(self._numbers), session, asyncio.get_running_loop().create_future())
        self._queued[session.id] += 1
        try:
            await self._queue(turn)
            while self._spent_s >= SLICE_S and not turn.leads:  # an earlier call took longer than expected
                turn.given = asyncio.get_running_loop().create_future()
                await self._queue(turn)
        finally:
            self._queued[session.id] -= 1
            if not self._queued[session.id]:
                del self._queued[session.id]

    def _enter(self, session: ClientSession) -> _Lane:
        lane = self._lane_of[session.id] = account(session.peer.identity), self._is_short(session)
        self._lanes.enter(lane)
        self._sessions.setdefault(lane, _Times()).enter(session.id)
        return lane

    def _queue(self, turn: _Turn) -> asyncio.Future[None]:
        number = turn.session.id
        lane = self._lane_of.get(number)
        if lane is None or number not in self._waiting.get(lane, {}):
            lane = self._enter(turn.session)
        queue = self._waiting.setdefault(lane, {}).setdefault(number, deque())
        later = sum(turn.number < other.number for other in queue) if queue and turn.number < queue[-1].number else 0
        queue.insert(len(queue) - later, turn)
        self._schedule()
        return turn.given

    @types.coroutine
    def measured(self, session: ClientSession, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Runs ``work``, and charges the session for its computing time. Work that yields with ``asyncio.sleep(0)``
        goes on in the session's next turn."""
        resume: Any = work.send
        value: Any = None
        while True:
            began = self._clock()
            try:
                awaited = resume(value)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._charge(session, self._clock() - began)
            try:
                value = yield from self._again(session).__await__() if awaited is None else _passed(awaited)
                resume = work.send
            except BaseException as error:  # noqa: BLE001  a cancellation is the work's own
                resume, value = work.throw, error

    def _is_short(self, session: ClientSession) -> bool:
        return session.step_s < 0.75 * self._typical_s

    async def _again(self, session: ClientSession) -> None:
        await asyncio.sleep(0)
        await self.begin(session)

    def _charge(self, session: ClientSession, seconds: float) -> None:
        self._spent_s += seconds
        session.step_s = seconds if session.step_s == inf else max(seconds, session.step_s / 2)
        self._typical_s += (seconds - self._typical_s) * (min(1.0, seconds / REMEMBERED_S) if self._typical_s else 1.0)
        if (lane := self._lane_of.get(session.id)) is not None:
            self._lanes.add(lane, seconds)
            self._sessions[lane].add(session.id, seconds)
            self._change_lane(session, lane)
        if self._spent_s >= SLICE_S:
            self._schedule()

    def _change_lane(self, session: ClientSession, lane: _Lane) -> None:
        """Moves the session's waiting calls to the lane that fits the length of its last call."""
        waiting = self._waiting.get(lane, {})
        if session.id in waiting and lane[1] != self._is_short(session):
            turns = waiting.pop(session.id)
            if not waiting:
                del self._waiting[lane]
            other = self._lane_of[session.id] = lane[0], not lane[1]
            self._lanes.enter(other)
            self._sessions.setdefault(other, _Times()).enter(session.id)
            self._waiting.setdefault(other, {})[session.id] = turns

    def _first(self) -> tuple[float, bool, float]:
        """The rank of the session that has the next turn."""
        lane = self._lanes.first(self._waiting)
        return self._rank(lane, self._sessions[lane].first(self._waiting[lane]))

    def _rank(self, lane: _Lane, session: SessionId) -> tuple[float, bool, float]:
        return self._lanes.of(lane), not lane[1], self._sessions[lane].of(session)

    def _schedule(self, looks: int = 0) -> None:
        if self._round is None:
            self._round = asyncio.get_running_loop().call_soon(self._serve, looks)

    def _serve(self, looks: int) -> None:
        """Gives turns for one slice, after ``looks`` more looks at the sockets."""
        self._round, self._spent_s = None, 0.0
        if looks:
            self._schedule(looks - 1)
            return
        left_s, longest_s = SLICE_S, 0.0
        while self._waiting and left_s > 0:
            lane = self._lanes.serve(self._waiting)
            mine = self._waiting[lane]
            number = self._sessions[lane].serve(mine)
            turn = mine[number].popleft()
            if not mine[number]:
                del mine[number]
            if not mine:
                del self._waiting[lane]
            if not turn.given.done():  # the caller may have given up
                turn.leads = left_s == SLICE_S
                turn.given.set_result(None)
                left_s -= turn.session.step_s
                longest_s = max(longest_s, turn.session.step_s)
        if left_s < SLICE_S:
            self._schedule(LOOKS if longest_s > SLICE_S / 2 else 0)
        else:
            self._lanes = _Times()
            self._sessions.clear()
            self._lane_of.clear()


def _passed(awaited: Any) -> Generator[Any, Any, Any]:
    return (yield awaited)
