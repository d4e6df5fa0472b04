"""``kvtier top`` in a terminal of its own: it takes the screen, and gives it back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from tests.integration.daemon import DaemonProcess
from tests.integration.test_cli import DEADLINE_S, KVTIER

ENTERED, LEFT, CURSOR_BACK = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
_OF_OTHERS = ("NO_COLOR", "COLUMNS", "LINES")
"""Variables that speak of another terminal; a size that they name is taken for this one's, whatever becomes of it."""
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|[34]8;[25])(?:;\d+)*m")


class Terminal:
    """A process and what it writes to its terminal of 80 columns and 24 lines."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._ours, self._its = pty.openpty()
        self.resize(80, 24)
        self._before = termios.tcgetattr(self._its)
        environment = {key: value for key, value in os.environ.items() if key not in _OF_OTHERS}
        self.process = subprocess.Popen(
            command,
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env={**environment, "TERM": "xterm-256color", **variables},
            start_new_session=True,
        )
        self.written = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def shows(self, wanted: bytes) -> None:
        """Waits for something new on the screen that has this in it."""
        end, start = time.monotonic() + DEADLINE_S, len(self.written)
        while wanted not in self.written[start:]:
            assert self.process.poll() is None, self.written[-2000:]
            self._read(until=end)

    def ended(self) -> int:
        """Its exit status, once it has written all it would; the terminal must be as it was."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            self._read(until=end)
        assert termios.tcgetattr(self._its) == self._before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    def _read(self, until: float) -> None:
        assert time.monotonic() < until, self.written[-2000:]
        if select.select([self._ours], [], [], 0.05)[0]:
            self.written += os.read(self._ours, 65536)


@contextmanager
def terminal(*command: str, **variables: str) -> Iterator[Terminal]:
    own = Terminal(command, variables)
    try:
        yield own
    finally:
        own.close()


@pytest.mark.parametrize(("keys", "status"), [(b"q", 0), (b"\x03", 0), (b"", 128 + signal.SIGTERM)])
def test_the_screen_is_given_back(daemon: DaemonProcess, keys: bytes, status: int) -> None:
    with terminal(*KVTIER, "top", "--interval", "0.1", "--address", daemon.address) as screen:
        screen.shows(b"TIER")
        screen.shows(b"healthy")
        assert ENTERED in screen.written
        screen.resize(120, 50)
        os.kill(screen.process.pid, signal.SIGWINCH)
        screen.shows(b"BEHIND")
        if keys:
            screen.press(keys)
        else:
            screen.process.terminate()
        assert screen.ended() == status
        assert screen.written.rindex(LEFT) > screen.written.rindex(ENTERED)
        assert CURSOR_BACK in screen.written[screen.written.rindex(b"TIER") :]
        assert b"Traceback" not in screen.written
        assert COLOUR.search(screen.written)


def test_no_colour_where_none_is_wanted(daemon: DaemonProcess) -> None:
    with terminal(*KVTIER, "top", "--address", daemon.address, NO_COLOR="1") as screen:
        screen.shows(b"TIER")
        screen.press(b"q")
        assert screen.ended() == 0
        assert COLOUR.search(screen.written) is None


def test_without_textual_it_says_what_to_install(daemon: DaemonProcess) -> None:
    script = "import sys; sys.modules['textual'] = None; from kvtier.cli import main; main()"
    with terminal(sys.executable, "-c", script, "top", "--address", daemon.address) as screen:
        assert screen.ended() == 1
        assert b"pip install 'kvtier[top]'" in screen.written
        assert b"Traceback" not in screen.written


def test_a_terminal_that_cannot_be_drawn_on_gets_one_frame(daemon: DaemonProcess) -> None:
    with terminal(*KVTIER, "top", "--interval", "0.1", "--address", daemon.address, TERM="dumb") as screen:
        assert screen.ended() == 0
        assert b"FOUND IN" in screen.written
        assert b"\x1b" not in screen.written
