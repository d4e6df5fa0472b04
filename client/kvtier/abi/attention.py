"""The blocks of a sequence that a window group needs: one rule for the daemon and its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeVar

T = TypeVar("T")


class Needed(NamedTuple):
    """Blocks ``[0, sinks)`` and ``[first, stop)`` of a chain, which a prefix of ``stop`` blocks needs. ``sinks`` is at
    most ``first``."""

    sinks: int = 0
    first: int = 0
    stop: int = 0

    def pick(self, items: Sequence[T]) -> Sequence[T]:
        """Picks the items of the needed blocks. ``items``: one per block of the chain."""
        window = items[self.first : self.stop]
        return [*items[: self.sinks], *window] if self.sinks else window

    def cut(self, packed: bytes, each: int = 1) -> bytes:
        """Like :meth:`pick`, for packed items of ``each`` bytes."""
        return packed[: self.sinks * each] + packed[self.first * each : self.stop * each]

    def spread(self, items: Sequence[T]) -> list[T | None]:
        """Returns items, one per needed block, at their places in the chain; None at other places."""
        return [*items[: self.sinks], *[None] * (self.first - self.sinks), *items[self.sinks :]]


NOTHING: Final = Needed()


@dataclass(slots=True, frozen=True)
class Attention:
    """``span``: number of last blocks of a sequence in a sliding window, 0 = all; ``sinks``: number of first blocks
    that it keeps, too. ``chained``: a block needs the block before it, and is not stored without it."""

    span: int = 0
    sinks: int = 0
    chained: bool = True

    @classmethod
    def of(cls, tokens_per_block: int, window_tokens: int, sink_tokens: int = 0, *, flat: bool = False) -> Self:
        """See :class:`kvtier.abi.spec.WindowGroupSpec`."""
        span, sinks = (0 if flat else -(-tokens // tokens_per_block) for tokens in (window_tokens, sink_tokens))
        return cls(span, sinks, chained=not flat and not span)

    def first_block(self, blocks: int) -> int:
        """Returns the first block in the window of a prefix of ``blocks`` blocks."""
        return max(0, blocks - self.span) if self.span else 0

    def needs(self, blocks: int) -> Needed:
        """Returns the blocks that a prefix of ``blocks`` blocks needs."""
        first = self.first_block(blocks)
        return Needed(min(self.sinks, first), first, blocks)
