"""Messages between the scheduler's process and the workers, all picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvtier.types import WriteTicket

NO_PAGE: Final = -1
"""Entry of a block table for a block before the window, for which the engine keeps no page."""

Table = Mapping[int, tuple[int, ...]]
"""Maps a group to its pages, one per block."""
FailedPages = Mapping[int, frozenset[int]]
"""Maps a group to a set of its pages."""


@dataclass(slots=True, frozen=True)
class Load:
    """Blocks of a chain to copy into pages. ``keys`` and ``pages``: by group, of equal number; all groups end with the
    same block. ``sync``: the forward pass of this step computes on the pages."""

    ticket: int
    request: str
    keys: Mapping[int, bytes]
    pages: Table
    blocks: int
    sync: bool


@dataclass(slots=True, frozen=True)
class Placed:
    """Pages of a group to copy into reserved slots, which belong to ``lease``."""

    lease: WriteTicket
    slots: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Save:
    """Blocks of a chain to copy out of pages after the forward pass of this step has written them."""

    ticket: int
    request: str
    places: Mapping[int, tuple[Placed, ...]]
    blocks: int


@dataclass(slots=True, frozen=True)
class Work:
    """The copies of one step. ``flush``: pages that the engine takes away; no copy may touch them any more. ``step``:
    its number."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    flush: FailedPages = field(default_factory=dict)
    step: int = 0


@dataclass(slots=True, frozen=True)
class CopyResult:
    """The result of one ticket on one rank. ``failed``: pages that do not hold their block, or were not saved."""

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
    """Requests whose loads, or whose last saves, have ended on all ranks; pages that failed on any rank."""

    loaded: frozenset[str]
    saved: frozenset[str]
    failed_pages: FailedPages
