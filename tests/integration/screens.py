"""What is on a screen of textual's: the lines of its picture."""

from __future__ import annotations

import html
import re

_CELL = 12.2
"""Width of a column in the picture."""


def lines_on(picture: str) -> list[str]:
    """Of the SVG, from the top down; lines without any text are left out."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*clip-path[^>]*>(.*?)</text>', picture):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = []
    for _, parts in sorted(rows.items()):
        line = ""
        for x, text in sorted(parts):
            line = line.ljust(round(x / _CELL)) + text
        lines.append(line.rstrip())
    return lines
