"""Who has the longest prefix, of several daemons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier.answers import GroupSpan
from kvtier.mirror.reading import MirrorState, MirrorView
from kvtier.types import Tier, fastest
from kvtier.wire import Keys, packed_keys


@dataclass(slots=True, frozen=True)
class Standing:
    """What one daemon has of a chain. ``blocks``: of its longest prefix.

    ``by_tier``: in how many of the blocks that it would read for that, over all window groups, each tier is the
    fastest. ``state`` and ``lag``: what that is worth, see :class:`kvtier.MirrorState` and :attr:`kvtier.Mirror.lag`.
    """

    name: str
    blocks: int
    by_tier: Mapping[Tier, int]
    state: MirrorState
    lag: int


def ranked(mirrors: Mapping[str, MirrorView], keys: Keys, cache: str | None, tiers: Collection[Tier]) -> list[Standing]:
    """The longest prefix first; of equals an exact one, then the one with more in faster tiers, then by name."""
    packed = packed_keys(keys)
    return sorted((_standing(name, mirror, packed, cache, tiers) for name, mirror in mirrors.items()), key=_rank)


def _standing(name: str, mirror: MirrorView, keys: bytes, cache: str | None, tiers: Collection[Tier]) -> Standing:
    state, lag = mirror.state, mirror.lag  # before the look: what is called exact was so when it was looked at
    found = mirror.match(keys, cache, tiers=tiers)
    return Standing(name, found.blocks, _by_tier(found.groups), state, lag)


def _by_tier(groups: tuple[GroupSpan, ...]) -> dict[Tier, int]:
    counts = Counter(residency for span in groups for residency in span.residency)
    by_tier: Counter[Tier] = Counter()
    for residency, count in counts.items():
        tier = fastest(residency)
        if tier is not None:
            by_tier[tier] += count
    return {tier: by_tier[tier] for tier in Tier}


def _rank(standing: Standing) -> tuple[object, ...]:
    faster_first = [-standing.by_tier[tier] for tier in Tier]
    return (-standing.blocks, standing.state is not MirrorState.EXACT, faster_first, standing.name)
