"""A long chain goes in pieces: each is filled while the one before it is stored, and stored after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from kvtier import BlockResult, Cache, LeaseLost, Tier
from kvtier.arrays import Filled, Piece, put
from kvtier.retention import BlockRetention
from kvtier.tensors import Bytes, Row

OK, MISSING = BlockResult.OK, BlockResult.PARENT_MISSING
KEYS = [bytes([number]) * 32 for number in range(10)]
WHOLE = Piece(KEYS, [cast(Bytes, None)] * len(KEYS), None, BlockRetention(), None)


@dataclass(slots=True, frozen=True)
class SomeCache:
    tier_slots: int

    def slots(self, tier: Tier) -> int:
        return self.tier_slots


class Noted:
    """Notes what begins and ends. A commit goes on in later turns of the loop; ``answers``: what comes of each."""

    max_blocks = 100

    def __init__(self, *, fills_ahead: bool = True, answers: Sequence[BlockResult | Exception] = ()) -> None:
        self.fills_ahead = fills_ahead
        self.answers = list(answers)
        self.said: list[str] = []
        self.out: set[int] = set()
        self.third = asyncio.Event()
        """The commit of block 3 has begun."""

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        return await (await self.fill(tier, piece, timeout)).commit()

    async def fill(self, tier: Tier, piece: Piece, timeout: float | None) -> Filled:
        first = KEYS.index(piece.chain[0])
        assert piece.parent == (KEYS[first - 1] if first else None)
        self.said.append(f"fill {first}")
        self.out.add(first)
        for _ in range(3):
            await asyncio.sleep(0)
        return NotedPiece(self, first, len(piece.chain))

    async def get(
        self, tier: Tier, chain: Sequence[bytes], targets: Sequence[Row] | None, timeout: float | None
    ) -> list[Row]:
        raise AssertionError("not asked for")


@dataclass(slots=True, frozen=True)
class NotedPiece:
    way: Noted
    first: int
    count: int

    async def commit(self) -> list[BlockResult]:
        self.way.said.append(f"commit {self.first}")
        if self.first == 3:
            self.way.third.set()
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        finally:
            self.way.out.discard(self.first)
        answer = self.way.answers.pop(0) if self.way.answers else OK
        if isinstance(answer, Exception):
            raise answer
        self.way.said.append(f"stored {self.first}")
        return [answer] * self.count

    async def give_up(self) -> None:
        self.way.out.discard(self.first)


async def putting(way: Noted, slots: int = 12) -> list[BlockResult]:
    return await put(cast(Cache, SomeCache(slots)), way, Tier.HOST, WHOLE, None)


async def test_a_piece_is_filled_while_the_one_before_it_is_stored() -> None:
    way = Noted()
    assert await putting(way) == [OK] * 10
    order = [word for word in way.said if not word.startswith("fill")]
    assert order == [f"{what} {first}" for first in (0, 3, 6, 9) for what in ("commit", "stored")]
    for first, following in ((0, 3), (3, 6), (6, 9)):
        assert way.said.index(f"fill {following}") < way.said.index(f"stored {first}")


async def test_a_chain_of_half_a_tier_goes_whole() -> None:
    way = Noted()
    assert await putting(way, 20) == [OK] * 10
    assert way.said == ["fill 0", "commit 0", "stored 0"]


@pytest.mark.parametrize(("way", "slots"), [(Noted(fills_ahead=False), 12), (Noted(), 3)], ids=["stream", "tiny tier"])
async def test_where_nothing_can_be_filled_ahead_nothing_is(way: Noted, slots: int) -> None:
    assert await putting(way, slots) == [OK] * 10
    step = slots // 2
    assert way.said == [f"{what} {n}" for n in range(0, 10, step) for what in ("fill", "commit", "stored")]


async def test_after_a_parent_is_missing_nothing_more_is_stored() -> None:
    way = Noted(answers=[OK, MISSING])
    assert await putting(way) == [OK] * 3 + [MISSING] * 7
    assert [word for word in way.said if word.startswith("commit")] == ["commit 0", "commit 3"]
    assert way.out == set()


async def test_a_piece_whose_lease_is_lost_is_filled_and_stored_again_before_the_next() -> None:
    way = Noted(answers=[OK, LeaseLost("gone", reason="LEASE_LOST")])
    assert await putting(way) == [OK] * 10
    assert [word for word in way.said if word.startswith("stored")] == ["stored 0", "stored 3", "stored 6", "stored 9"]
    assert way.said.count("fill 3") == 2


async def test_an_error_gives_up_what_was_filled_ahead() -> None:
    way = Noted(answers=[OK, KeyError()])
    with pytest.raises(KeyError):
        await putting(way)
    assert way.out == set()


async def test_who_is_cancelled_leaves_nothing() -> None:
    way = Noted()
    task = asyncio.ensure_future(putting(way))
    await way.third.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert way.out <= {6}, "a piece that is being filled gives itself up"
