"""docs/away.md says what happens while the daemon is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.away import HEAD, WAYS, line, observed

TABLE = [each for each in (Path(__file__).parents[2] / "docs/away.md").read_text().splitlines() if each.startswith("|")]


def test_the_table_has_a_row_for_each_way():
    assert TABLE[0] == line(HEAD)
    assert len(TABLE) == 2 + len(WAYS)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.signal} {way.daemon.strip('`')}")
async def test_a_row_is_what_clients_and_an_engine_see(way, short_dir):
    assert line(await observed(way, short_dir)) in TABLE, "run: python -m tests.integration.away"
