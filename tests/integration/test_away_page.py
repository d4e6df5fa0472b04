"""docs/away.md says what happens while the daemon is away."""

from pathlib import Path

import pytest

from tests.integration.away import COMMON, COMMON_HEAD, OWN_HEAD, ROWS, WAYS, observed

LINES = [each for each in (Path(__file__).parents[2] / "docs/away.md").read_text().splitlines() if each.startswith("|")]
CELLS = {name: cells for name, *cells in (each[2:-2].split(" | ") for each in LINES if "---" not in each)}


def test_the_tables_have_each_row_once():
    assert sorted(CELLS) == sorted([COMMON_HEAD[0], *COMMON, OWN_HEAD[0], *ROWS])
    assert len(LINES) == len(CELLS) + 2, "a row for each name, and a line under each of two heads"
    assert CELLS[OWN_HEAD[0]] == list(OWN_HEAD[1:])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.row}: {way.signal}")
async def test_the_rows_are_what_clients_and_an_engine_see(way, short_dir):
    told = [*(CELLS[name][0] for name in COMMON), *CELLS[way.row]]
    assert list((await observed(way, short_dir)).values()) == told, "run: python -m tests.integration.away"
