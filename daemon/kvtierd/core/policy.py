"""The shape of a cache in slots, and the settings of eviction."""

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
"""Priority in an acquire that leaves the block's retention as it is."""


@dataclass(slots=True, frozen=True)
class GroupShape:
    """Slots and bytes a slot of a window group in each tier; any non-empty subset of tiers.

    ``window_tokens``: tokens that attention looks back on, the newest included; 0 = all. ``sink_tokens``: first tokens
    of a chain that attention reads besides. ``flat``: keys form no chains.
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

DEFAULT_THRESHOLD: Final = 30
"""TensorRT-LLM's offload threshold."""
NEVER: Final = MAX_PRIORITY + 1
"""A threshold that no priority reaches."""


class WriteMode(StrEnum):
    """When blocks are copied down."""

    BACK = "back"
    """When their slot is wanted, or earlier, to keep slots clean."""
    THROUGH = "through"
    """To the lowest tier on commit. A promotion keeps its source copy."""
    SELECTIVE = "selective"
    """To the lowest tier at their second use, when an acquire finds them. Before that, a block is dropped where it
    would otherwise go down."""


class RemotePolicy(StrEnum):
    """When the remote store is to get a block."""

    EVICT = "evict"
    """Shortly before the block would leave the lowest tier."""
    SECOND_USE = "second_use"
    THROUGH = "through"
    """As soon as the host can read it."""


@dataclass(slots=True, frozen=True)
class RemoteWrites:
    """Which blocks the remote store is to get.

    ``min_priority``: their least effective priority. ``first_tokens``: blocks after this many tokens of a chain are not
    written; 0 = all are. ``ahead``: share of the lowest tier's slots that is written ahead of eviction.
    """

    policy: RemotePolicy = RemotePolicy.EVICT
    min_priority: int = 0
    first_tokens: int = 0
    ahead: float = 0.05


@dataclass(slots=True, frozen=True)
class Policy:
    """How a cache moves, keeps and evicts its blocks. Shares are of a tier's slots in a group."""

    thresholds: Mapping[Edge, int] = field(default_factory=dict)
    """Least effective priority at which a block goes down an edge, except by a ``move`` call: 0 = always, 101 = never,
    30 by default. Inclusive, as in TensorRT-LLM's code, unlike its help text."""
    write_policy: WriteMode = WriteMode.BACK
    eviction: str = "lru"
    """Policy that orders the blocks of one priority, by its name in ``core/eviction.py``."""
    clean_most: float = 0.0
    """Largest share of a tier kept clean, i.e. free, or valid in a lower tier too. Demand decides how much is kept
    clean."""
    max_pinned: float = 0.5
    ahead_share: int = 32
    """Slots may be leased ahead up to ``slots // ahead_share``: see :meth:`WindowManager.lease_ahead`."""
    reserve_shift: int = 5
    reserve_max: int = 512
    """``min(slots >> shift, max)`` disk slots are kept free: a disk slot is free only after the deletion of its old
    record is durable."""
    waiting_victims: int = 32
    """Largest number of blocks chosen to leave a tier while they wait for slots below."""
    blocks_a_call: int = 1_024
    """Limit of blocks that one call handles in unbounded work: a reset, the loss of a tier, retentions that end."""
    blocks_a_move: int = 32
    blocks_an_event: int = 256
    degrade_after: int = 3
    degraded_ns: int = 5_000_000_000
    """After ``degrade_after`` failures in a row, an edge is not planned for ``degraded_ns``."""

    remote: RemoteWrites | None = None
    """None: the cache has no remote store."""

    def threshold(self, src: Tier, dst: Tier) -> int:
        return self.thresholds.get((src, dst), DEFAULT_THRESHOLD)

    def pinnable(self, slots: int) -> int:
        return int(self.max_pinned * slots)
