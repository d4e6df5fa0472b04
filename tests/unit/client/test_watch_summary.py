"""The status line: what it says, and how it is drawn among the lines above it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from kvtier.cli.watch_output import Output
from kvtier.cli.watch_summary import WINDOW_S, Summary
from kvtier.events import (
    Disconnected,
    Event,
    Gap,
    Reconnected,
    SnapshotEnd,
    SnapshotSlice,
    SnapshotStart,
)
from kvtier.types import Cause, Cursor, EventType

KEYS = bytes(64)
_END = b"\0"


def event(moved: int = 0) -> Event:
    return Event(1, 1, EventType.UPDATED, Cause.CAPACITY, "c", 0, 0, packed_keys=KEYS, moved_bytes=moved)


def test_rates_are_those_of_the_last_seconds() -> None:
    summary = Summary(100.0)
    for tenth in range(100):
        summary.note(event(1 << 20), 100.0 + tenth / 10)
    said = summary.line(110.0, Cursor(1, 100), 7)
    assert "at 1:100" in said
    assert "9.8 events/s  20 blocks/s  9.8 MiB/s" in said
    assert "lag 7  gaps 0" in said
    assert "0 events/s  0 blocks/s  0 B/s" in summary.line(110.0 + WINDOW_S + 1, None, 0)


def test_a_watch_that_has_just_begun_is_not_said_to_be_faster_than_it_is() -> None:
    summary = Summary(0.0)
    summary.note(event(), 0.001)
    assert "1 events/s  2 blocks/s" in summary.line(0.002, None, 0)


def test_gaps_breaks_and_snapshots_are_told() -> None:
    summary = Summary(0.0)
    assert summary.line(0, None, 0).startswith("connected")
    summary.note(SnapshotStart(), 1)
    summary.note(SnapshotSlice("c", 0, KEYS, KEYS, bytes(2), bytes(2)), 1)
    assert summary.line(1, None, 0).startswith("snapshot: 2 blocks")
    summary.note(SnapshotEnd(Cursor(1, 5)), 1)
    assert summary.line(1, Cursor(1, 5), 0).startswith("at 1:5")
    summary.note(Disconnected("gone"), 2)
    assert summary.line(5, Cursor(1, 5), 0).startswith("daemon away for 3 s")
    summary.note(Reconnected(2, 2, restarted=True), 6)
    summary.note(Gap(1, 6, 15, "unclean-stop"), 6)
    said = summary.line(6, Cursor(2, 15), 0)
    assert said.startswith("at 2:15")
    assert said.endswith("gaps 1 (10 events)")


class Terminal:
    """A pseudo-terminal: what is written to ``output`` is read from it."""

    def __init__(self, columns: int) -> None:
        self._outside, self._inside = pty.openpty()
        self.resize(columns)
        self.stream = os.fdopen(self._inside, "w")
        self.output = Output(self.stream)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """All that was written since: the kernel may hand it on in parts, so a mark after it says where it ends."""
        os.write(self._inside, _END)
        seen = b""
        while not seen.endswith(_END):
            seen += os.read(self._outside, 65536)
        return seen.removesuffix(_END).decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.stream.close()
        os.close(self._outside)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    opened = Terminal(40)
    yield opened
    opened.close()


def test_lines_push_the_status_line_down(terminal: Terminal) -> None:
    output = terminal.output
    output.status("status")
    output.lines(["one", "two"])
    output.lines([])
    output.status("")
    assert terminal.read() == "status" + "\r\x1b[Jone\ntwo\nstatus" + "\r\x1b[J"


def test_the_status_line_is_never_wider_than_the_terminal(terminal: Terminal) -> None:
    terminal.output.status("x" * 60)
    assert terminal.read() == "x" * 38 + "…"
    terminal.resize(20)
    terminal.output.status("y" * 60)
    assert terminal.read() == "\x1b[A\r\x1b[J" + "y" * 18 + "…", "39 columns were wrapped into two rows of 20"


def test_a_terminal_that_can_only_write_gets_no_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    plain = Terminal(40)
    try:
        plain.output.status("status")
        plain.output.lines(["one"])
        assert plain.read() == "one\n"
        assert not plain.output.colour
    finally:
        plain.close()


@pytest.mark.parametrize(("no_color", "colour"), [("", True), ("1", False)])
def test_colours_are_for_terminals_whose_owner_wants_them(
    monkeypatch: pytest.MonkeyPatch, no_color: str, colour: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    one = Terminal(40)
    try:
        assert one.output.colour is colour
    finally:
        one.close()
