"""``kvtier top``: a frame as lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvtier.cli.top import numbers, panes
from kvtier.cli.top.frame import Frame, Leases
from kvtier.cli.top.history import History
from kvtier.cli.top.once import text_of
from kvtier.cli.top.tables import CACHES, LEASES, TABLES, WATCHERS, Table
from kvtier.stats import (
    CacheStats,
    DaemonStats,
    EdgeStats,
    EventLogStats,
    LeaseInfo,
    SessionStats,
    TierStats,
    WatcherStats,
)
from kvtier.types import Tier
from kvtier.words import clean

HOSTILE = "python\x1b[2J\x07 引擎.py\nnext"


def cache(name: str, number: int, moved: int) -> CacheStats:
    return CacheStats(
        cache_id=number,
        name=name,
        blocks=250 + number,
        tiers=(
            TierStats(Tier.DEVICE, 200, 20, 5, 3, 150, 7, 11, 4, 16, clean=60),
            TierStats(Tier.DISK, 4_000_000, 0, 0, 0, 4_000_000, 0, 0, 0, 0),
        ),
        edges=(EdgeStats("device>host", moved, moved << 20, 0, 6, 0, 0, degraded=number == 2),),
        hits_device=30 * moved,
        hits_host=0,
        hits_disk=10 * moved,
        misses=10 * moved,
        stored=moved,
        removed=0,
        waiting=number,
        groups=(),
    )


def stats(uptime: int, moved: int) -> DaemonStats:
    return DaemonStats(
        version="0.1.0",
        pid=99,
        epoch=2,
        boot=3,
        start_time_ns=0,
        last_event_id=1234 + moved,
        watchers=2,
        caches=(cache("llama", 1, moved), cache("qwen", 2, 3 * moved)),
        sessions=(SessionStats(7, 4242, 1000, HOSTILE, attached=False, leases=3, held_slots=16),),
        problems=("the disk tier fails",),
        uptime_ns=uptime * 10**9,
        watcher_stats=(WatcherStats(7, 4242, 1000, HOSTILE, 12), WatcherStats(8, 4243, 1000, "router", 0)),
    )


def lease(age_s: int, cache: str, *, orphaned: bool = False) -> LeaseInfo:
    return LeaseInfo(age_s, cache, 0, Tier.DEVICE, 2, 0, orphaned, age_s * 10**9, 7, 4242, 1000, HOSTILE)


@pytest.fixture
def frame() -> Frame:
    history = History()
    history.add(stats(100, 10), 0.0)
    history.add(stats(102, 50), 2.0)
    leases = Leases((lease(3700, "llama", orphaned=True), lease(5, "qwen")))
    return Frame("/run/kvtier", 1.0, stats(102, 50), history.minute, leases)


def test_all_that_matters_is_said(frame: Frame) -> None:
    text = text_of(frame, 120)
    for part in (
        *("kvtierd 0.1.0", "/run/kvtier", "pid 99", "epoch 2", "boot 3", "up 0:01:42"),
        *("1 PROBLEM", "all caches", "20 events/s", "last 1284", "2 watching, up to 12 behind", "3 waiting for room"),
        "problem: the disk tier fails",
        "75.0%     400     32     40  30.0%    30",
        *("8.0M", "80", "80.0 MiB", "DEGRADED"),
        *("60.0%     0.0%    20.0%    20.0%", "4000", "since start"),
        *("caches 2", "leases 2, 1 orphaned", "watchers 2", "1:01:40", "5.0s", "4242", "引擎.py", "router"),
    ):
        assert part in text, (part, text)


def test_what_another_process_calls_itself_does_nothing_to_the_terminal(frame: Frame) -> None:
    text = text_of(frame, 120)
    assert all(character.isprintable() for line in text.splitlines() for character in line)
    assert "python?[2J? 引擎.py?next" in text
    assert "\x1b" not in clean(HOSTILE)


def test_one_cache_alone(frame: Frame) -> None:
    text = text_of(replace(frame, cache="llama"), 120)
    for part in ("cache llama", "1 waiting for room", "caches 1", "leases 1, 1 orphaned", "20.0 MiB"):
        assert part in text, (part, text)
    assert "qwen" not in text
    assert "DEGRADED" not in text
    gone = text_of(replace(frame, cache="gone"), 120)
    assert "cache gone is not open" in gone


def test_a_daemon_that_is_away_or_a_screen_that_stands_still_says_so(frame: Frame) -> None:
    away = panes.head(replace(frame, trouble=("no daemon answers", 65.0), paused=True), 120).plain
    assert "AWAY 0:01:05: no daemon answers" in away
    assert "PAUSED" in panes.head(replace(frame, paused=True), 80).plain
    healthy = replace(frame, stats=replace(frame.stats, problems=()))
    assert "healthy" in panes.head(healthy, 80).plain
    many = replace(frame, stats=replace(frame.stats, problems=tuple(f"trouble {n}" for n in range(9))))
    assert "and 6 more: kvtier status" in panes.head(many, 80).plain


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (EventLogStats(), "no log"),
        (
            EventLogStats(max_bytes=1 << 30, bytes=1 << 28, oldest_age_ns=3_600 * 10**9),
            "log 25.0% of 1.0 GiB   back 1:00:00",
        ),
        (EventLogStats(max_bytes=1 << 30, bytes=1 << 28, lost_events=7), "7 lost to it   back 0:00:00"),
        (EventLogStats(max_bytes=1 << 30, failing="no space\x1b"), "log fails: no space?"),
    ],
)
def test_the_log_of_events_is_told_of(frame: Frame, log: EventLogStats, said: str) -> None:
    assert said in panes.head(replace(frame, stats=replace(frame.stats, event_log=log)), 120).plain


def test_unknown_is_not_nothing() -> None:
    """After the first look there are no rates, and nothing was looked up."""
    history = History()
    empty = replace(stats(1, 0), problems=(), caches=(replace(cache("llama", 1, 0), hits_device=0),))
    history.add(empty, 0.0)
    frame = Frame("/run/kvtier", 1.0, empty, history.minute, Leases())
    assert f"{numbers.UNKNOWN} events/s" in panes.head(frame, 80).plain
    assert numbers.UNKNOWN in panes.moves(frame, 80).plain
    assert "since start         –        –        –        –                 –" in panes.hits(frame, 80).plain


def test_rows_are_sorted_by_any_column(frame: Frame) -> None:
    def first(table: Table[Any], sort: int) -> str:
        return table.lines(frame, sort, 120).plain.splitlines()[0]

    assert first(CACHES, 0).startswith("llama"), "text from a to z"
    assert first(CACHES, 1).startswith("qwen"), "the largest number first"
    assert "1:01:40" in first(LEASES, 0)
    assert "orphaned" in first(LEASES, 6), "what is wrong first"
    assert first(WATCHERS, 0).split()[0] == "12"
    for table in TABLES:
        for sort, column in enumerate(table.columns):
            assert f"{column.title}{'▲' if column.is_text else '▼'}" in table.heading(sort, 120).plain


def test_leases_and_watchers_that_are_not_told_are_said_not_to_be(frame: Frame) -> None:
    hidden = replace(
        frame, leases=Leases(refused="the right to admin"), stats=replace(frame.stats, watcher_stats=(), watchers=5)
    )
    text = text_of(hidden, 120)
    for part in ("leases ?", "3 in the caches that you administer", "the right to admin", "5 whose sessions"):
        assert part in text, (part, text)


@given(columns=st.integers(1, 220), cache=st.sampled_from([None, "llama", "gone"]))
def test_no_line_is_longer_than_the_screen_is_wide(columns: int, cache: str | None) -> None:
    history = History()
    history.add(stats(100, 10), 0.0)
    history.add(stats(102, 50), 2.0)
    frame = Frame("/run/" + "k" * 90, 1.0, stats(102, 50), history.minute, Leases((lease(9, "llama"),)), cache)
    lines = [pane(frame, columns).plain for pane in (panes.head, panes.tiers, panes.moves, panes.hits, panes.keys)]
    lines += [table.lines(frame, table.sort, columns).plain for table in TABLES]
    lines += [table.heading(table.sort, columns).plain for table in TABLES]
    assert [line for text in lines for line in text.splitlines() if cell_len(line) > columns] == []


def test_everything_above_the_tables_fits_a_small_terminal(frame: Frame) -> None:
    """Six edges are all that there are; of 24 lines some are left for rows."""
    edges = tuple(
        EdgeStats(f"{src}>{dst}", 1, 1, 0, 0, 0, 0, degraded=False) for src in Tier for dst in Tier if src is not dst
    )
    tiers = tuple(TierStats(tier, 1, 1, 0, 0, 0, 0, 0, 0, 0) for tier in Tier)
    full = replace(frame.stats, caches=(replace(frame.stats.caches[0], edges=edges, tiers=tiers),), problems=())
    shown = [pane(replace(frame, stats=full), 80).plain for pane in (panes.head, panes.tiers, panes.moves, panes.hits)]
    assert sum(len(text.splitlines()) for text in shown) <= 18
    assert all("…" not in text for text in shown), shown


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (9999, "9999"), (10_000, "10.0k"), (999_600, "1.0M"), (123_456_789, "123M")]
)
def test_counts_are_short(number: int, text: str) -> None:
    assert numbers.count(number) == text


@given(st.floats(0, 1e14, allow_nan=False))
def test_a_count_has_a_few_columns_and_is_about_right(number: float) -> None:
    text = numbers.count(number)
    assert len(text) <= 5
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1])
    assert (float(text[:-1]) * scale if scale else float(text)) == pytest.approx(number, rel=0.06, abs=0.5)


def test_little_is_not_nothing_and_nearly_all_not_all() -> None:
    assert (numbers.share(0.0), numbers.share(1e-9), numbers.share(1 - 1e-9), numbers.share(1.0)) == (
        *("0.0%", "0.1%"),
        *("99.9%", "100%"),
    )
    assert (numbers.bar(1e-9, 10), numbers.bar(1 - 1e-9, 10)) == ("█" + "░" * 9, "█" * 9 + "░")
    assert (numbers.rate(None), numbers.rate(0), numbers.rate(0.001), numbers.rate(3.25)) == ("–", "0", "<0.1", "3.2")
    assert numbers.sparkline([None, 0, 1, 1000]) == " ▁▂█"
    assert numbers.sparkline([0, 0]) == "▁▁"
    assert numbers.clock(90_061) == "1d 1:01:01"
    assert (numbers.age(59.9e9), numbers.age(59.99e9), numbers.age(2e6)) == ("59.9s", "0:00:59", "2.0ms")
