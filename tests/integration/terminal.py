"""A command on a terminal of its own, and what it draws there."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.test_cli import DEADLINE_S, KVTIER

_OF_OTHERS = ("NO_COLOR", "COLUMNS", "LINES")
"""Variables that speak of another terminal."""


class Terminal:
    """A pseudo-terminal with a ``kvtier`` command on it. ``drawn``: all that it has drawn and nobody waited for."""

    def __init__(self, *arguments: str, columns: int = 100) -> None:
        self.drawn = ""
        self._ours, self._its = pty.openpty()
        self.resize(columns)
        self._before = termios.tcgetattr(self._its)
        self.process = subprocess.Popen(
            # Its controlling terminal: else nobody would tell it of a resize, or of Ctrl-C.
            ["setsid", "--ctty", *KVTIER, *arguments],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env={
                **{key: value for key, value in os.environ.items() if key not in _OF_OTHERS},
                "TERM": "xterm-256color",
            },
        )

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def until(self, pattern: str) -> re.Match[str]:
        """Waits until it is drawn, and forgets what was drawn up to there."""
        limit = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.drawn)) is None:
            assert self.process.poll() is None, self.drawn
            self._read(limit)
        self.drawn = self.drawn[found.end() :]
        return found

    def ended(self) -> int:
        """The exit status, once all is written. The terminal must be as it was."""
        limit = time.monotonic() + DEADLINE_S
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            self._read(limit)
        assert termios.tcgetattr(self._its) == self._before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    def _read(self, limit: float) -> None:
        assert time.monotonic() < limit, self.drawn
        if select.select([self._ours], [], [], 0.05)[0]:
            self.drawn += os.read(self._ours, 65536).decode(errors="replace")


@contextmanager
def terminal(*arguments: str, columns: int = 100) -> Iterator[Terminal]:
    own = Terminal(*arguments, columns=columns)
    try:
        yield own
    finally:
        own.close()
