"""Which of several daemons has the longest prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier.mirror.follower import MirrorState, MirrorView
from kvtier.types import Tier, fastest
from kvtier.wire import GroupSpan, Keys, packed_keys


@dataclass(slots=True, frozen=True)
class Standing:
    """What one daemon has of a chain. ``blocks``: of its longest prefix.

    ``by_tier``: how many of the blocks of that prefix, over all window groups, have each tier as their fastest.
    ``state`` and ``lag``: see :class:`kvtier.MirrorState` and :attr:`kvtier.Mirror.lag`.
    """

    name: str
    blocks: int
    by_tier: Mapping[Tier, int]
    state: MirrorState
    lag: int


def rank_mirrors(
    mirrors: Mapping[str, MirrorView], keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()
) -> list[Standing]:
    """What each daemon has of the chain, without a call.

    The longest prefix comes first; of equals an exact mirror, then the one with more in faster tiers, then by name. A
    stale mirror keeps its place: its daemon had these blocks when it was last heard.

    Args:
        mirrors: by name. Other arguments as of :meth:`kvtier.Mirror.match`.
    """
    packed = packed_keys(keys)
    standings = []
    for name, mirror in mirrors.items():
        state, lag = mirror.state, mirror.lag  # before the look, so that an exact answer was exact when it was given
        found = mirror.match(packed, cache, tiers=tiers)
        standings.append(Standing(name, found.blocks, _by_tier(found.groups), state, lag))
    return sorted(standings, key=_rank)


def _by_tier(groups: tuple[GroupSpan, ...]) -> dict[Tier, int]:
    counts = Counter(fastest(residency) for span in groups for residency in span.residency)
    return {tier: counts[tier] for tier in Tier}


def _rank(standing: Standing) -> tuple[object, ...]:
    faster_first = [-standing.by_tier[tier] for tier in Tier]
    return (-standing.blocks, standing.state is not MirrorState.EXACT, faster_first, standing.name)
