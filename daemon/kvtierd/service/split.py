"""How a tier's budget is split over a cache's window groups where nobody has said by hand.

Groups differ in what they keep of a sequence of n blocks: a full-attention group all n, a sliding one those that its
window covers and one more, so that a whole window is there while the next block fills. A group's share is in proportion
to the bytes it keeps of a reference sequence. That is as long as useful, 32,768 tokens, or as long as the budget can
hold whole: so a small budget holds at least one sequence in all its groups, and in a large one each group runs out
after the same number of sequences.

TensorRT-LLM splits by bytes of a token x window x layers (2025), or gives each window the same share unless
TRTLLM_WINDOW_SIZE_SHARES says otherwise (2026); its windows, too, keep one block more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from kvtier.abi.control import MAX_SLOTS
from kvtier.abi.spec import CacheSpec

REFERENCE_TOKENS: Final = 32_768


def least_bytes(spec: CacheSpec) -> int:
    """The smallest budget of a tier: a slot for each group."""
    return sum(_sequence_bytes(spec, 1))


def most_bytes(spec: CacheSpec) -> int:
    """The largest budget of a tier that can be used up."""
    return sum(MAX_SLOTS * spec.record_bytes(group) for group in range(len(spec.groups)))


def split(spec: CacheSpec, budget: int) -> tuple[int, ...]:
    """Slots by group for ``budget`` bytes of a tier; none is 0. What is left over is less than any group's slot.

    ``budget`` is at least :func:`least_bytes`; no group gets more than MAX_SLOTS.
    """
    longest = range(1, _blocks(spec, REFERENCE_TOKENS) + 1)
    fitting = bisect_right(longest, budget, key=lambda blocks: sum(_sequence_bytes(spec, blocks)))
    if not fitting:
        raise ValueError(f"{budget} bytes for {len(spec.groups)} groups: at least {least_bytes(spec)}")
    weights = _sequence_bytes(spec, fitting)
    each = [spec.record_bytes(group) for group in range(len(spec.groups))]
    slots = [budget * weight // (sum(weights) * size) for weight, size in zip(weights, each, strict=True)]
    return _without_rest(slots, each, budget)


def _without_rest(slots: Sequence[int], each: Sequence[int], budget: int) -> tuple[int, ...]:
    """Gives out what rounding left, to the largest slots first, for the smallest fill the rest best."""
    filled = [min(count, MAX_SLOTS) for count in slots]
    rest = budget - sum(count * size for count, size in zip(filled, each, strict=True))
    for group in sorted(range(len(each)), key=lambda group: -each[group]):
        more = min(rest // each[group], MAX_SLOTS - filled[group])
        filled[group] += more
        rest -= more * each[group]
    return tuple(filled)


def _sequence_bytes(spec: CacheSpec, blocks: int) -> list[int]:
    """What each group keeps of a sequence of so many blocks."""
    windows = (group.window_tokens for group in spec.groups)
    kept = (min(blocks, _blocks(spec, window) + 1) if window else blocks for window in windows)
    return [spec.record_bytes(group) * count for group, count in enumerate(kept)]


def _blocks(spec: CacheSpec, tokens: int) -> int:
    return -(-tokens // spec.tokens_per_block)
