"""A long chain is stored in pieces, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from kvtier import BlockResult, LeaseLost, Tier
from kvtier.buffers import Bytes, Row, Rows
from kvtier.copies import Piece, put
from kvtier.retention import BlockRetention

OK, MISSING = BlockResult.OK, BlockResult.PARENT_MISSING
KEYS = [bytes([number]) * 32 for number in range(10)]
WHOLE = Piece(KEYS, [cast(Bytes, None)] * len(KEYS), None, BlockRetention(), None)


class Noted:
    """Notes the first block of each piece. ``answers``: what comes of each."""

    max_blocks = 5

    def __init__(self, *answers: BlockResult | Exception) -> None:
        self.answers = list(answers)
        self.stored: list[int] = []

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        first = KEYS.index(piece.chain[0])
        assert piece.parent == (KEYS[first - 1] if first else None)
        self.stored.append(first)
        answer = self.answers.pop(0) if self.answers else OK
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(piece.chain)

    async def get(self, tier: Tier, chain: Sequence[bytes], targets: Rows | None, timeout: float | None) -> list[Row]:
        raise AssertionError("not asked for")


async def putting(way: Noted, slots: int = 6) -> list[BlockResult]:
    return await put(slots, way, Tier.HOST, WHOLE, None)


@pytest.mark.parametrize(("slots", "stored"), [(6, [0, 3, 6, 9]), (100, [0, 5]), (1, list(range(10)))])
async def test_a_piece_is_at_most_half_a_tier_and_one_call(slots: int, stored: list[int]) -> None:
    way = Noted()
    assert await putting(way, slots) == [OK] * 10
    assert way.stored == stored


async def test_after_a_parent_is_missing_nothing_more_is_stored() -> None:
    way = Noted(OK, MISSING)
    assert await putting(way) == [OK] * 3 + [MISSING] * 7
    assert way.stored == [0, 3]


async def test_a_piece_whose_lease_is_lost_is_stored_again_before_the_next() -> None:
    way = Noted(OK, LeaseLost("gone", reason="LEASE_LOST"))
    assert await putting(way) == [OK] * 10
    assert way.stored == [0, 3, 3, 6, 9]
