"""docs/away.md says what happens while the daemon is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.away import COMMON_HEAD, HEAD, WAYS, observed

LINES = [each for each in (Path(__file__).parents[2] / "docs/away.md").read_text().splitlines() if each.startswith("|")]
ROWS = {name: cells for name, *cells in (each[2:-2].split(" | ") for each in LINES if "---" not in each)}
COLUMNS = [
    list(column)
    for column in zip(*(ROWS[name] * len(WAYS) if len(ROWS[name]) == 1 else ROWS[name] for name in HEAD), strict=True)
]


def test_the_tables_have_each_row_once_and_a_column_for_each_way():
    assert sorted(ROWS) == sorted([COMMON_HEAD[0], *HEAD])
    assert len(LINES) == len(ROWS) + 2, "a row for each name, and a line under each of two heads"
    assert len(COLUMNS) == len(WAYS)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.signal} {way.daemon.strip('`')}")
async def test_a_column_is_what_clients_and_an_engine_see(way, short_dir):
    assert await observed(way, short_dir) in COLUMNS, "run: python -m tests.integration.away"
