"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """``WARN``: it works, but not as well or as safely as it could, or it could not be seen. ``FAIL``: it does not."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    """``advice``: what to do, down to the command or the file; empty where there is nothing to be done."""

    check: str
    level: Level
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.FAIL, found, advice)


def worst(findings: list[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return Level.FAIL if Level.FAIL in levels else Level.WARN if Level.WARN in levels else Level.OK
