"""``kvtier top``: from counts to rates, over restarts, caches that come and go, and counters that fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.top.counters import Counters, Moved
from kvtier.cli.top.frame import Frame, Leases
from kvtier.cli.top.history import WINDOW_S, History, Minute
from kvtier.stats import CacheStats, DaemonStats, EdgeStats, TierStats
from kvtier.types import Tier

EDGE = "device>host"


def cache(name: str = "llama", *, number: int = 1, blocks: int = 0, hits: int = 0, misses: int = 0) -> CacheStats:
    """``blocks``: moved down, 10 bytes each, and stored."""
    edges = (EdgeStats(EDGE, blocks, 10 * blocks, 0, 3, 0, 0, degraded=False),) if blocks else ()
    return CacheStats(number, name, 0, (), edges, hits, 0, 0, misses, blocks, 0, 0, ())


def stats(uptime: float, *caches: CacheStats, boot: int = 1, events: int = 0) -> DaemonStats:
    return DaemonStats("0", 99, 1, boot, 0, events, 0, caches, (), (), uptime_ns=round(uptime * 1e9))


def after(*looks: tuple[DaemonStats, float]) -> Minute:
    history = History()
    for seen, received in looks:
        history.add(seen, received)
    return history.minute


def moved(counters: Counters) -> float:
    return counters.moved.get(EDGE, Moved()).blocks


def test_a_rate_is_a_difference_over_the_daemon_s_own_time() -> None:
    """The second answer came late; what it counts did not happen more slowly for that."""
    minute = after((stats(10, cache(blocks=100), events=5), 1000.0), (stats(12, cache(blocks=400), events=25), 1009.0))
    change = minute.latest()
    assert change is not None
    assert (change.seconds, change.rate(change.counters.moved[EDGE].blocks), change.rate(change.events)) == (2, 150, 10)
    assert change.rate(change.counters.moved[EDGE].bytes) == 1500
    assert minute.whole() == change


def test_one_look_tells_no_rate() -> None:
    minute = after((stats(10, cache(blocks=100)), 1000.0))
    assert minute.latest() is None
    assert minute.whole() is None
    assert set(minute.series(20, moved)) == {None}
    assert Minute().series(20, moved) == [None] * 20


def test_a_restart_is_not_a_fall_and_what_was_before_it_stays() -> None:
    looks = [(stats(10, cache(blocks=100)), 1000.0), (stats(11, cache(blocks=200)), 1001.0)]
    restarted = after(*looks, (stats(1, cache(blocks=7), boot=2), 1005.0))
    assert restarted.latest() is None
    whole = restarted.whole()
    assert whole is not None
    assert whole.counters.moved[EDGE].blocks == 100
    again = after(
        *looks, (stats(1, cache(blocks=7), boot=2), 1005.0), (stats(2, cache(blocks=57), boot=2), 1006.0)
    ).latest()
    assert again is not None
    assert again.rate(again.counters.moved[EDGE].blocks) == 50


def test_the_time_without_a_daemon_is_a_blank_not_a_zero() -> None:
    minute = after(
        (stats(10, cache(blocks=0)), 1000.0),
        (stats(11, cache(blocks=60)), 1001.0),
        (stats(1, cache(), boot=2), 1031.0),
        (stats(2, cache(), boot=2), 1032.0),
    )
    series = minute.series(60, moved)
    assert [value for value in series if value is not None] == [60, 0]
    assert series[-1] == 0
    assert series.count(None) == 58


def test_a_counter_that_went_back_is_not_known_and_the_others_are() -> None:
    before = stats(1, cache("llama", blocks=100), cache("qwen", number=2, blocks=10))
    now = stats(2, cache("llama", blocks=20), cache("qwen", number=2, blocks=15))
    minute = after((before, 0.0), (now, 1.0))
    assert minute.latest("llama") is None
    assert (minute.latest("qwen") or pytest.fail()).counters.moved[EDGE].blocks == 5
    assert (minute.latest() or pytest.fail()).counters.moved[EDGE].blocks == 5


def test_another_cache_of_the_same_name_does_not_go_on_where_that_one_stopped() -> None:
    minute = after((stats(1, cache(number=1, blocks=100)), 0.0), (stats(2, cache(number=2, blocks=300)), 1.0))
    assert minute.latest("llama") is None


def test_a_cache_that_was_not_there_has_no_rate_at_once() -> None:
    """It may have been there all the time, for somebody with other rights."""
    minute = after((stats(1), 0.0), (stats(2, cache(blocks=1000)), 1.0))
    assert minute.latest("llama") is None
    assert (minute.latest() or pytest.fail()).counters == Counters(dict.fromkeys(Tier, 0))


def test_an_edge_appears_with_its_first_move() -> None:
    minute = after((stats(1, cache()), 0.0), (stats(2, cache(blocks=4)), 1.0))
    assert (minute.latest() or pytest.fail()).counters.moved[EDGE] == Moved(4, 40)


def test_the_same_look_twice_is_one() -> None:
    look = stats(2, cache(blocks=4))
    minute = after((stats(1, cache()), 0.0), (look, 1.0), (look, 2.0))
    assert len(minute.spans) == 1
    assert minute.latest() is not None


Counts = st.lists(
    st.tuples(st.floats(0.01, 30), st.integers(0, 10**6), st.booleans(), st.floats(0, 3)), min_size=1, max_size=30
)


@given(Counts, st.sampled_from([10, 12, 20, 30, 60]))
def test_whatever_happens_no_rate_is_negative_and_what_is_drawn_is_what_was_counted(
    steps: Sequence[tuple[float, int, bool, float]], columns: int
) -> None:
    """Looks at any pace, answers that come late, restarts."""
    history = History()
    uptime, now, boot, blocks = 1.0, 1000.0, 1, 0
    history.add(stats(uptime, cache(), boot=boot), now)
    for seconds, risen, restarts, late in steps:
        now += seconds
        uptime, boot, blocks = (0.5, boot + 1, 0) if restarts else (uptime + seconds, boot, blocks + risen)
        history.add(stats(uptime, cache(blocks=blocks), boot=boot), now + late)
    minute = history.minute
    assert all(span.seconds > 0 for span in minute.spans)
    series = minute.series(columns, moved)
    assert len(series) == columns
    assert all(value is None or value >= 0 for value in series)
    whole = minute.whole()
    if whole is None:
        assert set(series) == {None}
        return
    most = max(moved(span.caches["llama"]) / span.seconds for span in minute.spans)
    assert all(value is None or value <= most * (1 + 1e-6) for value in series)
    width = WINDOW_S / columns
    first = (ceil((minute.at or 0) / width) - columns) * width
    if all(first <= span.start for span in minute.spans) and not any(restarts for _, _, restarts, _ in steps):
        covered = sum(value * _known(minute, first + step * width, width) for step, value in enumerate(series) if value)
        assert covered == pytest.approx(whole.counters.moved.get(EDGE, Moved()).blocks, rel=1e-6, abs=1e-6)


def _known(minute: Minute, start: float, width: float) -> float:
    overlaps = (min(span.end, start + width) - max(span.start, start) for span in minute.spans)
    return sum(max(0.0, overlap) for overlap in overlaps)


def test_no_more_than_a_minute_is_remembered() -> None:
    history = History()
    for second in range(1000):
        history.add(stats(second + 1, cache(blocks=second)), float(second))
    assert len(history.minute.spans) == WINDOW_S
    assert (history.minute.whole() or pytest.fail()).seconds == WINDOW_S


def test_all_caches_together_are_sums_but_a_queue_is_everybody_s() -> None:
    tier = TierStats(Tier.HOST, 10, 2, 1, 1, 4, 1, 1, 0, 3, clean=5)
    one = replace(cache("llama", blocks=5), tiers=(tier,))
    other = replace(cache("qwen", number=2, blocks=7), tiers=(tier, replace(tier, tier=Tier.DISK)))
    frame = Frame("/run", 1.0, stats(1, one, other), Minute(), Leases())
    assert [(each.tier, each.capacity, each.clean) for each in frame.tiers] == [(Tier.HOST, 20, 10), (Tier.DISK, 10, 5)]
    (edge,) = frame.edges
    assert (edge.blocks, edge.bytes, edge.queued_blocks) == (12, 120, 3)
    assert [each.edge for each in replace(frame, cache="llama").edges] == [EDGE]
    assert replace(frame, cache="llama").edges[0].blocks == 5
