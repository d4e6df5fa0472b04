"""Log lines: one a record whatever is in it, and not too many of them."""

import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.logs import BURST, INFO_BURST, PERIOD_S, Line, RateLimit, is_journal


def record(message: str, *args: object, level: int = logging.INFO, error: BaseException | None = None) -> Any:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("kvtierd.test", level, "file.py", 1, message, args, info)


@given(st.text(), st.text())
def test_whatever_is_logged_is_one_line(event: str, value: str) -> None:
    line = Line(journal=False).format(record("%s happened value=%r", event, value))
    assert len(line.splitlines()) == 1
    assert line.startswith("time=") and " level=info where=kvtierd.test " in line


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        line = Line(journal=False).format(record("failed", level=logging.ERROR, error=error))
    assert "level=error where=kvtierd.test failed" in line
    assert "\n" not in line and line.endswith("ValueError: no\\nway")


@pytest.mark.parametrize(("level", "prefix"), [(logging.ERROR, "<3>"), (logging.WARNING, "<4>"), (logging.INFO, "<6>")])
def test_the_journal_is_told_the_priority(level: int, prefix: str) -> None:
    assert Line(journal=True).format(record("it", level=level)).startswith(f"{prefix}time=")


def test_the_journal_is_known_by_its_device_and_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "other").open("w") as other:
        status = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(journal) and not is_journal(other)
        assert not is_journal(io.StringIO())
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not is_journal(journal)


@pytest.mark.parametrize(("level", "burst"), [(logging.WARNING, BURST), (logging.INFO, INFO_BURST)])
def test_lines_of_one_place_are_limited_and_counted(level: int, burst: int) -> None:
    now = [0.0]
    limit = RateLimit(lambda: now[0])
    let_through = [limit.filter(record("slow ms=%d", n, level=level)) for n in range(burst + 5)]
    assert let_through == [True] * burst + [False] * 5
    assert limit.filter(record("another place", level=level))
    now[0] = PERIOD_S
    after = record("slow ms=%d", 0, level=level)
    assert limit.filter(after)
    assert Line(journal=False).format(after).endswith("slow ms=0 suppressed=5")
