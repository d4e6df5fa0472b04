"""Copies between host and device with nothing of kvtier in between: page-locked memory and ``cuMemcpyAsync``."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeVar

from kvtier.abi.cuda.driver import Address, Copy, Driver, Event, Stream
from kvtier.abi.cuda.errors import CudaError, CudaUnavailable
from kvtier.errors import KvtierError

DOWN: Final = "device>host"
UP: Final = "host>device"
EDGES: Final = (DOWN, UP)
_STEP: Final = 32
"""Pieces that a paced load copies at a time each way."""
_PROBES: Final = 3

T = TypeVar("T")


class Bare:
    """``pieces`` of ``piece_bytes`` each way, in scattered places on both sides, between memory of its own.

    All calls are made by one thread, which keeps the device's context.
    """

    def __init__(self, thread: ThreadPoolExecutor, driver: Driver, piece_bytes: int, pieces: int) -> None:
        """For :func:`bare_copies`; on ``thread``. Raises :class:`kvtier.abi.cuda.errors.CudaError`."""
        self._thread: Final = thread
        self._driver: Final = driver
        self._whole: Final = piece_bytes * pieces
        self._ending: Final = threading.Event()
        self.way = "a call a piece"
        """How they are copied: the quickest that there is."""
        with ExitStack() as undo:
            self._streams: Final[dict[str, Stream]] = {}
            self._events: Final[dict[str, Event]] = {}
            self._copies: Final[dict[str, list[Copy]]] = {}
            self._one: Final[dict[str, Copy]] = {}
            for edge in EDGES:
                self._streams[edge] = stream = driver.stream()
                undo.callback(driver.drop_stream, stream)
                self._events[edge] = event = driver.event()
                undo.callback(driver.drop_event, event)
                host, device = driver.alloc_host(self._whole), driver.alloc(self._whole)
                undo.callback(driver.free_host, host)
                undo.callback(driver.free, device)
                target, source = (host, device) if edge == DOWN else (device, host)
                self._one[edge] = (target, source, self._whole)
                self._copies[edge] = _scattered(target, source, piece_bytes, pieces)
            undo.callback(self._wait, EDGES)
            self._undo: Final = undo.pop_all()
        self._choose()

    @property
    def ordinal(self) -> int:
        """The device's, among those that this process sees."""
        return self._driver.ordinal

    async def seconds(self, *edges: str) -> float:
        """From the first call until all pieces are where they belong, over one edge or both at once."""
        return await self._on_thread(lambda: self._timed(lambda: self._issue(edges), edges))

    async def one_copy(self, edge: str) -> float:
        """The same bytes in one piece: what the bus gives."""
        driver, stream = self._driver, self._streams[edge]
        return await self._on_thread(lambda: self._timed(lambda: driver.copy(*self._one[edge], stream), [edge]))

    @contextmanager
    def load(self, bytes_a_second: float) -> Iterator[Callable[[], float]]:
        """Copies both ways, so many bytes a second together, until the end of the block; then what is yielded says how
        many were copied a second. What could not be kept up with is not made up for."""
        self._ending.clear()
        pacing = self._thread.submit(self._pace, bytes_a_second)
        copied: list[float] = []
        try:
            yield lambda: copied[0]
        finally:
            self._ending.set()
            copied.append(pacing.result())

    def close(self) -> None:
        """On the thread."""
        self._undo.close()

    def _choose(self) -> None:
        """A call for all pieces is quicker where the driver has it and the pieces are small, or is not."""
        if not self._driver.features.batch_copy:
            return
        best: dict[str, float] = {}
        for way in ("a call a piece", "a call for all"):
            self.way = way
            best[way] = min(self._timed(lambda: self._issue(EDGES), EDGES) for _ in range(_PROBES))
        self.way = min(best, key=best.__getitem__)

    def _issue(self, edges: Sequence[str], first: int = 0, count: int | None = None) -> None:
        stop = None if count is None else first + count
        chosen = {edge: self._copies[edge][first:stop] for edge in edges}
        if self.way == "a call for all":
            for edge, copies in chosen.items():
                self._driver.copy_batch(copies, self._streams[edge])
            return
        copy = self._driver.copy
        for of_all_edges in zip(*chosen.values(), strict=True):  # so that both ways begin at once
            for edge, (target, source, nbytes) in zip(edges, of_all_edges, strict=True):
                copy(target, source, nbytes, self._streams[edge])

    def _timed(self, issue: Callable[[], None], edges: Sequence[str]) -> float:
        started = time.perf_counter()
        issue()
        self._wait(edges)
        return time.perf_counter() - started

    def _wait(self, edges: Sequence[str]) -> None:
        for edge in edges:
            self._driver.record(self._events[edge], self._streams[edge])
        for edge in edges:
            while not self._driver.done(self._events[edge]):
                pass

    def _pace(self, bytes_a_second: float) -> float:
        copies = self._copies[DOWN]
        count = min(_STEP, len(copies))
        step_bytes = 2 * count * copies[0][2]
        started = due = time.perf_counter()
        steps = 0
        while not self._ending.wait(max(0.0, due - time.perf_counter())):
            self._issue(EDGES, steps * count % (len(copies) - count + 1), count)
            self._wait(EDGES)
            steps += 1
            due = max(due + step_bytes / bytes_a_second, time.perf_counter())
        return steps * step_bytes / (time.perf_counter() - started)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@contextmanager
def bare_copies(device: str, piece_bytes: int, pieces: int) -> Iterator[Bare]:
    """``device``: as :meth:`kvtier.abi.cuda.driver.Driver.open` takes it. Raises :class:`KvtierError` (NO_GPU), which
    says what is missing."""
    with ThreadPoolExecutor(1, "bare copies") as thread:
        driver = thread.submit(_bound, device).result()
        try:
            bare = thread.submit(_made, thread, driver, piece_bytes, pieces).result()
            try:
                yield bare
            finally:
                thread.submit(bare.close).result()
        finally:
            thread.submit(driver.close).result()


def _bound(device: str) -> Driver:
    try:
        driver = Driver.open(device)
    except (CudaUnavailable, ValueError) as error:
        raise KvtierError(f"there is no GPU to measure: {error}", reason="NO_GPU") from error
    try:
        driver.bind()
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell
            driver.close()
        raise
    return driver


def _made(thread: ThreadPoolExecutor, driver: Driver, piece_bytes: int, pieces: int) -> Bare:
    try:
        return Bare(thread, driver, piece_bytes, pieces)
    except CudaError as error:
        raise KvtierError(f"bare copies cannot be made: {error}", reason="BENCH") from error


def _scattered(target: Address, source: Address, piece_bytes: int, pieces: int) -> list[Copy]:
    """Every piece of the source into some other place of the target."""
    rng = random.Random(1)
    read, written = (rng.sample(range(pieces), pieces) for _ in range(2))
    return [
        (Address(target + to * piece_bytes), Address(source + at * piece_bytes), piece_bytes)
        for to, at in zip(written, read, strict=True)
    ]
