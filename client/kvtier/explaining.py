"""Where a block is, what holds it, and what the event log knows of its past: the values of ``client.explain``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.errors import InvalidArgument
from kvtier.events import Event, Gap
from kvtier.stats import LeaseInfo
from kvtier.types import Cause, Cursor, EventType, Tier
from kvtier.v1 import admin_pb2
from kvtier.watch import Watch
from kvtier.wire import cursor_from_wire, lease_info, split_keys, tier_from_wire

SHORTEST_PREFIX: Final = 4
MOST_KEYS: Final = 32

WHY_GONE: Final[Mapping[int, str]] = {
    Cause.CAPACITY: "Room was needed, and no tier below could or should take it.",
    Cause.EXPLICIT: "It was dropped by call, or its cache was removed.",
    Cause.RESET: "Its cache was reset.",
    Cause.CORRUPT: "Its bytes failed verification, and there was no other copy.",
    Cause.IO_ERROR: "The tier that it was in failed for longer than the grace period, and there was no other copy.",
    Cause.ANCESTOR: "A block that it stands on was dropped or lost; without that block nobody could reach it.",
    Cause.LOST: "It was lost with the memory of a daemon that ended uncleanly.",
    Cause.SHUTDOWN: "The daemon was stopped, and the block was only in memory that ended with it.",
}
"""By the cause of the event that took the block away."""


class CopyState(IntEnum):
    """``LEAVING``: the copy goes as soon as it is copied down, unless it is used before."""

    FILLING = 1
    READY = 2
    LEAVING = 3


@dataclass(slots=True, frozen=True)
class CopyExplained:
    """A block's bytes in one tier. ``readers``: copies under way that read it."""

    tier: Tier
    slot: int
    state: CopyState
    pins: int
    readers: int


@dataclass(slots=True, frozen=True)
class BlockExplained:
    """The block in one cache and window group.

    ``priority`` is effective: the highest of ``own_priority`` and of the children's. ``duration_ms``: how long the
    block keeps its own after its release, 0 = for ever. ``deadline_ns``: when that ends, by the daemon's clock, 0 = its
    clock stands. ``leases``: those that hold it; their pid is 0 for a caller who may not see whose they are.
    """

    cache: str
    group: int
    parent: bytes | None
    depth: int
    children: int
    priority: int
    own_priority: int
    duration_ms: int
    deadline_ns: int
    copies: tuple[CopyExplained, ...]
    leases: tuple[LeaseInfo, ...]

    @property
    def residency(self) -> int:
        """The tiers where it is ready, as a bit set."""
        return sum(copy.tier.bit for copy in self.copies if copy.state is not CopyState.FILLING)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "parent": None if self.parent is None else self.parent.hex(),
            "copies": [
                {**asdict(copy), "tier": str(copy.tier), "state": copy.state.name.lower()} for copy in self.copies
            ],
            "leases": [{**asdict(lease), "tier": str(lease.tier)} for lease in self.leases],
        }


@dataclass(slots=True, frozen=True)
class Explanation:
    """What is known of a block.

    ``keys``: those known that begin as ``asked``, at most 32; one where it is clear which block is meant. ``blocks``:
    where it is stored, one a cache and window group. ``past``: its events that the log still has, the oldest first;
    None where the caller may not watch, or did not ask. ``gaps``: lost events, which may have been of it. ``time_ns``:
    the daemon's clock when it answered.
    """

    asked: bytes
    keys: tuple[bytes, ...]
    blocks: tuple[BlockExplained, ...]
    past: tuple[Event, ...] | None
    gaps: tuple[Gap, ...]
    as_of: Cursor
    time_ns: int

    @property
    def state(self) -> str:
        """``stored``; ``ambiguous``; ``gone``: the log knows that it was stored; ``unknown``: nothing is known."""
        if self.blocks:
            return "stored"
        if len(self.keys) > 1:
            return "ambiguous"
        return "gone" if self.past else "unknown"

    def endings(self) -> Iterator[Event]:
        """The last event of each cache and group that it is gone from."""
        there = {(block.cache, block.group) for block in self.blocks}
        last = {(event.cache, event.group): event for event in self.past or ()}
        gone = (EventType.REMOVED, EventType.CLEARED)
        return (event for place, event in last.items() if place not in there and event.type in gone)

    def to_json(self) -> dict[str, Any]:
        """One object: keys in hex, tiers and causes by name, times in nanoseconds."""
        return {
            "state": self.state,
            "asked": self.asked.hex(),
            "keys": [key.hex() for key in self.keys],
            "blocks": [block.to_json() for block in self.blocks],
            "past": None if self.past is None else [event.to_json() for event in self.past],
            "gaps": [gap.to_json() for gap in self.gaps],
            "as_of": str(self.as_of),
            "time_ns": self.time_ns,
        }


def why_gone(cause: Cause | int) -> str:
    """A sentence for a block whose last event had this cause."""
    return WHY_GONE.get(cause, f"Cause {cause}: this client has no words for it.")


def key_or_prefix(value: bytes | str) -> bytes:
    """Raises :class:`InvalidArgument` where it is not 4 to 32 bytes, or their hex."""
    limit = f"{SHORTEST_PREFIX} to {KEY_BYTES} bytes, or {2 * SHORTEST_PREFIX} to {2 * KEY_BYTES} hexadecimal digits"
    try:
        key = bytes.fromhex(value) if isinstance(value, str) else bytes(memoryview(value))
    except (ValueError, TypeError) as error:
        raise InvalidArgument("key", value, f"{limit}, an even number") from error
    if not SHORTEST_PREFIX <= len(key) <= KEY_BYTES:
        raise InvalidArgument("key", value, limit)
    return key


def explanation_from_wire(asked: bytes, message: admin_pb2.ExplainResponse) -> Explanation:
    """Without a past."""
    return Explanation(
        asked=asked,
        keys=tuple(split_keys(message.keys)),
        blocks=tuple(map(_block, message.blocks)),
        past=None,
        gaps=(),
        as_of=cursor_from_wire(message.as_of_event),
        time_ns=message.time_ns,
    )


async def with_past(now: Explanation, watch: Watch) -> Explanation:
    """With what the log knows. ``watch``: from the oldest event on, of these keys alone, with heartbeats."""
    keys = set(now.keys)
    past: list[Event] = []
    gaps: list[Gap] = []
    there: set[tuple[str, int]] = set()
    async with aclosing(watch):
        async for item in watch:
            match item:
                case Gap():
                    gaps.append(item)
                case Event() if item.cursor <= now.as_of:
                    place = (item.cache, item.group)
                    keys.update(item.keys)
                    if item.keys or (item.type is EventType.CLEARED and place in there):
                        past.append(item)
                    if item.type in (EventType.REMOVED, EventType.CLEARED):
                        there.discard(place)
                    elif item.keys:
                        there.add(place)
            if watch.cursor is not None and watch.cursor >= now.as_of:
                break
    clear = len(keys) == 1
    return replace(
        now,
        keys=tuple(sorted(keys)[:MOST_KEYS]),
        past=tuple(past) if clear else (),
        gaps=tuple(gaps),
    )


def _block(message: admin_pb2.ExplainedBlock) -> BlockExplained:
    return BlockExplained(
        cache=message.cache,
        group=message.group,
        parent=message.parent or None,
        depth=message.depth,
        children=message.children,
        priority=message.priority,
        own_priority=message.own_priority,
        duration_ms=message.duration_ms,
        deadline_ns=message.deadline_ns,
        copies=tuple(
            CopyExplained(
                tier_from_wire(copy.tier),
                copy.slot,
                CopyState(copy.state),
                copy.pins,
                copy.readers,
            )
            for copy in message.copies
        ),
        leases=tuple(map(lease_info, message.leases)),
    )
