"""The tables of docs/events.md, for tests that hold them against what there is and what happens."""

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "events.md"


@cache
def table(first_column: str) -> list[list[str]]:
    """Cells of each row of the one table whose first column has this head."""
    lines = PAGE.read_text().splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def names(cell: str) -> list[str]:
    """What stands in it as code."""
    return re.findall(r"`([^`]+)`", cell)


@cache
def told() -> frozenset[tuple[str, str]]:
    """Every type and cause that may come together."""
    return frozenset((kind, names(row[0])[0]) for row in table("cause") for kind in names(row[2]))
