"""docs/away.md says what happens while the daemon is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.away import HEAD, WAYS, observed

LINES = [each for each in (Path(__file__).parents[2] / "docs/away.md").read_text().splitlines() if each.startswith("|")]
COLUMNS = [
    list(column) for column in zip(*(each[2:-2].split(" | ") for each in LINES if "---" not in each), strict=True)
]


def test_the_table_has_a_column_for_each_way():
    assert COLUMNS[0] == list(HEAD)
    assert len(COLUMNS) == 1 + len(WAYS)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.signal} {way.daemon.strip('`')}")
async def test_a_column_is_what_clients_and_an_engine_see(way, short_dir):
    assert await observed(way, short_dir) in COLUMNS, "run: python -m tests.integration.away"
