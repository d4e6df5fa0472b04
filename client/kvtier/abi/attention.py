"""What a window group needs of a sequence, counted in blocks: one rule for the daemon and its clients."""

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
        """Of items, one a block of the chain, those of the blocks needed."""
        window = items[self.first : self.stop]
        return [*items[: self.sinks], *window] if self.sinks else window

    def cut(self, packed: bytes, each: int = 1) -> bytes:
        """As :meth:`pick`, of packed items of so many bytes each."""
        return packed[: self.sinks * each] + packed[self.first * each : self.stop * each]

    def spread(self, items: Sequence[T]) -> list[T | None]:
        """Items, one a block needed, at their places in the chain; None at the others."""
        return [*items[: self.sinks], *[None] * (self.first - self.sinks), *items[self.sinks :]]


NOTHING: Final = Needed()


@dataclass(slots=True, frozen=True)
class Attention:
    """``span``: how many last blocks of a sequence a sliding window covers, 0 = all; ``sinks``: how many first ones it
    keeps besides. ``chained``: a block stands on the one before it, and is not there without."""

    span: int = 0
    sinks: int = 0
    chained: bool = True

    @classmethod
    def of(cls, tokens_per_block: int, window_tokens: int, sink_tokens: int = 0, *, flat: bool = False) -> Self:
        """See :class:`kvtier.abi.spec.WindowGroupSpec`."""
        span, sinks = (-(-tokens // tokens_per_block) for tokens in (window_tokens, sink_tokens))
        return cls(span, sinks, chained=not flat and not span)

    def first_block(self, blocks: int) -> int:
        """Where the window of a prefix of so many begins."""
        return max(0, blocks - self.span) if self.span else 0

    def needs(self, blocks: int) -> Needed:
        """What a prefix of so many blocks needs."""
        first = self.first_block(blocks)
        return Needed(min(self.sinks, first), first, blocks)
