"""How a cache behaves. Fixed while it lives, and remembered with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier.types import Tier


class WritePolicy(IntEnum):
    """When blocks are copied down. Values as on the wire."""

    DEFAULT = 0
    """The daemon's, or of a cache that exists, its own."""
    BACK = 1
    """When the slot is wanted, or ahead of that to keep slots clean."""
    THROUGH = 2
    """To the lowest tier as soon as they are committed."""
    SELECTIVE = 3
    """At their second use; dropped instead of demoted before."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True, frozen=True)
class CacheOptions:
    """What a cache is opened with. What is left out is the cache's own where it exists, else the daemon's default."""

    write_policy: WritePolicy = WritePolicy.DEFAULT
    eviction: str = ""
    """Name of an eviction policy, such as "lru"."""
    event_hash: str = ""
    """What blocks are named by in events besides their keys: v1_block_key, v2_sha256 or v2_sha256_64."""
    keep_tokens: bool = False
    """Token ids are kept, and sent to watchers that may see them."""
    thresholds: Mapping[tuple[Tier, Tier], int] = field(default_factory=dict)
    """By edge, the least priority at which a block goes down it: 0 to 101, 101 = never."""
