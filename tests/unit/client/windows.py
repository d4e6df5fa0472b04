"""A chain of keys, the window groups that hold blocks of it, and what a prefix of it needs, by the definition."""

import hashlib
from collections.abc import Mapping
from typing import Final

from hypothesis import strategies as st

TOKENS: Final = 4
WINDOWS: Final = (6, 0, 100, 6, 0)
SINKS: Final = (0, 0, 0, 9, 0)
FLAT: Final = (False, False, False, False, True)
"""In tokens: a window of two blocks, a full group, a window of 25, one of two with three sinks, and a flat group."""
FULL: Final = 1
LENGTH: Final = 90
KEYS: Final = [hashlib.sha256(b"%d" % number).digest() for number in range(LENGTH)]
PACKED: Final = b"".join(KEYS)

full_groups = st.integers(0, LENGTH).map(lambda n: set(range(n)))
sliding_groups = st.one_of(
    st.sets(st.integers(0, LENGTH - 1)),
    st.sets(st.integers(0, LENGTH - 1), max_size=6).map(lambda holes: set(range(LENGTH)) - holes),
)
holdings = st.tuples(sliding_groups, full_groups, sliding_groups, sliding_groups, sliding_groups)
"""The places that each group holds."""


def needed(group: int, blocks: int) -> set[int]:
    """Token by token: the blocks that a prefix of so many needs in the group."""
    tokens = blocks * TOKENS
    first = max(0, tokens - WINDOWS[group]) if WINDOWS[group] else 0
    return {token // TOKENS for token in (*range(min(SINKS[group], tokens)), *range(first, tokens))}


def longest(held: Mapping[int, set[int]], length: int) -> int:
    """The longest prefix of which each of these groups holds what it needs."""
    return next(n for n in range(length, -1, -1) if all(needed(g, n) <= h for g, h in held.items()))
