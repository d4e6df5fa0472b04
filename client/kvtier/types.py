"""The words of the API: tiers, causes, results, cursors. Numeric values are the wire's unless said otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvtier.abi.keys import KEY_BYTES

ROOT_PARENT: Final = bytes(KEY_BYTES)
"""On the wire: the parent of a chain's first block."""

DEFAULT_PRIORITY: Final = 35


class Tier(IntEnum):
    """Where bytes live, the fastest first. The value is the cache level (one less than the wire's)."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def bit(self) -> int:
        """This tier's bit in a residency set (1 device, 2 host, 4 disk)."""
        return 1 << self.value

    def __str__(self) -> str:
        return self.name.lower()


MAPPED_TIERS: Final = (Tier.DEVICE, Tier.HOST)
"""Tiers whose slots a client can map, the fastest first: leases exist there and only there."""


class Cause(IntEnum):
    """Why a residency, a priority or an existence changed."""

    COMMIT = 1
    WRITE_THROUGH = 2
    CAPACITY = 3
    WATERMARK = 4
    QUOTA = 5
    EXPIRED = 6
    DEMAND = 7
    PREFETCH = 8
    EXPLICIT = 9
    RESET = 10
    CORRUPT = 11
    IO_ERROR = 12
    ANCESTOR = 13
    LOST = 14
    SHUTDOWN = 15
    RECOVERED = 16

    def __str__(self) -> str:
        return self.name.lower()


class EventType(IntEnum):
    """What happened to blocks. ``str()`` gives TensorRT-LLM's name for it."""

    CREATED = 1
    STORED = 2
    REMOVED = 3
    UPDATED = 4
    CLEARED = 5

    def __str__(self) -> str:
        return self.name.lower()


class BlockResult(IntEnum):
    """One block's answer inside a call that was accepted as a whole."""

    OK = 0
    EXISTS = 1
    """commit: an equal key is indexed; the old block was kept, the new slot freed."""
    PARENT_MISSING = 2
    """commit: the parent is not indexed; the slot stays blank and leased."""
    NOT_FOUND = 3
    """move, drop: the key is not indexed."""
    HELD = 4
    """drop: it, or a block below it, is leased or pinned."""
    NO_ROOM = 5
    """move: the tier could not make room, or not before the deadline; a copy that has begun goes on."""
    FAILED = 6
    """move: the copy failed; the source is as it was."""
    PARENT_CONFLICT = 7
    """commit: an equal key is indexed under another parent; the slot stays blank and leased."""
    NOT_READY = 8
    """pin: it has no READY copy in the tier; unpin: it is not pinned there."""
    OVER_CAP = 9
    """pin: too many slots of the tier are pinned."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True, frozen=True, order=True)
class Cursor:
    """A place in the event stream: the last event seen. ``id`` 0 = before the first; ``epoch`` 0 = the current one."""

    epoch: int
    id: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.id}"


def tiers_of(residency: int) -> Iterator[Tier]:
    """The tiers of a residency set, the fastest first."""
    return (tier for tier in Tier if residency & tier.bit)


def fastest(residency: int) -> Tier | None:
    """The fastest tier of a residency set; None for the empty one."""
    return next(tiers_of(residency), None)


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
