"""Retention of blocks, given in tokens: the knowledge that an engine has of a request.

The rules are TensorRT-LLM's: sorted, non-overlapping ranges of prompt tokens, each with a priority and a duration;
generated tokens have their own. A block belongs to the range of its FIRST token: a range that begins within a block
misses the block, a range that ends within a block has all of it. A block in no range gets the default priority of 35
when stored, and stays as it is when found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.abi.words import ENDED_MS, KEY_BYTES
from kvtier.errors import InvalidArgument, require_kind, require_within
from kvtier.types import DEFAULT_PRIORITY
from kvtier.v1 import blocks_pb2

MAX_PRIORITY: Final = 100
MAX_TOKEN: Final = (1 << 63) - 1
MAX_DURATION_MS: Final = ENDED_MS - 1
_MAX_MIN_BLOCKS: Final = 16_384
"""Most keys of a call."""
MAX_TAG_BYTES: Final = 128
UNCHANGED: Final = 255
"""In place of a priority on the wire: the block keeps its retention."""


@dataclass(slots=True, frozen=True)
class TokenRange:
    """Tokens ``[start, end)`` and their retention. ``end``: None = to the end, for the last range only. ``duration_s``:
    how long after its release a block keeps the priority; None = for ever."""

    start: int
    end: int | None
    priority: int
    duration_s: float | None = None


@dataclass(slots=True, frozen=True)
class Retention:
    """Priorities of the blocks of a sequence, and how long they last.

    ``prompt_tokens``: length of the prompt; later tokens are generated and take the ``decode_…`` values; None = all
    tokens are the prompt's. ``first_token``: position in the sequence where the first block begins. ``conversation``:
    the tag of the conversation that has the sequence, at most 128 bytes: see :class:`kvtier.Hint`. Raises
    :class:`InvalidArgument` for ranges that are empty, overlap or are out of order, and for values out of range.
    """

    ranges: tuple[TokenRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None
    prompt_tokens: int | None = None
    first_token: int = 0
    conversation: bytes | str = b""

    def __post_init__(self) -> None:
        conversation_tag(self.conversation)
        end: int | None = 0
        require_kind("ranges", self.ranges, Sequence)
        for index, each in enumerate(self.ranges):
            field = f"ranges[{index}]"
            require_kind(field, each, TokenRange)
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

    def of_blocks(self, count: int, tokens_per_block: int, outside: int = DEFAULT_PRIORITY) -> BlockRetention:
        """The retention of the next ``count`` blocks. ``outside``: priority of blocks in no range."""
        chosen = [self._of_token(self.first_token + block * tokens_per_block, outside) for block in range(count)]
        tag = conversation_tag(self.conversation)
        return BlockRetention(bytes(p for p, _ in chosen), tuple(d for _, d in chosen), tag)

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
    """A priority and a duration (0 = for ever) per block, and the tag of a conversation, as on the wire."""

    priorities: bytes = b""
    durations_ms: tuple[int, ...] = ()
    conversation: bytes = b""

    def only(self, blocks: Sequence[int]) -> BlockRetention:
        """The retention of these blocks. Missing priorities or durations stay missing."""
        return BlockRetention(
            bytes(self.priorities[block] for block in blocks if self.priorities),
            tuple(self.durations_ms[block] for block in blocks if self.durations_ms),
            self.conversation,
        )


def block_retention(
    count: int,
    tokens_per_block: int,
    priorities: int | Sequence[int] | None,
    retention: Retention | BlockRetention | None,
) -> BlockRetention:
    """The retention to commit with ``count`` blocks; without arguments, the daemon's defaults."""
    if retention is None:
        return BlockRetention(each_priority(count, priorities))
    if priorities is not None:
        raise InvalidArgument("priorities", priorities, "None where there is a retention")
    require_kind("retention", retention, Retention, BlockRetention)
    return retention if isinstance(retention, BlockRetention) else retention.of_blocks(count, tokens_per_block)


def each_priority(count: int, priorities: int | Sequence[int] | None) -> bytes:
    """Priorities, one byte per block, from one for all or one per block; empty for None."""
    return bytes(_each("priorities", count, priorities, check_priority))


def conversation_tag(tag: bytes | str) -> bytes:
    """Checks a conversation's tag. Raises :class:`InvalidArgument`."""
    require_kind("conversation", tag, bytes, str)
    packed = tag.encode() if isinstance(tag, str) else tag
    if len(packed) > MAX_TAG_BYTES:
        raise InvalidArgument("conversation", f"{len(packed)} bytes", f"at most {MAX_TAG_BYTES} bytes")
    return packed


def check_priority(field: str, value: int) -> int:
    return require_within(field, value, 0, MAX_PRIORITY)


def duration_ms(field: str, seconds: float | None) -> int:
    """Seconds as whole milliseconds, at least one; 0 for None."""
    if seconds is None:
        return 0
    most = MAX_DURATION_MS / 1000
    require_within(field, seconds, 1e-9, most, f"more than 0, at most {most:.0f} seconds, or None")
    return min(MAX_DURATION_MS, math.ceil(seconds * 1000))


def each_duration_ms(count: int, durations_s: float | Sequence[float | None] | None) -> tuple[int, ...]:
    """Durations in milliseconds, from one for all or one per block; empty for None."""
    return tuple(_each("durations_s", count, durations_s, duration_ms))


def _each(field: str, count: int, given: object, checked: Callable[[str, Any], int]) -> list[int]:
    if given is None:
        return []
    if not isinstance(given, Iterable) or isinstance(given, str):
        return [checked(field, given)] * count
    values = [checked(f"{field}[{index}]", value) for index, value in enumerate(given)]
    if len(values) != count:
        raise InvalidArgument(field, f"{len(values)} values", f"{count} values, one a block, or one for all")
    return values


def chain_message(keys: bytes, min_blocks: int, retention: Retention | None, tokens_per_block: int) -> blocks_pb2.Chain:
    """The message of a chain to acquire; blocks in no range keep their retention. Raises :class:`InvalidArgument`."""
    count = len(keys) // KEY_BYTES
    most = count or _MAX_MIN_BLOCKS  # above 0 is no mistake for a prompt shorter than a block, which has no keys
    require_within("min_blocks", min_blocks, 0, most, f"0 to {most}, the blocks of the chain")
    require_kind("retention", retention, Retention, type(None))
    kept = BlockRetention() if retention is None else retention.of_blocks(count, tokens_per_block, UNCHANGED)
    return blocks_pb2.Chain(
        keys=keys,
        min_blocks=min_blocks,
        priorities=kept.priorities,
        durations_ms=kept.durations_ms,
        conversation=kept.conversation,
    )
