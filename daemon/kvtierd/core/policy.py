"""What a cache is made of, in slots, and the numbers that steer eviction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtierd.core.ids import GroupId, Tier

MIN_PRIORITY: Final = 0
MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 35


@dataclass(slots=True, frozen=True)
class GroupShape:
    """Slots and bytes a slot of each tier that a window group has; any non-empty subset of tiers.

    ``window_tokens``: what attention looks back on, the newest token included; 0 = everything.
    """

    group: GroupId
    slots: Mapping[Tier, int]
    slot_bytes: Mapping[Tier, int]
    window_tokens: int = 0
    tokens_per_block: int = 1

    @property
    def sliding(self) -> bool:
        return self.window_tokens > 0

    @property
    def span(self) -> int:
        """Of a sliding group: how many blocks cover the window of a prefix that ends with a whole block."""
        return -(-self.window_tokens // self.tokens_per_block)

    def first_block(self, blocks: int) -> int:
        """The first block that a prefix of so many needs: the one with token ``max(0, blocks * tokens_per_block -
        window_tokens)``."""
        return max(0, blocks - self.span) if self.sliding else 0


def _default_thresholds() -> dict[Tier, int]:
    return {Tier.HOST: 30, Tier.DISK: 30}


@dataclass(slots=True, frozen=True)
class Policy:
    """``demote_min_priority``: a block goes down to a tier if and only if its effective priority is at least this;
    default as TensorRT-LLM's offload threshold. ``reserve_shift`` and ``reserve_max``: the disk keeps ``min(slots >>
    shift, max)`` slots free ahead of need, since a slot there is free only after its old record's deletion has
    committed. ``victims_a_call``: so many slots are vacated in one call of the core, which says so if there is more to
    do; it bounds how long one call takes. ``degrade_after`` failures in a row take an edge out of planning for
    ``degraded_ns``.
    """

    demote_min_priority: Mapping[Tier, int] = field(default_factory=_default_thresholds)
    reserve_shift: int = 7
    reserve_max: int = 64
    victims_a_call: int = 8
    degrade_after: int = 3
    degraded_ns: int = 5_000_000_000
