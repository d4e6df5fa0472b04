"""One frame in plain text, for scripts and logs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from kvtier.cli.top import panes
from kvtier.cli.top.feed import Answer, Feed
from kvtier.cli.top.frame import Frame
from kvtier.cli.top.history import History
from kvtier.cli.top.tables import TABLES, summary

ROWS_SHOWN: Final = 20


async def frame_of(feed: Feed, interval: float, first: Answer, cache: str | None) -> Frame:
    """Looks a second time after the interval, since rates take two."""
    history = History()
    history.add(first.stats, first.received)
    await asyncio.sleep(interval)
    second = await feed.ask()
    history.add(second.stats, second.received)
    return Frame(feed.address, interval, second.stats, history.minute, second.leases, cache)


def text_of(frame: Frame, columns: int) -> str:
    """No line is longer than so many columns."""
    parts = [pane(frame, columns).plain for pane in (panes.head, panes.tiers, panes.moves, panes.hits)]
    parts += ["\n".join(_table_lines(frame, number, columns)) for number in range(len(TABLES))]
    lines = "\n\n".join(parts).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _table_lines(frame: Frame, number: int, columns: int) -> Iterator[str]:
    table = TABLES[number]
    rows = table.lines(frame, table.sort, columns).plain.splitlines()
    yield summary(table, frame)
    yield table.heading(table.sort, columns).plain
    yield from rows[:ROWS_SHOWN]
    if len(rows) > ROWS_SHOWN:
        yield f"and {len(rows) - ROWS_SHOWN} more"
