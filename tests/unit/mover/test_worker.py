"""Moves that wait take turns, a piece each."""

import pytest

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import Tier
from kvtierd.mover.runtime import CacheRuntime, CopyPiece
from kvtierd.mover.worker import WorkQueue
from tests.unit.mover.rig import make_runtime, move


@pytest.fixture(scope="module")
def runtime() -> CacheRuntime:
    return make_runtime({Tier.DEVICE: 16, Tier.HOST: 16}, EventSequencer())


def pieces(runtime: CacheRuntime, number: int, count: int) -> list[CopyPiece]:
    """A move of so many pieces of one block."""
    planned = move(number, Tier.DEVICE, Tier.HOST, [(slot, slot, slot) for slot in range(count)])
    return [CopyPiece(runtime, planned, place, (item,), 0) for place, item in enumerate(planned.items)]


def taken(waiting: WorkQueue) -> list[tuple[int, int]]:
    """(move, place) of all that wait, in their order."""
    found: list[tuple[int, int]] = []
    while (piece := waiting.get(wait=False)) is not None:
        found.append((piece.move.id, piece.first))
    return found


def test_a_small_move_waits_for_one_piece_of_a_large_one(runtime: CacheRuntime) -> None:
    waiting = WorkQueue(in_turn=True)
    waiting.put(pieces(runtime, 1, 4))
    waiting.put(pieces(runtime, 2, 1))
    waiting.put(pieces(runtime, 3, 2))
    assert taken(waiting) == [(1, 0), (2, 0), (3, 0), (1, 1), (3, 1), (1, 2), (1, 3)]


def test_who_comes_later_gets_a_turn_as_soon_as_the_others(runtime: CacheRuntime) -> None:
    waiting = WorkQueue(in_turn=True)
    waiting.put(pieces(runtime, 1, 5))
    first = [waiting.get(wait=True) for _ in range(2)]
    waiting.put(pieces(runtime, 2, 2))
    assert [piece.first for piece in first if piece is not None] == [0, 1]
    assert taken(waiting) == [(1, 2), (2, 0), (1, 3), (2, 1), (1, 4)]
