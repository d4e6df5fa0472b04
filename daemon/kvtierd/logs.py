"""Log lines on standard error: a line per record, fit for the journal.

A message has the event in words, then its values as ``key=%s``::

    _log.info("session begins session=%d command=%r", session.id, command)

    time=2026-11-21T10:00:00.000Z level=info where=kvtierd.service.sessions session begins session=4 command='a'
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

BURST: Final = 10
"""Most warnings and errors that a place in the code may log in a period."""
INFO_BURST: Final = 100
"""The same for info lines: a start may log one for each of many sessions and caches."""
PERIOD_S: Final = 60.0

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Syslog priorities by level; see sd-daemon(3)."""


class Line(logging.Formatter):
    """Formats any record as a single line. ``journal``: the line begins with its priority."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, *, journal: bool) -> None:
        super().__init__("time=%(asctime)s level=%(levelname)s where=%(name)s %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record).replace(f"level={record.levelname}", f"level={record.levelname.lower()}", 1)
        if suppressed := getattr(record, "suppressed", 0):
            line += f" suppressed={suppressed}"
        line = _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)
        return _prefix(record.levelno) + line if self._journal else line


class RateLimit(logging.Filter):
    """Limits a place in the code to :data:`BURST` records (info: :data:`INFO_BURST`) in :data:`PERIOD_S`. The place's
    first record after the period tells how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """When the period of each place began, and its records since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        burst = INFO_BURST if record.levelno < logging.WARNING else BURST
        now, kind = self._clock(), (record.name, str(record.msg))
        since, count = self._kinds.get(kind, (now, 0))
        if now - since >= PERIOD_S:
            record.suppressed = max(0, count - burst)
            since, count = now, 0
        self._kinds[kind] = since, count + 1
        return count < burst


def set_up(level: str, stream: TextIO = sys.stderr) -> None:
    """Sets up logging. Call once, at the start."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(RateLimit())
    handler.setFormatter(Line(journal=is_journal(stream)))
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)
    change(level)


def change(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def marked(line: str, level: int, stream: TextIO = sys.stderr) -> str:
    """A line for people, with its priority if the stream goes to the journal."""
    return (_prefix(level) if is_journal(stream) else "") + line


def _prefix(level: int) -> str:
    return f"<{next((priority for least, priority in _PRIORITIES if level >= least), 7)}>"


def is_journal(stream: TextIO) -> bool:
    """Whether a stream goes to systemd's journal, which JOURNAL_STREAM names by device and inode (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM", "") == f"{status.st_dev}:{status.st_ino}"
