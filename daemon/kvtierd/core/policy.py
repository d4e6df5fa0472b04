"""What a cache is made of, in slots, and the numbers that steer eviction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvtier.abi.attention import Attention
from kvtierd.core.ids import GroupId, Tier

MIN_PRIORITY: Final = 0
MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 35
UNCHANGED: Final = 255
"""In place of a priority in an acquire: the block keeps what it has."""


@dataclass(slots=True, frozen=True)
class GroupShape:
    """Slots and bytes a slot of each tier that a window group has; any non-empty subset of tiers.

    ``window_tokens``: what attention looks back on, the newest token included; 0 = everything. ``sink_tokens``: how
    many first ones besides. ``flat``: keys form no chains.
    """

    group: GroupId
    slots: Mapping[Tier, int]
    slot_bytes: Mapping[Tier, int]
    window_tokens: int = 0
    tokens_per_block: int = 1
    sink_tokens: int = 0
    flat: bool = False

    @property
    def attention(self) -> Attention:
        return Attention.of(self.tokens_per_block, self.window_tokens, self.sink_tokens, flat=self.flat)


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


class RemotePolicy(StrEnum):
    """When a store beyond the host is to have a block."""

    EVICT = "evict"
    """Shortly before the block would leave the lowest tier."""
    SECOND_USE = "second_use"
    THROUGH = "through"
    """As soon as the host can read it."""


@dataclass(slots=True, frozen=True)
class RemoteWrites:
    """Which blocks a store beyond the host is to have.

    ``min_priority``: of their effective priority. ``first_tokens``: blocks beyond so many tokens of a chain stay here;
    0 = none does. ``ahead``: the share of the lowest tier's slots that is copied ahead of its eviction.
    """

    policy: RemotePolicy = RemotePolicy.EVICT
    min_priority: int = 0
    first_tokens: int = 0
    ahead: float = 0.05


@dataclass(slots=True, frozen=True)
class Policy:
    """How a cache moves, keeps and evicts its blocks. Shares are of a tier's slots in a group."""

    thresholds: Mapping[Edge, int] = field(default_factory=dict)
    """Least effective priority (>=, as in TensorRT-LLM's code, not its help) with which a block goes down an edge,
    except by a ``move`` call: 0 = always, 101 = never, 30 where none is given."""
    write_policy: WritePolicy = WritePolicy.BACK
    eviction: str = "lru"
    """Who goes first inside a priority, by its name in ``core/eviction.py``."""
    clean_most: float = 0.0
    """At most this share of a tier is kept clean, i.e. free, or valid in a lower tier too; how much, demand says."""
    max_pinned: float = 0.5
    reserve_shift: int = 5
    reserve_max: int = 512
    """``min(slots >> shift, max)`` disk slots are kept free: one is free only once its old record is durably gone."""
    waiting_victims: int = 32
    """At most so many blocks are chosen to leave a tier while they wait for slots below."""
    blocks_a_call: int = 1_024
    """Looked at by one call where a caller can name any number: a reset, the loss of a tier, retentions that end."""
    blocks_a_move: int = 32
    blocks_an_event: int = 256
    degrade_after: int = 3
    degraded_ns: int = 5_000_000_000
    """So many failures in a row take an edge out of planning for so long."""

    remote: RemoteWrites | None = None
    """None: there is no store beyond the host."""

    def threshold(self, src: Tier, dst: Tier) -> int:
        return self.thresholds.get((src, dst), DEFAULT_THRESHOLD)

    def pinnable(self, slots: int) -> int:
        """How many of so many slots may be pinned."""
        return int(self.max_pinned * slots)
