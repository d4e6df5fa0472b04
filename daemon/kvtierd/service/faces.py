"""What events say of the cache that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import CacheId, GroupId


@dataclass(slots=True, frozen=True)
class CacheFace:
    """``event_hash``: how its blocks are named besides their keys; "" = not at all. ``windows``: tokens, by group.

    Of a cache of an earlier life nothing but the name is known.
    """

    name: str
    event_hash: str = ""
    windows: tuple[int, ...] = ()
    tokens_per_block: int = 0

    @classmethod
    def of(cls, name: str, spec: CacheSpec, event_hash: str) -> Self:
        return cls(name, event_hash, tuple(group.window_tokens for group in spec.groups), spec.tokens_per_block)

    @property
    def hash_bytes(self) -> int:
        """Of one event hash; 0 = it has none."""
        return HASH_BYTES[self.event_hash] if self.event_hash else 0

    def window(self, group: GroupId) -> int:
        """0 = full attention, or not known."""
        return self.windows[group] if group < len(self.windows) else 0


Faces = Mapping[CacheId, CacheFace]
