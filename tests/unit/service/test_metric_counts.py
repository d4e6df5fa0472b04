"""What is counted while things happen, without a daemon."""

from __future__ import annotations

import asyncio
import gc
import time
from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.service.metrics.counting import GcPauses, Histogram, TimedSelector
from kvtierd.service.metrics.exposition import families
from kvtierd.service.metrics.table import METRICS

bounds = st.lists(st.floats(0, 100), min_size=1, max_size=8, unique=True).map(sorted)


@given(bounds, st.lists(st.floats(0, 200), max_size=50))
def test_a_histogram_counts_what_is_at_most_each_bound(limits: list[float], values: list[float]) -> None:
    histogram = Histogram(limits)
    for value in values:
        histogram.observe(value)
    counts = histogram.read()
    below = [bisect_right(sorted(values), limit) for limit in limits]
    assert counts.buckets == (*zip(map(str, limits), below, strict=True), ("+Inf", len(values)))
    assert abs(counts.total - sum(values)) < 1e-6


def test_names_are_used_once_and_every_metric_has_a_family() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert [family.name for family in families(())] == [metric.name.removesuffix("_total") for metric in METRICS]


def test_a_loop_s_long_turn_is_seen() -> None:
    selector = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(_hold_up(0.03))
    buckets = dict(selector.turns.read().buckets)
    assert buckets["+Inf"] - buckets["0.025"] >= 1
    assert selector.turns.read().total >= 0.03


async def _hold_up(seconds: float) -> None:
    await asyncio.sleep(0)
    time.sleep(seconds)  # noqa: ASYNC251 - a callback that takes too long
    await asyncio.sleep(0)


def test_collections_are_counted_by_generation() -> None:
    pauses = GcPauses()
    pauses.start()
    try:
        gc.collect(1)
        gc.collect(2)
    finally:
        pauses.stop()
    counts = [dict(each.read().buckets)["+Inf"] for each in pauses.by_generation]
    assert counts[1] >= 1 and counts[2] >= 1
    before = counts[2]
    gc.collect()
    assert dict(pauses.by_generation[2].read().buckets)["+Inf"] == before
