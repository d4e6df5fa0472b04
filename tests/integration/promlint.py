"""What ``promtool check metrics`` objects to, for machines without it.

The rules are those of client_golang's promlint (prometheus/client_golang, prometheus/testutil/promlint): names, units,
suffixes, help.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric

_TYPES: Final = ("counter", "gauge", "histogram", "summary", "untyped")
_UNITS: Final = {
    "milliseconds": "seconds",
    "microseconds": "seconds",
    "nanoseconds": "seconds",
    "minutes": "seconds",
    "hours": "seconds",
    "days": "seconds",
    "kilobytes": "bytes",
    "megabytes": "bytes",
    "gigabytes": "bytes",
    "kibibytes": "bytes",
    "mebibytes": "bytes",
    "bits": "bytes",
    "percent": "ratio",
}
_ABBREVIATED: Final = frozenset({"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "m", "h", "d"})


def lint(families: Iterable[Metric]) -> list[str]:
    """One line a fault; none is what there should be."""
    return [f"{family.name}: {fault}" for family in families for fault in _faults(family)]


def _faults(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    words = name.split("_")
    if not family.documentation:
        yield "no help text"
    if family.type != "counter" and name.endswith("_total"):
        yield 'non-counter metrics should not have the "_total" suffix'
    if family.type not in ("histogram", "summary") and words[-1] in ("count", "sum", "bucket"):
        yield f'only histograms and summaries have the "_{words[-1]}" suffix'
    if any(kind in words for kind in _TYPES):
        yield "metric name should not include its type"
    if ":" in name:
        yield "metric names should not contain ':'"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield "metric names should be written in snake_case, not camelCase"
    for word in words:
        if word in _UNITS:
            yield f"use base unit {_UNITS[word]!r} instead of {word!r}"
        if word in _ABBREVIATED:
            yield f"metric names should not contain abbreviated units: {word!r}"
    for label in {label for sample in family.samples for label in sample.labels}:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
            yield f"label names should be written in snake_case: {label!r}"
        if label in ("le", "quantile") and family.type not in ("histogram", "summary"):
            yield f"only histograms and summaries have the label {label!r}"
