"""What a cache is made of, in slots, and the numbers that steer eviction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvtierd.core.ids import GroupId, Tier

MIN_PRIORITY: Final = 0
MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 35
UNCHANGED: Final = 255
"""In place of a priority in an acquire: the block keeps what it has."""


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


Edge = tuple[Tier, Tier]
"""From, to."""

DEFAULT_THRESHOLD: Final = 30
"""TensorRT-LLM's offload threshold."""
NEVER: Final = MAX_PRIORITY + 1
"""A threshold that no priority reaches."""


class WritePolicy(StrEnum):
    """When blocks are copied down."""

    BACK = "back"
    """When their slot is wanted, or ahead of that to keep slots clean."""
    THROUGH = "through"
    """To the lowest tier as soon as they are committed; a promotion keeps the copy it came from."""
    SELECTIVE = "selective"
    """To the lowest tier at their second use, i.e. when an acquire finds them; before that they are dropped where
    others would go down."""


@dataclass(slots=True, frozen=True)
class Policy:
    """``thresholds``: a block goes down an edge if and only if its effective priority is at least the edge's (>=, as in
    TensorRT-LLM's code, not its help); 0 = always, 101 = never, and 30 where none is given. Only a ``move`` by call
    goes down whatever the priority.

    ``eviction``: who goes first inside a priority, by its name in ``core/eviction.py``.

    ``clean_low``, ``clean_high``: where fewer than the low share of a tier's slots are clean (free, or READY below,
    too), the background copies down, in the order of eviction, until the high share is; 0: never.

    ``max_pinned``: at most this share of a tier's slots in a group is pinned.

    ``reserve_shift`` and ``reserve_max``: once blocks go to disk, ``min(slots >> shift, max)`` slots are kept free
    there ahead of need, since a slot there is free only after its old record's deletion has committed.

    ``waiting_victims``: at most so many blocks are chosen to leave a tier while they wait for slots below.

    ``blocks_a_call``: the blocks that one call of the core looks at where a caller can name any number of them at
    once: a reset, the loss of a tier, retentions that end.

    ``blocks_a_move``, ``blocks_an_event``: what would be longer becomes several.

    ``degrade_after`` failures in a row take an edge out of planning for ``degraded_ns``.
    """

    thresholds: Mapping[Edge, int] = field(default_factory=dict)
    write_policy: WritePolicy = WritePolicy.BACK
    eviction: str = "lru"
    clean_low: float = 0.0
    clean_high: float = 0.0
    max_pinned: float = 0.5
    reserve_shift: int = 5
    reserve_max: int = 512
    waiting_victims: int = 32
    blocks_a_call: int = 1_024
    blocks_a_move: int = 32
    blocks_an_event: int = 256
    degrade_after: int = 3
    degraded_ns: int = 5_000_000_000

    def threshold(self, src: Tier, dst: Tier) -> int:
        return self.thresholds.get((src, dst), DEFAULT_THRESHOLD)

    def pinnable(self, slots: int) -> int:
        """How many of so many slots may be pinned."""
        return int(self.max_pinned * slots)
