"""Log lines: taken apart, written so that nothing in them can pass for another line, and not too many of them."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.logs import BURST, PERIOD_S, Entry, Json, Logfmt, RateLimit, entry_of, is_journal

PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=\\]+)(?: |$)')


def record(message: str, *args: object, level: int = logging.INFO, error: BaseException | None = None) -> Any:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("kvtierd.test", level, "file.py", 1, message, args, info)


def parsed(line: str) -> dict[str, str]:
    """As a reader of logfmt has it."""
    pairs = PAIR.findall(line)
    assert "".join(match[0] for match in PAIR.finditer(line)) == line, f"not logfmt: {line!r}"
    return {name: json.loads(value) if value.startswith('"') else value for name, value in pairs}


@pytest.mark.parametrize(
    ("message", "args", "entry"),
    [
        ("stopping", (), Entry("stopping", {})),
        (
            "session ends session=%d why=%r",
            (4, "it's over"),
            Entry("session ends", {"session": "4", "why": "it's over"}),
        ),
        ("dropped why='too many' pid=%d", (7,), Entry("dropped", {"why": "too many", "pid": "7"})),
        ("waited ms=%.1f", (1.234,), Entry("waited", {"ms": "1.2"})),
        ("%s of %d failed edge=%s", ("three", 9, "a>b"), Entry("three of 9 failed", {"edge": "a>b"})),
        ("what=%s follows", ("this",), Entry("what=this follows", {})),
        ("%s", ("a=1 b=2",), Entry("a=1 b=2", {})),
    ],
)
def test_a_message_is_an_event_and_its_fields(message: str, args: tuple[object, ...], entry: Entry) -> None:
    assert entry_of(record(message, *args)) == entry


@given(st.text(), st.text())
def test_whatever_is_logged_is_one_line_and_comes_back(event: str, value: str) -> None:
    for one, read in ((Logfmt(journal=False), parsed), (Json(journal=False), json.loads)):
        line = one.format(record("%s happened value=%r", event, value))
        assert len(line.splitlines()) == 1
        back = read(line)
        assert (back["event"], back["value"], back["level"]) == (f"{event} happened", value, "info")


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        line = Logfmt(journal=False).format(record("failed", level=logging.ERROR, error=error))
    assert "\n" not in line
    assert parsed(line)["exception"].endswith("ValueError: no\nway")


@pytest.mark.parametrize(("level", "prefix"), [(logging.ERROR, "<3>"), (logging.WARNING, "<4>"), (logging.INFO, "<6>")])
def test_the_journal_is_told_the_priority(level: int, prefix: str) -> None:
    assert Logfmt(journal=True).format(record("it", level=level)).startswith(f"{prefix}time=")


def test_the_journal_is_known_by_its_device_and_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "other").open("w") as other:
        status = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(journal) and not is_journal(other)
        assert not is_journal(io.StringIO())
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not is_journal(journal)


def test_warnings_of_one_kind_are_limited_and_counted() -> None:
    now = [0.0]
    limit = RateLimit(lambda: now[0])
    let_through = [limit.filter(record("slow ms=%d", n, level=logging.WARNING)) for n in range(BURST + 5)]
    assert let_through == [True] * BURST + [False] * 5
    assert limit.filter(record("another kind", level=logging.WARNING))
    assert all(limit.filter(record("news n=%d", n)) for n in range(100))
    now[0] = PERIOD_S
    after = record("slow ms=%d", 0, level=logging.WARNING)
    assert limit.filter(after)
    assert parsed(Logfmt(journal=False).format(after))["suppressed"] == "5"
