"""What the scheduler's process and the workers tell each other, all of it picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvtier.types import WriteTicket

NO_PAGE: Final = -1
"""In a block table: the engine keeps no page for this block, which lies before its window."""

Table = Mapping[int, tuple[int, ...]]
"""By group, a page a block."""
FailedPages = Mapping[int, frozenset[int]]
"""By group."""


@dataclass(slots=True, frozen=True)
class Load:
    """Blocks of a chain to be copied into pages: by group, ``keys`` and ``pages`` of equal number, which end with the
    same block. ``sync``: the forward pass of this step computes on them."""

    ticket: int
    request: str
    keys: Mapping[int, bytes]
    pages: Table
    blocks: int
    sync: bool


@dataclass(slots=True, frozen=True)
class Placed:
    """Pages to be copied into reserved slots of a group, which are some of ``lease``."""

    lease: WriteTicket
    slots: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Save:
    """Blocks of a chain to be copied out of pages, once the forward pass of this step has written them."""

    ticket: int
    request: str
    places: Mapping[int, tuple[Placed, ...]]
    blocks: int


@dataclass(slots=True, frozen=True)
class Work:
    """Of one step. ``flush``: pages that are taken away; no copy may touch them any more."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    flush: FailedPages = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of one ticket on one rank. ``failed``: pages that do not hold their block, or were not saved."""

    ticket: int
    request: str
    kind: Literal["load", "save"]
    rank: int
    failed: FailedPages
    blocks: int
    nbytes: int
    seconds: float


@dataclass(slots=True, frozen=True)
class Completed:
    """Requests whose loads, or whose last saves, have ended on all ranks; pages that failed on any."""

    loaded: frozenset[str]
    saved: frozenset[str]
    failed_pages: FailedPages
