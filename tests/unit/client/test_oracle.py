"""A small oracle: what one prefix-LRU of N blocks would hit of the trace in ``examples/traces``.

Hits are counted before insertion, prefix hits only; a request's blocks are touched tail first, so that prefixes outlive
their tails.
"""

from collections import OrderedDict
from pathlib import Path

import pytest

from kvtier.replay.trace import Request, read

EXTRACT = Path(__file__).parents[3] / "examples/traces/conversation-extract.jsonl"
RATIOS = {200: 0.037, 1_000: 0.038, 5_000: 0.096, 7_500: 0.151}


def prefix_lru_hits(requests: list[Request], blocks: int) -> int:
    recency: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += next((n for n, block in enumerate(request) if block not in recency), len(request))
        for block in reversed(request):
            recency[block] = None
            recency.move_to_end(block)
        while len(recency) > blocks:
            recency.popitem(last=False)
    return hits


async def test_the_oracle_reaches_its_pinned_ratios() -> None:
    requests = await read(EXTRACT)
    references = sum(len(request) for request in requests)
    ratios = {blocks: prefix_lru_hits(requests, blocks) / references for blocks in RATIOS}
    assert ratios == pytest.approx(RATIOS, abs=0.0005)


def test_the_oracle_on_a_trace_small_enough_to_follow() -> None:
    requests = [(1, 2, 3), (1, 2, 4), (2, 3), (1, 5)]
    # With three blocks: 1 and 2 hit; 3 was evicted by 4, so 2 alone hits; 1 is still there. With two, 1 is not.
    assert prefix_lru_hits(requests, 3) == 2 + 1 + 1
    assert prefix_lru_hits(requests, 2) == 2 + 1 + 0
