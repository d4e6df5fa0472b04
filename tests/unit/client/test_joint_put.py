"""What a put into several window groups takes back where it fails late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest

from kvtier import BlockResult, TierFull
from kvtier.arrays import MAX_PIECE, Piece
from kvtier.joint import JointPut, Share
from kvtier.retention import BlockRetention
from kvtier.types import Tier
from kvtierd.service import validate

KEYS: Final = [number.to_bytes(32, "little") for number in range(2 * MAX_PIECE + 1)]


class LastRefused:
    """Stores every piece but the last."""

    max_blocks = MAX_PIECE
    fills_ahead = False

    async def fill(self, tier: Tier, piece: Piece, timeout: float | None) -> Any:
        if piece.chain[-1] == KEYS[-1]:
            raise TierFull("taken", reason="TIER_FULL", tier=tier, wanted=1, free=0, holders=())

        async def commit() -> list[BlockResult]:
            return [BlockResult.OK] * len(piece.chain)

        return SimpleNamespace(commit=commit)


async def test_more_than_a_call_takes_is_dropped_in_several() -> None:
    dropped: list[bytes] = []

    async def drop(keys: list[bytes], *, timeout: float | None) -> None:
        dropped.extend(validate.keys("keys", b"".join(keys)))

    spec = SimpleNamespace(groups=[SimpleNamespace(window_tokens=0)])
    cache: Any = SimpleNamespace(group=0, spec=spec, slots=lambda tier: len(KEYS), drop=drop)
    blocks: Any = [None] * len(KEYS)
    way: Any = LastRefused()
    share = Share(cache, Piece(KEYS, blocks, None, BlockRetention(), None))
    session: Any = None
    with pytest.raises(TierFull):
        await JointPut(session, lambda cache: way, [share], Tier.HOST, None).run()
    assert dropped == KEYS[:-1]
