"""Prints answers: tables for people, JSON or YAML for programs. Imports rich only for tables and bars."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import click

from kvtier.types import Tier, clean, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table

UNKNOWN: Final = "–"
KEPT: Final = "; kept in the store, which does not answer: the daemon tells the store later"

_UNCUT: Final = 1 << 16
"""Width in columns of an output that is no terminal: longer than any line."""


def show(form: str, value: Any, text: RenderableType) -> None:
    """Prints an answer: ``value`` as JSON or YAML, or ``text``."""
    if form == "table" and isinstance(text, str):
        click.echo("\n".join(map(clean, text.split("\n"))))
    elif form == "table":
        from rich.text import Text

        screen = console()
        with screen.capture() as lines:
            screen.print(text, soft_wrap=isinstance(text, Text), markup=False)
        click.echo(re.sub(" +\n", "\n", lines.get()), nl=False)  # cells are padded to the end of the line
    else:
        click.echo(json.dumps(value, indent=2) if form == "json" else "\n".join(yaml_lines(value)))


def yaml_lines(value: Any) -> Iterator[str]:
    """Yields a JSON value in YAML's block style. Strings are quoted as in JSON, which YAML accepts."""
    if isinstance(value, dict) and value:
        parts = [(f"{key if key.isidentifier() else json.dumps(key)}:", each) for key, each in value.items()]
    elif isinstance(value, list | tuple) and value:
        parts = [("-", each) for each in value]
    else:
        yield json.dumps(value, ensure_ascii=False)
        return
    for head, each in parts:
        lines = yaml_lines(each)
        if head != "-" and isinstance(each, dict | list | tuple) and each:
            yield head
            yield from (f"  {line}" for line in lines)
        else:
            yield f"{head} {next(lines)}"
            yield from (f"  {line}" for line in lines)


def plain(value: Any) -> dict[str, Any]:
    """Converts a dataclass to a dictionary for JSON, with tiers by name."""
    named = dataclasses.asdict(
        value, dict_factory=lambda pairs: {name: str(each) if isinstance(each, Tier) else each for name, each in pairs}
    )
    return cast(dict[str, Any], named)


def console() -> Console:
    """Returns a console on standard output. Lines are cut on a terminal only."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNCUT)


def progress_bar() -> Progress:
    """Returns a bar on standard error, to be used in a ``with`` block. Nothing is shown where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    errors = Console(stderr=True)
    return Progress(console=errors, transient=True, disable=not errors.is_terminal)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, left: Collection[str] = (), clip: str = ""
) -> Table:
    """Builds a table. Columns in ``left`` are aligned left, others right; a column without any text is left out. On a
    terminal that is too narrow the column ``clip`` is cut first; then the columns of ``left`` fold."""
    from rich.table import Table
    from rich.text import Text

    cells = list(rows)
    shown = [at for at in range(len(columns)) if any(row[at] != "" for row in cells)]
    clips = sys.stdout.isatty() and clip in (columns[at] for at in shown)
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan", expand=clips)
    for name in (columns[at] for at in shown):
        aligned = name in left
        made.add_column(
            name,
            justify="left" if aligned else "right",
            no_wrap=not aligned or name == clip,
            overflow="ellipsis" if name == clip else "fold",
            ratio=1 if clips and name == clip else None,
        )
    for row in cells:
        made.add_row(*(Text(clean(cell)) if isinstance(cell := row[at], str) else cell for at in shown))
    return made


def compact(nbytes: int) -> str:
    """Formats bytes without spaces, as on a command line: ``64KiB``."""
    return size(nbytes).replace(".0 ", "").replace(" ", "")


def nonzero(number: int) -> str:
    """Formats a cell that is empty for 0."""
    return str(number) if number else ""


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else UNKNOWN
