"""The tables below: caches, leases, watchers. Each can be sorted by any of its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from rich.text import Text

from kvtier.cli.top.counters import Counters
from kvtier.cli.top.frame import Frame
from kvtier.cli.top.numbers import age, count, left, rate, ratio, right, share
from kvtier.cli.top.panes import FAINT, HEADING, WARNING, no_cache
from kvtier.stats import CacheStats, LeaseInfo, WatcherStats
from kvtier.types import Tier
from kvtier.words import clean

Row = TypeVar("Row")


@dataclass(slots=True, frozen=True)
class Column(Generic[Row]):
    """``value``: what rows are sorted by. ``width``: 0 = all that is left. Text stands to the left and is sorted
    upwards, numbers to the right and the largest first."""

    title: str
    width: int
    value: Callable[[Row], Any]
    text: Callable[[Row], str]
    is_text: bool = False


@dataclass(slots=True, frozen=True)
class Table(Generic[Row]):
    """``sort``: the column that it is sorted by unless somebody chooses. ``noteworthy``: rows that stand out."""

    name: str
    columns: Sequence[Column[Row]]
    sort: int
    rows: Callable[[Frame], Sequence[Row]]
    noteworthy: Callable[[Row], bool]
    nothing: Callable[[Frame], str]

    def heading(self, sort: int, columns: int) -> Text:
        """The titles; the one that it is sorted by is marked."""
        line = Text(no_wrap=True)
        for number, (column, width) in enumerate(zip(self.columns, self._widths(columns), strict=True)):
            title = column.title + (("▲" if column.is_text else "▼") if number == sort else "")
            line.append((left if column.is_text else right)(title, width), style=HEADING).append(" ")
        line.truncate(columns)
        return line

    def lines(self, frame: Frame, sort: int, columns: int) -> Text:
        rows = list(self.rows(frame))
        if not rows:
            return Text(left(self.nothing(frame), columns), style=FAINT, no_wrap=True)
        chosen = self.columns[sort]
        rows.sort(key=chosen.value, reverse=not chosen.is_text)
        widths = self._widths(columns)
        return Text("\n", no_wrap=True).join(self._line(row, widths, columns) for row in rows)

    def _line(self, row: Row, widths: Iterable[int], columns: int) -> Text:
        cells = [
            (left if column.is_text else right)(column.text(row), width)
            for column, width in zip(self.columns, widths, strict=True)
        ]
        return Text(left(" ".join(cells), columns), style=WARNING if self.noteworthy(row) else "")

    def _widths(self, columns: int) -> list[int]:
        fixed = sum(column.width for column in self.columns) + len(self.columns) - 1
        open_ended = sum(column.width == 0 for column in self.columns)
        share_of_rest = max(8, (columns - fixed) // open_ended) if open_ended else 0
        return [column.width or share_of_rest for column in self.columns]


@dataclass(slots=True, frozen=True)
class CacheRow:
    """``recent``: what the last minute counted, and per second; None where that is not known."""

    cache: CacheStats
    recent: Counters | None
    stored: float | None
    removed: float | None

    def used(self, tier: Tier) -> float | None:
        """None where it does not have the tier."""
        return next((ratio(one.ready, one.capacity) for one in self.cache.tiers if one.tier is tier), None)

    @property
    def hit_share(self) -> float | None:
        return self.recent.hit_share if self.recent is not None else None


def _cache_rows(frame: Frame) -> list[CacheRow]:
    rows = []
    for cache in frame.caches:
        change = frame.minute.whole(cache.name)
        rows.append(
            CacheRow(
                cache,
                change.counters if change is not None else None,
                change.rate(change.counters.stored) if change is not None else None,
                change.rate(change.counters.removed) if change is not None else None,
            )
        )
    return rows


def _known(number: float | None) -> float:
    return number if number is not None else -1.0


def _used(tier: Tier) -> Column[CacheRow]:
    return Column(str(tier).upper(), 7, lambda row: _known(row.used(tier)), lambda row: share(row.used(tier)))


CACHES: Final[Table[CacheRow]] = Table(
    name="caches",
    columns=(
        Column("CACHE", 0, lambda row: row.cache.name, lambda row: row.cache.name, is_text=True),
        Column("BLOCKS", 7, lambda row: row.cache.blocks, lambda row: count(row.cache.blocks)),
        *(_used(tier) for tier in Tier),
        Column("HITS", 6, lambda row: _known(row.hit_share), lambda row: share(row.hit_share)),
        Column("NEW/S", 6, lambda row: _known(row.stored), lambda row: rate(row.stored)),
        Column("GONE/S", 7, lambda row: _known(row.removed), lambda row: rate(row.removed)),
        Column("WAIT", 5, lambda row: row.cache.waiting, lambda row: count(row.cache.waiting)),
    ),
    sort=1,
    rows=_cache_rows,
    noteworthy=lambda row: row.cache.waiting > 0,
    nothing=no_cache,
)


def _no_leases(frame: Frame) -> str:
    if not frame.leases.refused:
        return "nobody holds anything"
    held = sum(session.leases for session in frame.stats.sessions)
    return f"{held} in the caches that you administer; which they are is not told: {clean(frame.leases.refused)}"


def _state(lease: LeaseInfo) -> str:
    return "orphaned" if lease.orphaned else "live"


LEASES: Final[Table[LeaseInfo]] = Table(
    name="leases",
    columns=(
        Column("AGE", 10, lambda lease: lease.age_ns, lambda lease: age(lease.age_ns)),
        Column("PID", 8, lambda lease: lease.pid, lambda lease: str(lease.pid)),
        Column("BLANK", 6, lambda lease: lease.blank_slots, lambda lease: count(lease.blank_slots)),
        Column("HELD", 6, lambda lease: lease.held_blocks, lambda lease: count(lease.held_blocks)),
        Column("TIER", 6, lambda lease: lease.tier, lambda lease: str(lease.tier), is_text=True),
        Column("CACHE", 14, lambda lease: lease.cache, lambda lease: lease.cache, is_text=True),
        Column("STATE", 8, lambda lease: not lease.orphaned, _state, is_text=True),
        Column("COMMAND", 0, lambda lease: lease.command, lambda lease: clean(lease.command), is_text=True),
    ),
    sort=0,
    rows=lambda frame: frame.held_leases,
    noteworthy=lambda lease: lease.orphaned,
    nothing=_no_leases,
)


def _no_watchers(frame: Frame) -> str:
    others = frame.stats.watchers
    return f"{others} whose sessions you may not see" if others else "nobody watches"


WATCHERS: Final[Table[WatcherStats]] = Table(
    name="watchers",
    columns=(
        Column("BEHIND", 8, lambda watcher: watcher.lag, lambda watcher: count(watcher.lag)),
        Column("SESSION", 8, lambda watcher: watcher.session_id, lambda watcher: str(watcher.session_id)),
        Column("PID", 8, lambda watcher: watcher.pid, lambda watcher: str(watcher.pid)),
        Column("UID", 8, lambda watcher: watcher.uid, lambda watcher: str(watcher.uid)),
        Column("COMMAND", 0, lambda watcher: watcher.command, lambda watcher: clean(watcher.command), is_text=True),
    ),
    sort=0,
    rows=lambda frame: frame.stats.watcher_stats,
    noteworthy=lambda watcher: watcher.lag > 0,
    nothing=_no_watchers,
)

TABLES: Final[tuple[Table[Any], ...]] = (CACHES, LEASES, WATCHERS)


def summary(table: Table[Any], frame: Frame) -> str:
    """``leases 3, 1 orphaned``: for the line that names the tables."""
    if table is CACHES:
        return f"caches {len(frame.caches)}"
    if table is WATCHERS:
        return f"watchers {frame.stats.watchers}"
    held = frame.held_leases
    orphaned = sum(lease.orphaned for lease in held)
    number = "?" if frame.leases.refused else str(len(held))
    return f"leases {number}" + (f", {orphaned} orphaned" if orphaned else "")
