"""Where a watch's lines go: a file, a pipe, or a terminal with a status line below them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, TextIO

from kvtier.cli.watch_lines import cut

_CLEAR_BELOW: Final = "\r\x1b[J"
_UP: Final = "\x1b[A"
_FALLBACK_COLUMNS: Final = 80


class Output:
    """Writes whole lines and flushes each time, so that whoever reads a pipe sees what happened when it happens.

    On a terminal (``live``) a status line can stand below them; it is rewritten in the same write as what goes above.
    ``writing``: inside a write, which waits for as long as nobody reads.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal: Final = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.colour: Final = self.is_terminal and not os.environ.get("NO_COLOR")
        self.writing = False
        self._status = ""
        self._shown = 0

    def fileno(self) -> int:
        return self._stream.fileno()

    def columns(self) -> int | None:
        """Of the terminal, as wide as it is now; None where it is none."""
        if not self._stream.isatty():
            return None
        return os.get_terminal_size(self._stream.fileno()).columns or _FALLBACK_COLUMNS

    def lines(self, lines: Iterable[str]) -> None:
        if text := "".join(f"{line}\n" for line in lines):
            self._write(self._cleared() + text + self._drawn())

    def status(self, text: str) -> None:
        """Shows it on the terminal's last line, cut to what fits. Empty: takes the line away."""
        self._status = text
        if self.is_terminal:
            self._write(self._cleared() + self._drawn())

    def _cleared(self) -> str:
        """Takes the status line away. A terminal that became narrower has wrapped it."""
        if not self._shown:
            return ""
        rows = -(-self._shown // (self.columns() or _FALLBACK_COLUMNS))
        self._shown = 0
        return _UP * (rows - 1) + _CLEAR_BELOW

    def _drawn(self) -> str:
        # One column stays free: a line that fills the last one wraps on some terminals.
        text = cut(self._status, (self.columns() or _FALLBACK_COLUMNS) - 1) if self.is_terminal else ""
        self._shown = len(text)
        return text and (f"\x1b[7m{text}\x1b[0m" if self.colour else text)

    def _write(self, text: str) -> None:
        self.writing = True
        try:
            self._stream.write(text)
            self._stream.flush()
        finally:
            self.writing = False
