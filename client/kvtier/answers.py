"""What a cache's verbs answer."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.types import BlockResult, Cursor


@dataclass(slots=True, frozen=True)
class Match:
    """A stored prefix: ``blocks`` long, one residency byte a block."""

    blocks: int
    residency: bytes
    as_of: Cursor


@dataclass(slots=True, frozen=True)
class Location:
    """Where one key's bytes are. Slot and generation are None where the residency does not name the tier."""

    residency: int
    device_slot: int | None
    device_generation: int | None
    host_slot: int | None
    host_generation: int | None


@dataclass(slots=True, frozen=True)
class ListedBlock:
    """An indexed block. ``parent`` None = it is a root."""

    key: bytes
    parent: bytes | None
    residency: int
    priority: int
    pinned: int = 0
    """The tiers where it is pinned, as a bit set."""


@dataclass(slots=True, frozen=True)
class Page:
    """Part of a listing, which is consistent if every page has the same ``as_of``."""

    blocks: tuple[ListedBlock, ...]
    as_of: Cursor


@dataclass(slots=True, frozen=True)
class DropReport:
    """One result a key asked for; ``dropped`` counts the subtrees."""

    results: list[BlockResult]
    dropped: int


@dataclass(slots=True, frozen=True)
class ResetReport:
    """``kept``: blocks that are leased or pinned, and those that these stand on."""

    dropped: int
    kept: int
