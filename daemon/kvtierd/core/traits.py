"""What is kept of a block besides its bytes: it travels with the block to disk and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

EVENT_HASH_BYTES: Final = (0, 8, 32)
"""Lengths that an event hash may have: none, 64 bits, a digest."""

MAX_TOKEN_BYTES: Final = 1 << 16


@dataclass(slots=True, frozen=True)
class Label:
    """How others know the block; the core only passes it on.

    ``event_hash``: the name that events give it besides its key. ``tokens``: packed, opaque, at most
    ``MAX_TOKEN_BYTES``.
    """

    event_hash: bytes = b""
    tokens: bytes = b""


class Traits(NamedTuple):
    """A tuple, because a restart makes one for every block on disk.

    ``priority``: the block's own. ``duration_ms``: how long it holds after the last release; 0 = for ever.
    ``deadline_ns``: the wall time at which it falls; 0 where its clock stands. ``label``: None for a block without hash
    and tokens, which costs nothing.
    """

    priority: int
    duration_ms: int = 0
    deadline_ns: int = 0
    label: Label | None = None


_PLAIN: Final = tuple(Traits(priority) for priority in range(101))


def traits_of(priority: int, duration_ms: int, label: Label | None) -> Traits:
    """Of a block whose clock stands."""
    if duration_ms or label is not None or not 0 <= priority < len(_PLAIN):
        return Traits(priority, duration_ms, 0, label)
    return _PLAIN[priority]


def shared(traits: Traits) -> Traits:
    """The same, as one object for all blocks that have nothing but a priority: most have no more."""
    priority, duration_ms, deadline_ns, label = traits
    if duration_ms or deadline_ns or label is not None or not 0 <= priority < len(_PLAIN):
        return traits
    return _PLAIN[priority]
