"""Moves go in, results come out once, whatever the threads do."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, Tier
from kvtierd.core.outcome import Move, MoveResult
from kvtierd.mover.disk_io import concerns
from kvtierd.mover.edges import LANES, Edges
from kvtierd.mover.runtime import Batch, CacheRuntime, CopyPiece, Faults, Finish
from kvtierd.mover.work import CarryOut, Concerns, items_of
from kvtierd.mover.worker import Lane
from tests.unit.mover.rig import make_runtime, move, mover_threads

DOWN = (Tier.DEVICE, Tier.HOST)
WRITE = (Tier.HOST, Tier.DISK)
RETIRE = (Tier.DISK, None)


class Desk:
    """Takes deliveries; keeps who got what in which turn."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[CacheId, list[MoveResult]]] = []

    def deliver(self, runtime: CacheRuntime, results: Sequence[MoveResult]) -> None:
        self.deliveries.append((runtime.id, list(results)))

    @property
    def results(self) -> list[MoveResult]:
        return [result for _, results in self.deliveries for result in results]


class Gate:
    """A batch's work that waits to be let through, and keeps what came."""

    def __init__(self, work: CarryOut = lambda batch: Faults()) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self.begun = threading.Semaphore(0)
        self._open = threading.Event()
        self._work = work

    def __call__(self, batch: Batch) -> Faults | Finish:
        self.batches.append([(move.id, item.src) for move, item in items_of(batch)])
        self.begun.release()
        assert self._open.wait(30)
        return self._work(batch)

    def open(self) -> None:
        self._open.set()

    def occupied(self, edges: Edges, first: Move, runtime: CacheRuntime) -> None:
        """Has the thread begin a move: what is submitted from now on queues up behind."""
        edges.submit(runtime, first)
        assert self.begun.acquire(timeout=30)


MakeEdges = Callable[..., Edges]


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
async def make_edges(desk: Desk) -> AsyncIterator[MakeEdges]:
    made: list[Edges] = []

    def make(lanes: Sequence[Lane] = LANES, stuck_after_s: float = 10.0) -> Edges:
        made.append(Edges(asyncio.get_running_loop(), desk.deliver, lanes, stuck_after_s))
        return made[-1]

    yield make
    for edges in made:
        assert await edges.stop(grace_s=60)
    assert mover_threads() == []


@pytest.fixture
def runtime() -> CacheRuntime:
    return make_runtime({Tier.DEVICE: 16, Tier.HOST: 16}, EventSequencer())


def lane(carry_out: CarryOut, *, threads: int = 1, blocks: int = 4) -> Lane:
    return Lane("test", (DOWN,), threads, blocks, carry_out)


def writer(carry_out: CarryOut) -> Lane:
    return Lane("test-writer", (WRITE, RETIRE), 1, 32, carry_out, concerns)


def numbered(number: int, slots: Sequence[int], edge: tuple[Tier, Tier | None] = DOWN) -> Move:
    return move(number, *edge, [(slot, slot, None if edge[1] is None else slot) for slot in slots])


async def test_a_move_in_pieces_is_reported_once_with_its_own_indices(
    make_edges: MakeEdges, desk: Desk, runtime: CacheRuntime
) -> None:
    def fail_some(batch: Batch) -> Faults:
        sources = [item.src for _, item in items_of(batch)]
        return Faults(
            failed=frozenset(place for place, source in enumerate(sources) if source in (1, 9)),
            corrupt=frozenset(place for place, source in enumerate(sources) if source == 6),
        )

    gate = Gate(fail_some)
    edges = make_edges([lane(gate)])
    gate.occupied(edges, numbered(1, range(10)), runtime)
    edges.submit(runtime, numbered(2, [12, 9]))  # shares a batch with the first one's last piece
    gate.open()
    await edges.idle()

    assert [len(batch) for batch in gate.batches] == [4, 4, 4]
    found = [(result.id, set(result.failed), set(result.corrupt)) for result in desk.results]
    assert found == [(1, {1, 9}, {6}), (2, {1}, set())]


async def test_what_waits_together_is_carried_out_together_in_order_and_bounded(
    make_edges: MakeEdges, runtime: CacheRuntime
) -> None:
    gate = Gate()
    edges = make_edges([lane(gate)])
    gate.occupied(edges, numbered(1, [0]), runtime)
    edges.submit(runtime, numbered(2, [1, 2]))
    edges.submit(runtime, numbered(3, [3]))
    edges.submit(runtime, numbered(4, [4, 5]))
    edges.submit(runtime, numbered(5, range(6, 12)))
    gate.open()
    await edges.idle()

    assert [[slot for _, slot in batch] for batch in gate.batches] == [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]


async def test_a_batch_holds_one_cache_and_a_delivery_too(make_edges: MakeEdges, desk: Desk) -> None:
    caches = [make_runtime({Tier.DEVICE: 4, Tier.HOST: 4}, EventSequencer(), cache=CacheId(c)) for c in (1, 2)]
    gate = Gate()
    edges = make_edges([lane(gate)])
    gate.occupied(edges, numbered(1, [0]), caches[0])
    edges.submit(caches[0], numbered(2, [1]))
    edges.submit(caches[1], numbered(1, [2]))  # move ids count per cache
    edges.submit(caches[0], numbered(3, [3]))
    assert (edges.in_flight(), edges.in_flight(CacheId(1)), edges.in_flight(CacheId(2))) == (4, 3, 1)
    gate.open()
    await edges.idle()

    assert [[slot for _, slot in batch] for batch in gate.batches] == [[0], [1], [2], [3]]
    by_cache = {c: [r.id for cache, results in desk.deliveries if cache == c for r in results] for c in (1, 2)}
    assert by_cache == {1: [1, 2, 3], 2: [1]}


async def test_a_slot_is_not_written_in_the_transaction_that_deletes_its_record(
    make_edges: MakeEdges, runtime: CacheRuntime
) -> None:
    gate = Gate()
    edges = make_edges([writer(gate)])
    gate.occupied(edges, numbered(1, [0], WRITE), runtime)
    edges.submit(runtime, numbered(2, [1, 2], RETIRE))
    edges.submit(runtime, numbered(3, [3, 4], WRITE))
    edges.submit(runtime, numbered(4, [2], WRITE))
    edges.submit(runtime, numbered(5, [5], WRITE))
    edges.submit(runtime, numbered(6, [5], RETIRE))
    gate.open()
    await edges.idle()

    assert [[number for number, _ in batch] for batch in gate.batches] == [[1], [2, 2, 3, 3], [4, 5], [6]]


async def test_an_exception_fails_the_batch_and_the_thread_goes_on(
    make_edges: MakeEdges, desk: Desk, runtime: CacheRuntime
) -> None:
    def fail_once(batch: Batch) -> Faults:
        if batch[0].move.id == 1:
            raise OSError(5, "the cable is out")
        return Faults()

    edges = make_edges([lane(fail_once)])
    edges.submit(runtime, numbered(1, [0, 1]))
    await edges.idle()
    edges.submit(runtime, numbered(2, [2]))
    await edges.idle()

    assert [result.failed for result in desk.results] == [{0, 1}, frozenset()]
    (problem,) = edges.problems()
    assert "the cable is out" in problem and "test" in problem
    assert edges.queued()[DOWN] == 0


async def test_a_stuck_call_shows_while_it_lasts(make_edges: MakeEdges, runtime: CacheRuntime) -> None:
    gate = Gate()
    edges = make_edges([lane(gate)], stuck_after_s=0.0)
    assert edges.problems() == []
    gate.occupied(edges, numbered(1, [0]), runtime)
    (problem,) = edges.problems()
    assert "stuck" in problem
    gate.open()
    await edges.idle()
    assert edges.problems() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_thread_shows(make_edges: MakeEdges, runtime: CacheRuntime) -> None:
    def broken(piece: CopyPiece) -> Concerns:
        raise RuntimeError("a rule of the lane itself is broken")

    gate = Gate()
    edges = make_edges([Lane("test", (DOWN,), 1, 4, gate, broken)])
    for number in range(1, 4):
        edges.submit(runtime, numbered(number, [number]))
    gate.open()
    for thread in mover_threads():
        await asyncio.to_thread(thread.join, 30)
    problems = edges.problems()
    assert problems and all("died" in problem for problem in problems)
