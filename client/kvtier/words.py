"""Sizes, times and names as a person reads them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes as a person reads them: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: float) -> str:
    """A number in at most five columns up to 10^15: ``0.5``, ``9999``, ``10.0k``, ``1.2M``."""
    if abs(number) < 9999.5:
        return f"{number:.1f}".removesuffix(".0") if abs(number) < 9.95 else f"{number:.0f}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if abs(number) < 999.5:
            return f"{number:.1f}{unit}" if abs(number) < 99.95 else f"{number:.0f}{unit}"
    return f"{number / 1000:.0f}T"


def duration(ns: float) -> str:
    """Nanoseconds as a person reads them: ``1.2ms``."""
    for unit in ("ns", "µs", "ms"):
        if abs(ns) < 1000:
            return f"{ns:.0f}{unit}" if unit == "ns" else f"{ns:.1f}{unit}"
        ns /= 1000
    return f"{ns:.1f}s"


def clean(text: str) -> str:
    """What another process calls itself, fit for a terminal: nothing in it moves a cursor or sets a colour."""
    return "".join(character if character.isprintable() else "?" for character in text)
