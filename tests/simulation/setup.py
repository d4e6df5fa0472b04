"""The setup of a world, drawn once and tiny, so that every corner case comes soon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtierd.core.ids import GroupId, Tier
from kvtierd.core.policy import GroupShape, Policy, RemotePolicy, RemoteWrites, WriteMode
from tests.simulation.chooser import Chooser
from tests.simulation.forest import Forest

SLOT_BYTES: Final = 4096
EDGES_DOWN: Final = ((Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.DISK), (Tier.HOST, Tier.DISK))


@dataclass(slots=True, frozen=True)
class GroupPlan:
    """A window group. ``window``: in tokens, 0 = full attention; ``sinks``: in tokens; ``disk``: number of disk slots,
    0 = no disk tier."""

    group: GroupId
    window: int
    tokens_per_block: int
    slot_bytes: int
    disk: int
    sinks: int = 0
    flat: bool = False

    @property
    def sliding(self) -> bool:
        return self.window > 0

    @property
    def chained(self) -> bool:
        return not (self.sliding or self.flat)

    def shape(self, slots: Mapping[Tier, int]) -> GroupShape:
        slot_bytes = dict.fromkeys(slots, self.slot_bytes)
        return GroupShape(self.group, slots, slot_bytes, self.window, self.tokens_per_block, self.sinks, flat=self.flat)

    def needed(self, blocks: int) -> Sequence[int]:
        """The literal definition: blocks with a token that attention over a prefix of ``blocks`` blocks looks at."""
        tokens = blocks * self.tokens_per_block
        first = max(0, tokens - self.window) if self.sliding else 0
        looked_at = [*range(min(self.sinks, tokens)), *range(first, tokens)]
        return sorted({token // self.tokens_per_block for token in looked_at})

    @property
    def reach(self) -> int:
        """Number of blocks that a window covers."""
        return -(-self.window // self.tokens_per_block)

    @property
    def first(self) -> int:
        """Number of first blocks of a sequence that a window keeps."""
        return -(-self.sinks // self.tokens_per_block)


@dataclass(slots=True, frozen=True)
class Setup:
    """``memory``: slots by memory tier for each group, in the order of the groups."""

    groups: tuple[GroupPlan, ...]
    memory: tuple[Mapping[Tier, int], ...]
    policy: Policy
    forest: Forest

    @classmethod
    def draw(cls, choose: Chooser) -> Setup:
        """Draws a full or flat group and a sliding group, often only one of the two, or a third with larger slots."""
        count = choose.pick((1, 1, 2, 2, 3))
        on_disk = choose.chance(80)
        tokens_per_block = choose.pick((2, 3))  # a block of one token is partial: see forest.py
        sliding = (0,) if count == 1 and choose.chance(30) else (1, 2) if choose.chance(50) else (1,)
        groups = tuple(
            GroupPlan(
                group=GroupId(number),
                window=choose.between(1, 4 * tokens_per_block) if number in sliding else 0,
                sinks=choose.pick((0, 0, 1, 2 * tokens_per_block)) if number in sliding else 0,
                flat=number not in sliding and choose.chance(25),
                tokens_per_block=tokens_per_block,
                slot_bytes=SLOT_BYTES * (3 if number == 2 else 1),
                disk=choose.between(1, 12) if on_disk else 0,
            )
            for number in range(count)
        )
        policy = Policy(
            clean_most=choose.pick((0.0, 0.0, 0.5, 1.0)),
            thresholds={edge: choose.pick((30, 0, 50, 101)) for edge in EDGES_DOWN},
            write_policy=choose.pick((WriteMode.BACK, WriteMode.THROUGH, WriteMode.SELECTIVE)),
            eviction=choose.pick(("lru", "learned")),
            reserve_shift=(shift := choose.pick((7, 3, 2))),
            ahead_share=3 if shift == 7 else 32,  # no draw of its own: walks without leases ahead stay as they were
            waiting_victims=choose.pick((16, 3, 1)),
            degrade_after=choose.pick((3, 1)),
            remote=_remote(choose),
        )
        memory, forest = draw_memory(choose, count), Forest.draw(choose, choose.between(8, 30))
        return cls(groups, memory, _with_slices(choose, policy), forest)


def _remote(choose: Chooser) -> RemoteWrites | None:
    if choose.chance(60):
        return None
    policy = choose.pick(tuple(RemotePolicy))
    return RemoteWrites(policy, choose.pick((0, 0, 35)), choose.pick((0, 0, 4)), choose.pick((0.05, 0.5, 1.0)))


def _with_slices(choose: Chooser, policy: Policy) -> Policy:
    """Shortens moves, events and slices, since tiers of a few slots never fill them at the usual length."""
    return replace(
        policy,
        blocks_a_move=choose.pick((policy.blocks_a_move, 2, 1)),
        blocks_an_event=choose.pick((policy.blocks_an_event, 2)),
        blocks_a_call=choose.pick((1, 3, policy.blocks_a_call)),
    )


def draw_memory(choose: Chooser, groups: int) -> tuple[Mapping[Tier, int], ...]:
    """Draws memory tiers of a few slots; often both tiers, sometimes one, the same in every group."""
    tiers = choose.pick((*[(Tier.DEVICE, Tier.HOST)] * 6, (Tier.DEVICE,), (Tier.HOST,)))
    most = 8 if choose.chance(20) else 4
    return tuple({tier: choose.between(1, most) for tier in tiers} for _ in range(groups))
