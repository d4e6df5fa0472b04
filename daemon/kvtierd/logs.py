"""Log lines: one a record, whatever is in it, in a form that programs read, fit for the journal.

The code logs an event in words and what belongs to it as ``key=%s`` behind them::

    _log.info("session begins session=%d command=%r", session.id, command)

which comes out, as the configuration has it, as logfmt or as JSON::

    time=2026-11-21T10:00:00.000Z level=info where=kvtierd.service.sessions event="session begins" session=4 command=a
    {"time": "2026-11-21T10:00:00.000Z", "level": "info", ..., "event": "session begins", "session": "4", ...}
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

BURST: Final = 10
"""Warnings of one kind that are let through in a period; the rest is counted."""
PERIOD_S: Final = 60.0
KINDS_MAX: Final = 1024
"""Kinds of warnings that are kept apart at a time."""

_FIELD: Final = re.compile(r"(?:^|(?<=\s))([a-z_]+)=('[^']*'|\S*)(?=\s|$)")
_CONVERSION: Final = re.compile(r"%(?!%)[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_PLAIN: Final = re.compile(r"[^\s\"=\\\x00-\x20\x7f-\x9f]+")
_PRIORITY: Final[Mapping[int, int]] = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
"""As syslog counts them; see sd-daemon(3)."""


@dataclass(slots=True, frozen=True)
class Entry:
    """A record taken apart."""

    event: str
    fields: Mapping[str, str]


def entry_of(record: logging.LogRecord) -> Entry:
    """What happened and what belongs to it; a message that is not written that way is all event."""
    template, args = str(record.msg), record.args
    found = list(_FIELD.finditer(template))
    if not found or not isinstance(args, tuple) or _FIELD.sub("", template[found[0].start() :]).strip():
        return Entry(record.getMessage(), {})
    head = template[: found[0].start()].rstrip()
    used = len(_CONVERSION.findall(head))
    event = head % args[:used] if used else head
    fields = {}
    for match in found:
        name, value = match[1], match[2]
        count = len(_CONVERSION.findall(value))
        mine, used = args[used : used + count], used + count
        fields[name] = str(mine[0]) if value == "%r" else value % mine if count else value.strip("'")
    return Entry(event, fields)


class _Lines(logging.Formatter):
    """Takes records apart; how the parts are written is a subclass's. ``journal``: lines say their priority first."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        entry = entry_of(record)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "where": record.name,
            "event": entry.event,
        }
        parts |= {name: value for name, value in entry.fields.items() if name not in parts}
        suppressed = getattr(record, "suppressed", 0)
        if suppressed:
            parts["suppressed"] = str(suppressed)
        if record.exc_info:
            parts["exception"] = self.formatException(record.exc_info)
        return (_prefix(record.levelno) if self._journal else "") + self.line(parts)

    def line(self, parts: Mapping[str, str]) -> str:
        raise NotImplementedError


class Logfmt(_Lines):
    """``key=value`` pairs; what is more than a plain word is quoted and escaped as in JSON."""

    def line(self, parts: Mapping[str, str]) -> str:
        return " ".join(f"{name}={_quoted(value)}" for name, value in parts.items())


class Json(_Lines):
    """One object a line."""

    def line(self, parts: Mapping[str, str]) -> str:
        return json.dumps(dict(parts))


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


class RateLimit(logging.Filter):
    """Lets through ``BURST`` warnings and errors of a kind in ``PERIOD_S``, and tells with the next how many were not.

    A kind is what one place in the code says, whatever the values.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = self._kind((record.name, str(record.msg) if record.msg != "%s" else record.getMessage()))
        now = self._clock()
        if now - kind.since >= PERIOD_S:
            record.suppressed = kind.count - BURST if kind.count > BURST else 0
            kind.since, kind.count = now, 0
        kind.count += 1
        return kind.count <= BURST

    def _kind(self, key: tuple[str, str]) -> _Kind:
        kind = self._kinds.setdefault(key, _Kind(self._clock()))
        self._kinds.move_to_end(key)
        while len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        return kind


@dataclass(slots=True)
class _Kind:
    since: float
    count: int = 0


_FORMATS: Final[Mapping[str, type[_Lines]]] = {"logfmt": Logfmt, "json": Json}


def set_up(level: str, form: str, stream: TextIO = sys.stderr) -> None:
    """Once, at the start. ``form``: logfmt or json."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(RateLimit())
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)
    change(level, form)


def change(level: str, form: str) -> None:
    """Of what :func:`set_up` has set up."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for handler in root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setFormatter(_FORMATS[form](journal=is_journal(handler.stream)))


def marked(line: str, level: int, stream: TextIO = sys.stderr) -> str:
    """A line for people, of which there is no record: with its priority where the stream goes to the journal."""
    return (_prefix(level) if is_journal(stream) else "") + line


def _prefix(level: int) -> str:
    return f"<{_PRIORITY.get(level, 6)}>"


def is_journal(stream: TextIO) -> bool:
    """Whether a stream goes to systemd's journal, which JOURNAL_STREAM names by device and inode (systemd.exec(5))."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"
