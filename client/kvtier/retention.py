"""How long blocks are worth keeping, said in tokens: what an engine knows of a request.

TensorRT-LLM's rules: ranges of prompt tokens, sorted and without overlap, each with a priority and a duration; what is
generated has its own. A block belongs to the range of its FIRST token, so a range that begins within a block misses it,
and one that ends within a block has all of it. A block of no range gets the default of 35 where it is stored, and stays
as it is where it is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from kvtier.abi.keys import KEY_BYTES
from kvtier.errors import InvalidArgument, require_within
from kvtier.types import DEFAULT_PRIORITY
from kvtier.v1 import blocks_pb2

MAX_PRIORITY: Final = 100
MAX_TOKEN: Final = (1 << 63) - 1
MAX_DURATION_MS: Final = (1 << 32) - 1
_MAX_MIN_BLOCKS: Final = 2**32 - 1
"""What the wire can carry."""
UNCHANGED: Final = 255
"""On the wire, in place of a priority: the block keeps what it has."""


@dataclass(slots=True, frozen=True)
class TokenRange:
    """Tokens ``[start, end)``; ``end`` None = to the end, for the last range only. ``duration_s``: how long after its
    release a block keeps the priority; None = for ever."""

    start: int
    end: int | None
    priority: int
    duration_s: float | None = None


@dataclass(slots=True, frozen=True)
class Retention:
    """Of a sequence. ``prompt_tokens``: from there on tokens are generated, and ``decode_…`` counts; None = all given
    are the prompt's. ``first_token``: where in the sequence the first block that this is used for begins.

    Raises :class:`InvalidArgument` for ranges that are empty, overlap or are out of order, and for values out of range.
    """

    ranges: tuple[TokenRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None
    prompt_tokens: int | None = None
    first_token: int = 0

    def __post_init__(self) -> None:
        end: int | None = 0
        for index, each in enumerate(self.ranges):
            field = f"ranges[{index}]"
            for name in ("start", "end"):
                _check_token(f"{field}.{name}", getattr(each, name))
            if end is None:
                raise InvalidArgument(f"ranges[{index - 1}].end", None, "a token: only the last range goes to the end")
            if each.start < end:
                raise InvalidArgument(f"{field}.start", each.start, f"{end} or more: ranges are sorted")
            if each.end is not None and each.end <= each.start:
                raise InvalidArgument(f"{field}.end", each.end, f"more than {each.start}: a range is not empty")
            check_priority(f"{field}.priority", each.priority)
            duration_ms(f"{field}.duration_s", each.duration_s)
            end = each.end
        check_priority("decode_priority", self.decode_priority)
        duration_ms("decode_duration_s", self.decode_duration_s)
        for name in ("prompt_tokens", "first_token"):
            _check_token(name, getattr(self, name))

    def starting_at(self, token: int) -> Self:
        """The same sequence's, for blocks from this token on."""
        return replace(self, first_token=token)

    def after(self, blocks: int, tokens_per_block: int) -> Self:
        """The same, for what comes after so many blocks."""
        return self.starting_at(self.first_token + blocks * tokens_per_block)

    def of_blocks(self, count: int, tokens_per_block: int, outside: int = DEFAULT_PRIORITY) -> BlockRetention:
        """Of the next ``count`` blocks. ``outside``: the priority of those of no range."""
        chosen = [self._of_token(self.first_token + block * tokens_per_block, outside) for block in range(count)]
        return BlockRetention(bytes(p for p, _ in chosen), tuple(d for _, d in chosen))

    def _of_token(self, token: int, outside: int) -> tuple[int, int]:
        if self.prompt_tokens is not None and token >= self.prompt_tokens:
            return self.decode_priority, duration_ms("decode_duration_s", self.decode_duration_s)
        for each in self.ranges:
            if each.start <= token and (each.end is None or token < each.end):
                return each.priority, duration_ms("duration_s", each.duration_s)
        return outside, 0


def _check_token(field: str, value: int | None) -> None:
    if value is not None:
        require_within(field, value, 0, MAX_TOKEN, "a token's number, 0 or more")


@dataclass(slots=True, frozen=True)
class BlockRetention:
    """One priority and one duration (0 = for ever) a block, as on the wire."""

    priorities: bytes = b""
    durations_ms: tuple[int, ...] = ()

    def only(self, blocks: Sequence[int]) -> BlockRetention:
        """Of these blocks. One that gives no priorities, or no durations, gives none."""
        return BlockRetention(
            bytes(self.priorities[block] for block in blocks if self.priorities),
            tuple(self.durations_ms[block] for block in blocks if self.durations_ms),
        )


def block_retention(
    count: int,
    tokens_per_block: int,
    priorities: int | Sequence[int] | None,
    retention: Retention | BlockRetention | None,
) -> BlockRetention:
    """What is to be committed with so many blocks; nothing given: the daemon's defaults."""
    if retention is None:
        return BlockRetention(each_priority(count, priorities))
    if priorities is not None:
        raise InvalidArgument("priorities", priorities, "None where there is a retention")
    return retention if isinstance(retention, BlockRetention) else retention.of_blocks(count, tokens_per_block)


def each_priority(count: int, priorities: int | Sequence[int] | None) -> bytes:
    """Priorities given for all, or one a block; none at all for None."""
    if priorities is None:
        return b""
    if not isinstance(priorities, Iterable):
        return bytes([check_priority("priorities", priorities)]) * count
    listed = list(priorities)
    _require_one_each("priorities", len(listed), count)
    return bytes(check_priority(f"priorities[{index}]", value) for index, value in enumerate(listed))


def check_priority(field: str, value: int) -> int:
    require_within(field, value, 0, MAX_PRIORITY)
    return value


def duration_ms(field: str, seconds: float | None) -> int:
    """Whole milliseconds, at least one; 0 for None."""
    if seconds is None:
        return 0
    if not 0 < seconds <= MAX_DURATION_MS / 1000:
        raise InvalidArgument(field, seconds, f"more than 0, at most {MAX_DURATION_MS / 1000:.0f} seconds, or None")
    return min(MAX_DURATION_MS, math.ceil(seconds * 1000))


def each_duration_ms(count: int, durations_s: float | Sequence[float | None] | None) -> tuple[int, ...]:
    """Durations given for all, or one a block; none at all for None."""
    if durations_s is None:
        return ()
    if not isinstance(durations_s, Iterable):
        return (duration_ms("durations_s", durations_s),) * count
    durations = tuple(duration_ms(f"durations_s[{index}]", value) for index, value in enumerate(durations_s))
    _require_one_each("durations_s", len(durations), count)
    return durations


def _require_one_each(field: str, given: int, count: int) -> None:
    if given != count:
        raise InvalidArgument(field, f"{given} values", f"{count} values, one a block, or one for all")


def chain_message(keys: bytes, min_blocks: int, retention: Retention | None, tokens_per_block: int) -> blocks_pb2.Chain:
    """A chain to acquire; its blocks of no range stay as they are. Raises :class:`InvalidArgument`."""
    count = len(keys) // KEY_BYTES
    if count:
        require_within("min_blocks", min_blocks, 0, count, f"0 to {count}, the blocks of the chain")
    else:  # of a prompt shorter than a block any number is too many, which is no mistake of the caller's
        require_within("min_blocks", min_blocks, 0, _MAX_MIN_BLOCKS)
    if retention is None:
        return blocks_pb2.Chain(keys=keys, min_blocks=min_blocks)
    kept = retention.of_blocks(count, tokens_per_block, UNCHANGED)
    return blocks_pb2.Chain(
        keys=keys, min_blocks=min_blocks, priorities=kept.priorities, durations_ms=kept.durations_ms
    )
