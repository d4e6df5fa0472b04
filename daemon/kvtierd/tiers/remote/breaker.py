"""Keeps a failing store from slowing its callers: a deadline for each call, and circuits that open.

An open circuit turns calls away at once. After a back-off it lets one call through; a successful call closes it. Gets,
puts and deletes have their own circuits, as a store may list its objects but not give, take or delete them. An answer
that may be a single object's fault counts after two objects had it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

from kvtierd.tiers.remote.base import Listed, RemoteError, RemoteFull, RemoteStore, RemoteUnavailable

Operation = Literal["exists", "get", "put", "delete", "list"]

FAILURES: Final = 3
"""Failures in a row that open a circuit. A silence of a whole deadline, or a refusal, opens it at once."""
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 30.0
"""Longest back-off. Each failed call that was let through doubles it; up to half is left out at random."""
_ASKED: Final = 8
"""Objects of failed gets to remember: each probe asks for another of them."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Counts of an operation. ``failures``: failed ``calls``. ``refused``: calls turned away by an open circuit.
    ``nbytes``: bytes of objects. A step of a listing is a call."""

    calls: int = 0
    failures: int = 0
    refused: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Guarded:
    """A store behind a circuit for all calls, and a circuit each for gets, puts and deletes. A call that an open
    circuit turns away raises :class:`RemoteUnavailable`."""

    def __init__(
        self,
        store: RemoteStore,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            timeout_s: of each call, and of each step of a listing.
            chance: a random number from 0 to 1.
        """
        self._store = store
        self._timeout_s = timeout_s
        self._clock = clock
        self._all = _Circuit(clock, chance)
        names: tuple[Operation, ...] = ("get", "put", "delete")
        self._own: Mapping[Operation, _Circuit] = {name: _Circuit(clock, chance) for name in names}
        self._failed: dict[Operation, set[str]] = {}
        """Objects that failed since the last success, by operation."""
        self._asked: dict[str, int] = {}
        """Bytes of requested objects, and of the last object that was read. A probe asks for the first."""
        self.counts: dict[Operation, Counts] = {
            operation: Counts() for operation in ("exists", "get", "put", "delete", "list")
        }

    @property
    def problem(self) -> str | None:
        """Why no object is read; None = reads work."""
        return self._all.problem or self._own["get"].problem

    @property
    def put_problem(self) -> str | None:
        """Why no object is written; None = writes work."""
        return self._all.problem or self._own["put"].problem

    @property
    def replaces(self) -> bool:
        return self._store.replaces

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        async with self._call("exists", names):
            return await self._store.exists(names)

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        async with self._call("get", names):
            return await self._store.begins(names, nbytes)

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        for name, view in zip(names[:2], into, strict=False):
            self._asked.pop(name, None)
            self._asked[name] = len(view)
        while len(self._asked) > _ASKED:
            del self._asked[next(iter(self._asked))]
        async with self._call("get", names) as counts:
            found = await self._store.get(names, into)
            came = [(name, n) for name, n, view in zip(names, found, into, strict=True) if 0 < n <= len(view)]
            counts.nbytes += sum(n for _, n in came)
            self._asked = dict(came[:1])
            return found

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        async with self._call("put", names) as counts:
            errors = await self._store.put(names, objects)
            counts.nbytes += sum(len(data) for data, error in zip(objects, errors, strict=True) if error is None)
            return errors

    async def delete(self, names: Sequence[str]) -> None:
        async with self._call("delete", names):
            await self._store.delete(names)

    async def listing(self, prefix: str) -> AsyncIterator[Listed]:
        found: AsyncIterator[Listed] | None = None
        while True:
            async with self._call("list"):
                found = found or self._store.listing(prefix)
                listed = await anext(found, None)
            if listed is None:
                return
            yield listed

    async def probe(self) -> None:
        """Tests a store whose reads fail. Raises RemoteError if they still fail."""
        if self._all.problem:
            await self.exists(["probe"])
        if self._own["get"].problem and self._asked:
            name, nbytes = next(iter(self._asked.items()))
            await self.get([name], [memoryview(bytearray(nbytes))])

    async def close(self) -> None:
        await self._store.close()

    @asynccontextmanager
    async def _call(self, operation: Operation, names: Sequence[str] = ()) -> AsyncIterator[Counts]:
        counts = self.counts[operation]
        own = self._own.get(operation)
        circuits = [self._all] if own is None else [self._all, own]
        for circuit in circuits:
            if circuit.shut:
                counts.refused += 1
                raise RemoteUnavailable(circuit.problem)
        tried = [circuit for circuit in circuits if circuit.problem]
        for circuit in tried:
            circuit.trying = True
        counts.calls += 1
        counts.failures += 1  # taken back on success
        started = self._clock()
        late = f"{operation}: no answer within {self._timeout_s:g} s"
        try:
            async with asyncio.timeout(self._timeout_s):
                yield counts
        except TimeoutError:  # three in a row would cost a caller three deadlines
            for circuit in circuits:
                circuit.fail(late, 1)
            raise RemoteUnavailable(late) from None
        except RemoteError as failed:
            if isinstance(failed, RemoteFull):
                self._all.succeed()
                self._own["put"].fail(str(failed), 1)
            elif failed.of_object and self._is_alone(operation, names):
                for circuit in tried:  # a call let through has not shown that the store works
                    circuit.fail(str(failed), FAILURES)
            elif isinstance(failed, RemoteUnavailable):
                for circuit in circuits:
                    circuit.fail(str(failed), FAILURES)
            elif operation != "list":  # some stores cannot list
                circuits[-1].fail(str(failed), 1)
            raise
        except Exception as unknown:
            _log.exception("a store raised an error that it should not: a bug operation=%s", operation)
            for circuit in circuits:
                circuit.fail(f"{operation}: {type(unknown).__name__}", FAILURES)
            raise RemoteUnavailable(f"{operation}: {type(unknown).__name__}") from unknown
        except asyncio.CancelledError:
            counts.failures -= 1
            for circuit in circuits:
                circuit.wait_in_vain(self._clock() - started, self._timeout_s, late)
            raise
        else:
            counts.failures -= 1
            self._failed.pop(operation, None)
            for circuit in circuits:
                circuit.succeed()
        finally:
            counts.seconds += self._clock() - started
            for circuit in tried:
                circuit.trying = False

    def _is_alone(self, operation: Operation, names: Sequence[str]) -> bool:
        """Whether only one object has failed since the last success. ``names``: objects of a call that failed whole."""
        failed = self._failed.setdefault(operation, set())
        failed.update(names[:2])
        return len(failed) < 2


class _Circuit:
    """A circuit. ``problem``: why it is open; None = closed. ``trying``: a call that was let through is running."""

    def __init__(self, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self.trying = False
        self._retry_at = 0.0
        self.succeed()

    @property
    def shut(self) -> bool:
        """Whether a call is turned away now."""
        return self.problem is not None and (self.trying or self._clock() < self._retry_at)

    def succeed(self) -> None:
        self.problem: str | None = None
        self._failures = 0
        self._waited_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    def fail(self, problem: str, limit: int) -> None:
        """Counts a failure. The ``limit``-th in a row opens the circuit; a failed call let through keeps it open."""
        self._failures += 1
        if self.trying or (self.problem is None and self._failures >= limit):
            self.problem = problem
            self._retry_at = self._clock() + self._backoff_s * (1 + self._chance()) / 2
            self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def wait_in_vain(self, seconds: float, limit_s: float, problem: str) -> None:
        """Notes that a caller gave its call up after ``seconds``. Waits since the last answer count as a failure when
        their sum reaches ``limit_s``: otherwise a silent store would cost callers with short deadlines all their
        time."""
        self._waited_s += seconds
        if self.trying or self._waited_s >= limit_s:
            self._waited_s = 0.0
            self.fail(problem, 1)
