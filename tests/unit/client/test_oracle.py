"""A small oracle: what one prefix-LRU of N blocks would hit, with the figures that the replay is held against.

Hits are counted before insertion, prefix hits only; a request's blocks are touched tail first, so that prefixes outlive
their tails. Runs on the full trace where the checkout has it beside it, else on the extract in ``examples/traces``.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from kvtier.replay.trace import Request, read

REPO = Path(__file__).resolve().parents[3]
FULL = REPO.parent / "shared/traces/conversation_trace.jsonl"
EXTRACT = REPO / "examples/traces/conversation-extract.jsonl"

FULL_RATIOS = {1_000: 0.045, 5_000: 0.112, 7_500: 0.169, 10_000: 0.212}
EXTRACT_RATIOS = {200: 0.037, 1_000: 0.038, 5_000: 0.096, 7_500: 0.151}


def prefix_lru_hits(requests: list[Request], blocks: int) -> int:
    recency: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += next((n for n, block in enumerate(request.ids) if block not in recency), len(request.ids))
        for block in reversed(request.ids):
            recency[block] = None
            recency.move_to_end(block)
        while len(recency) > blocks:
            recency.popitem(last=False)
    return hits


async def test_the_oracle_reaches_its_pinned_ratios() -> None:
    full = FULL.exists()
    requests = await read(FULL if full else EXTRACT)
    references = sum(len(request.ids) for request in requests)
    pinned = FULL_RATIOS if full else EXTRACT_RATIOS
    ratios = {blocks: prefix_lru_hits(requests, blocks) / references for blocks in pinned}
    assert ratios == pytest.approx(pinned, abs=0.0005)


async def test_the_extract_is_the_head_of_the_trace_and_has_its_own_ratios() -> None:
    extract = await read(EXTRACT)
    assert len(extract) == 1_000
    assert sum(len(request.ids) for request in extract) == 27_305
    ratios = {blocks: prefix_lru_hits(extract, blocks) / 27_305 for blocks in EXTRACT_RATIOS}
    assert ratios == pytest.approx(EXTRACT_RATIOS, abs=0.0005)
    if FULL.exists():
        assert await read(FULL, 1_000) == extract


async def test_every_id_of_the_extract_has_one_parent() -> None:
    extract = await read(EXTRACT)
    parents: dict[int, int | None] = {}
    for request in extract:
        for parent, block in zip((None, *request.ids), request.ids, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_the_oracle_on_a_trace_small_enough_to_follow() -> None:
    requests = [Request((1, 2, 3)), Request((1, 2, 4)), Request((2, 3)), Request((1, 5))]
    # With three blocks: 1 and 2 hit; 3 was evicted by 4, so 2 alone hits; 1 is still there. With two, 1 is not.
    assert prefix_lru_hits(requests, 3) == 2 + 1 + 1
    assert prefix_lru_hits(requests, 2) == 2 + 1 + 0
