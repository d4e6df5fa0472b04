"""The parts of the screen that are always there, as lines: the head, tiers, moves and hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.text import Text

from kvtier.cli.top.counters import Counters, Moved
from kvtier.cli.top.frame import Frame
from kvtier.cli.top.history import Change
from kvtier.cli.top.numbers import UNKNOWN, bar, clock, count, left, rate, ratio, right, share, sparkline
from kvtier.stats import DaemonStats, EdgeStats, TierStats
from kvtier.types import Tier
from kvtier.words import clean, size

HEADING: Final = "bold cyan"
FAINT: Final = "bright_black"
ALARM: Final = "bold red"
WARNING: Final = "yellow"

KEYS: Final = (
    ("q", "quit"),
    ("?", "help"),
    ("p", "pause"),
    ("c", "cache"),
    ("tab", "table"),
    ("←→", "sort"),
    ("↑↓", "scroll"),
)
"""The most important ones first: there may not be room for all."""

PROBLEMS_SHOWN: Final = 3
_DEGRADED: Final = " DEGRADED"
_COLOURS: Final = {Tier.DEVICE: "green", Tier.HOST: "blue", Tier.DISK: "magenta"}
_SPARK_COLUMNS: Final = (60, 30, 20, 15, 12, 10)
"""Divisors of a minute, so that a column stands for the same time everywhere."""

Pane = Callable[[Frame, int], Text]
"""Lines of at most so many columns."""


def head(frame: Frame, columns: int) -> Text:
    stats = frame.stats
    first = f"kvtierd {stats.version}  {frame.address}  pid {stats.pid}  epoch {stats.epoch}  boot {stats.boot}"
    waiting = sum(cache.waiting for cache in frame.caches)
    shown = f"cache {frame.cache}" if frame.cache is not None else _of_caches(len(stats.caches))
    lines = [
        Text(left(f"{first}  up {clock(stats.uptime_ns / 1e9)}", columns), style="bold"),
        _joined([_condition(frame), Text(shown), Text(f"{count(waiting)} waiting for room")], columns),
        _joined(_stream(frame), columns),
    ]
    lines += [Text(left(f"problem: {clean(one)}", columns), style=ALARM) for one in stats.problems[:PROBLEMS_SHOWN]]
    more = len(stats.problems) - PROBLEMS_SHOWN
    if more > 0:
        lines.append(Text(f"and {more} more: kvtier status", style=ALARM))
    return _lines(lines, columns)


def _condition(frame: Frame) -> Text:
    if frame.trouble is not None:
        why, seconds = frame.trouble
        return Text(f"AWAY {clock(seconds)}: {clean(why)}", style=ALARM)
    if frame.paused:
        return Text("PAUSED", style="bold yellow")
    problems = len(frame.stats.problems)
    return (
        Text(f"{problems} PROBLEMS" if problems > 1 else "1 PROBLEM", ALARM) if problems else Text("healthy", "green")
    )


def _of_caches(number: int) -> str:
    return "all caches" if number != 1 else "1 cache"


def _stream(frame: Frame) -> list[Text]:
    stats, change = frame.stats, frame.minute.latest()
    events = rate(change.rate(change.events) if change is not None else None)
    lag = max((watcher.lag for watcher in stats.watcher_stats), default=0)
    behind = f", up to {count(lag)} behind" if lag else ""
    return [
        Text(f"{events} events/s, last {stats.last_event_id}"),
        Text(f"{stats.watchers} watching{behind}", style=WARNING if lag else ""),
        *_log(stats),
    ]


def _log(stats: DaemonStats) -> list[Text]:
    """How much of the events' log is used, and how far back it goes."""
    log = stats.event_log
    if log.failing:
        return [Text(f"log fails: {clean(log.failing)}", style=ALARM)]
    if not log.max_bytes:
        return [Text("no log", style=FAINT)]
    used = share(ratio(log.bytes, log.max_bytes))
    lost = [Text(f"{count(log.lost_events)} lost to it", style=ALARM)] if log.lost_events else []
    return [Text(f"log {used} of {size(log.max_bytes)}"), *lost, Text(f"back {clock(log.oldest_age_ns / 1e9)}")]


def tiers(frame: Frame, columns: int) -> Text:
    """A slot counts as used where it is neither free nor out of circulation for good."""
    fill = max(6, min(40, columns - 50))
    numbers = _titles((" ", 6), ("SLOTS", 7), ("HELD", 6), ("FREE", 6), ("CLEAN", 6), ("OUT", 5))
    titles = [left("TIER", 7), left("READY", fill), *numbers]
    lines = [_tier(tier, fill) for tier in frame.tiers]
    return _lines(lines or [Text(no_cache(frame), style=FAINT)], columns, titles)


def _tier(tier: TierStats, fill: int) -> Text:
    ready = ratio(tier.ready, tier.capacity)
    lost = tier.orphaned + tier.quarantined
    line = Text(left(str(tier.tier), 7))
    line.append(" ").append(bar(ready or 0.0, fill), style=_COLOURS[tier.tier])
    line.append(f" {right(share(ready), 6)} {right(count(tier.capacity), 7)} {right(count(tier.held), 6)}")
    line.append(f" {right(count(tier.free), 6)} {right(share(ratio(tier.clean, tier.capacity)), 6)}")
    return line.append(f" {right(count(lost), 5)}", style=ALARM if lost else "")


def moves(frame: Frame, columns: int) -> Text:
    """Of the edges along which there was anything to do."""
    edges = [edge for edge in frame.edges if edge.blocks or edge.failures or edge.queued_blocks or edge.degraded]
    room = columns - 48 - (len(_DEGRADED) if any(edge.degraded for edge in edges) else 0)
    spark = next((one for one in _SPARK_COLUMNS if one <= room), _SPARK_COLUMNS[-1])
    numbers = _titles(("BLOCKS/S", 8), ("BYTES/S", 10), ("1 MIN", 6), ("QUEUED", 6))
    titles = [left("MOVES", 13), left("LAST MINUTE", spark), *numbers]
    lines = [_edge(frame, edge, spark) for edge in edges]
    return _lines(lines or [Text("nothing has moved yet", style=FAINT)], columns, titles)


def _edge(frame: Frame, edge: EdgeStats, spark: int) -> Text:
    def moved(counters: Counters) -> Moved:
        return counters.moved.get(edge.edge, Moved())

    now, minute = frame.minute.latest(frame.cache), frame.minute.whole(frame.cache)
    speed = now.rate(moved(now.counters).bytes) if now is not None else None
    line = Text(left(edge.edge, 13), style=ALARM if edge.degraded else "")
    series = frame.minute.series(spark, lambda counters: moved(counters).blocks, frame.cache)
    line.append(" ").append(sparkline(series), style="cyan")
    for value, columns in (
        (rate(now.rate(moved(now.counters).blocks) if now is not None else None), 8),
        (size(speed) if speed is not None else UNKNOWN, 10),
        (rate(minute.rate(moved(minute.counters).blocks) if minute is not None else None), 6),
        (count(edge.queued_blocks), 6),
    ):
        line.append(f" {right(value, columns)}")
    return line.append(_DEGRADED if edge.degraded else "", style=ALARM)


def hits(frame: Frame, columns: int) -> Text:
    """Shares of the blocks that were looked for, by the fastest tier they were found in."""
    titles = _titles(*((str(tier).upper(), 8) for tier in Tier), ("MISSED", 8), ("BLOCKS/S", 9), ("HITS", 7))
    now, minute = frame.minute.latest(frame.cache), frame.minute.whole(frame.cache)
    lines = [
        _found("now", now.counters if now else Counters(), now),
        _found("last minute", minute.counters if minute else Counters(), minute),
        _found("since start", frame.counters, None),
    ]
    return _lines(lines, columns, [left("FOUND IN", 12), *titles])


def _found(when: str, counters: Counters, change: Change | None) -> Text:
    asked = counters.asked
    line = Text(left(when, 12))
    for tier in Tier:
        line.append(f" {right(share(ratio(counters.hits.get(tier, 0), asked)), 8)}", style=_COLOURS[tier])
    speed = rate(change.rate(asked)) if change is not None else ""
    line.append(f" {right(share(ratio(counters.misses, asked)), 8)} {right(speed, 9)}")
    return line.append(f" {right(share(counters.hit_share), 7)}", style="bold")


def keys(frame: Frame, columns: int) -> Text:
    line = Text(no_wrap=True)
    for key, does in KEYS:
        if line.cell_len + len(key) + len(does) + 4 <= columns:
            line.append(f" {key} ", style="reverse").append(f" {does} ")
    return line


def no_cache(frame: Frame) -> str:
    """Where there is none to show."""
    return "no cache is open" if frame.cache is None else f"cache {frame.cache} is not open"


def _titles(*columns: tuple[str, int]) -> list[str]:
    return [right(title, width) for title, width in columns]


def _joined(parts: list[Text], columns: int) -> Text:
    """As many of them as there is room for; the first one always."""
    line = parts[0]
    for part in parts[1:]:
        if line.cell_len + 3 + part.cell_len <= columns:
            line = Text.assemble(line, ("   ", ""), part)
    line.truncate(columns, overflow="ellipsis")
    return line


def _lines(lines: list[Text], columns: int, titles: Sequence[str] = ()) -> Text:
    """None longer than so many columns."""
    found = [Text(" ".join(titles), style=HEADING), *lines] if titles else lines
    for line in found:
        line.truncate(columns)
    return Text("\n", no_wrap=True).join(found)
