"""All there is to say of one block: where it is, why it stays or goes next, and what the log knows of its past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.causes import why_gone
from kvtier.errors import InvalidArgument
from kvtier.events import Event, Gap
from kvtier.kinds import require_kind
from kvtier.types import Cause, Cursor, EventType, Tier, tiers_of
from kvtier.v1 import explain_pb2
from kvtier.watch import Watch
from kvtier.wire import cursor_from_wire, split_keys, tier_from_wire

SHORTEST_PREFIX: Final = 4
MOST_CANDIDATES: Final = 32


class _Word(IntEnum):
    """A value of the wire that people read. What a newer daemon says besides is 0."""

    @classmethod
    def _missing_(cls, value: object) -> _Word:
        return cls(0)

    def __str__(self) -> str:
        return self.name.lower()


class CopyState(_Word):
    UNKNOWN = 0
    FILLING = 1
    READY = 2
    LEAVING = 3
    """It goes as soon as the copy downwards that reads it has arrived, unless it is used before."""


class Obstacle(_Word):
    """Why a copy does not leave its tier to make room."""

    UNKNOWN = 0
    FILLING = 1
    LEASED = 2
    PINNED = 3
    AWAITED = 4
    """A call that waits for room has matched the block."""
    MOVING = 5
    """A copy under way needs it."""
    CHILDREN = 6
    """The block is in no other tier and has children, which go first."""
    DISK_CHILDREN = 7
    """On disk: children of the block are there, and need their prefix there."""
    TIER_LOST = 8


class Departure(_Word):
    """How a copy leaves its tier when its turn comes."""

    NEVER = 0
    """Making room does not take it."""
    FREED = 1
    """Without a copy: the block stays in another tier."""
    DEMOTED = 2
    DROPPED = 3


class Precision(_Word):
    """How ``ahead`` is meant."""

    UNKNOWN = 0
    """There is no such number."""
    EXACT = 1
    AT_LEAST = 2
    ABOUT = 3


@dataclass(slots=True, frozen=True)
class CopyExplained:
    """A block's bytes in one tier. ``leases``, ``pins``: that hold it; ``readers``: copies under way that read it;
    ``waiters``: calls that wait for it. ``threshold``: priority from which on blocks go down from the tier, 101 = none
    does. ``ahead``: copies that leave the tier before it when room is made there; ``unheld_slots``: of how many that
    nobody holds; nothing goes while there are ``free_slots``."""

    tier: Tier
    slot: int
    state: CopyState
    leases: int
    pins: int
    readers: int
    waiters: int
    threshold: int
    obstacles: tuple[Obstacle, ...]
    departure: Departure
    ahead: int
    precision: Precision
    free_slots: int
    unheld_slots: int


@dataclass(slots=True, frozen=True)
class MoveExplained:
    """A copy of the block under way."""

    moved_from: Tier
    moved_to: Tier
    cause: Cause | int


@dataclass(slots=True, frozen=True)
class LeaseExplained:
    """A lease that holds the block. ``pid`` 0 where the caller may not see whose it is, or its process is unknown."""

    lease_id: int
    tier: Tier
    age_ns: int
    orphaned: bool
    session_id: int
    pid: int
    uid: int
    command: str


@dataclass(slots=True, frozen=True)
class BlockExplained:
    """The block in one cache and window group. ``priority`` is effective: the highest of ``own_priority`` and of its
    children's. ``duration_ms``: how long it keeps its own after its release, 0 = for ever; ``deadline_ns``: when that
    ends, by the daemon's clock, 0 = its clock stands. ``hot``: the policy of eviction protects it. ``waiting``: calls
    that have matched it and wait for room."""

    cache: str
    group: int
    window_tokens: int
    parent: bytes | None
    depth: int
    children: int
    residency: int
    priority: int
    own_priority: int
    duration_ms: int
    deadline_ns: int
    hot: bool
    waiting: int
    copies: tuple[CopyExplained, ...]
    moves: tuple[MoveExplained, ...]
    leases: tuple[LeaseExplained, ...]
    as_of: Cursor

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(slots=True, frozen=True)
class Past:
    """What one event said of the block. ``before``: its residency until then, None = older than the log; ``residency``:
    after it, 0 = gone. ``priority``: after it, None where it is gone. ``moved_bytes``: of this block."""

    cursor: Cursor
    time_ns: int
    type: EventType
    cause: Cause | int
    cache: str
    group: int
    before: int | None
    residency: int
    priority: int | None
    moved_from: Tier | None = None
    moved_to: Tier | None = None
    moved_bytes: int = 0
    queue_ns: int = 0
    copy_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(slots=True, frozen=True)
class Explanation:
    """``key``: None where several keys begin like what was ``asked`` for (``candidates``, ``more_candidates``), or none
    that is known does. ``blocks``: where it is stored, one a cache and window group. ``past``: the events of the block
    that the log still has, the oldest first; None where the caller may not watch, or did not ask. ``gaps``: events that
    are lost, which may have been of it. ``oldest``: the oldest event that the log has, looked up only where nothing is
    known of the block. ``time_ns``: the daemon's clock when it answered."""

    asked: bytes
    key: bytes | None
    blocks: tuple[BlockExplained, ...]
    past: tuple[Past, ...] | None
    gaps: tuple[Gap, ...]
    candidates: tuple[bytes, ...]
    more_candidates: bool
    oldest: Past | None
    as_of: Cursor
    time_ns: int

    @property
    def state(self) -> str:
        """``stored``; ``ambiguous``; ``gone``: the log knows that it was stored; ``unknown``: nothing is known."""
        if self.blocks:
            return "stored"
        if self.candidates:
            return "ambiguous"
        return "gone" if self.past else "unknown"

    def endings(self) -> Iterator[Past]:
        """The last that was said of it, of each cache and group that it is gone from."""
        last = {(each.cache, each.group): each for each in self.past or ()}
        there = {(block.cache, block.group) for block in self.blocks}
        return (each for place, each in last.items() if place not in there and not each.residency)

    def to_json(self) -> dict[str, Any]:
        """One object: keys in hex, tiers and causes by name, times in nanoseconds."""
        return {
            "state": self.state,
            "key": self.key.hex() if self.key is not None else None,
            "asked": self.asked.hex(),
            "blocks": [block.to_json() for block in self.blocks],
            "past": None if self.past is None else [each.to_json() for each in self.past],
            "gone": [
                {"cache": end.cache, "group": end.group, "cause": str(end.cause), "why": why_gone(end.cause)}
                for end in self.endings()
            ],
            "gaps": [gap.to_json() for gap in self.gaps],
            "candidates": [key.hex() for key in self.candidates],
            "more_candidates": self.more_candidates,
            "oldest": None if self.oldest is None else self.oldest.to_json(),
            "as_of": str(self.as_of),
            "time_ns": self.time_ns,
        }


def key_or_prefix(value: bytes | str) -> bytes:
    """Raises :class:`InvalidArgument` where it is not 4 to 32 bytes, or their hex."""
    limit = f"{SHORTEST_PREFIX} to {KEY_BYTES} bytes, or {2 * SHORTEST_PREFIX} to {2 * KEY_BYTES} hexadecimal digits"
    try:
        key = bytes.fromhex(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidArgument("key", value, f"{limit}, an even number") from error
    require_kind("key", key, (bytes, bytearray, memoryview), limit)
    if not SHORTEST_PREFIX <= len(key) <= KEY_BYTES:
        raise InvalidArgument("key", value, limit)
    return bytes(key)


def explanation_from_wire(asked: bytes, message: explain_pb2.ExplainResponse) -> Explanation:
    """Without a past."""
    as_of = cursor_from_wire(message.as_of_event)
    return Explanation(
        asked=asked,
        key=message.key or None,
        blocks=tuple(_block(each, as_of.epoch) for each in message.blocks),
        past=None,
        gaps=(),
        candidates=tuple(split_keys(message.candidates)),
        more_candidates=message.more_candidates,
        oldest=None,
        as_of=as_of,
        time_ns=message.time_ns,
    )


async def with_past(now: Explanation, watch: Watch) -> Explanation:
    """With what the log knows. ``watch``: from the oldest event on, of these keys, with heartbeats."""
    pasts: dict[bytes, _Tracked] = {}
    gaps = []
    async with aclosing(watch):
        async for item in watch:
            match item:
                case Event() if item.cursor <= now.as_of:
                    _track(pasts, item, now.key or now.asked)
                case Gap():
                    gaps.append(item)
            if watch.cursor is not None and watch.cursor >= now.as_of:
                break
    key = now.key
    if key is None and not now.candidates and len(pasts) == 1:
        (key,) = pasts
    candidates = now.candidates or (tuple(sorted(pasts)) if key is None else ())
    return replace(
        now,
        key=key,
        past=tuple(pasts[key].entries) if key is not None and key in pasts else (),
        gaps=tuple(gaps),
        candidates=candidates[:MOST_CANDIDATES],
        more_candidates=now.more_candidates or len(candidates) > MOST_CANDIDATES,
    )


async def oldest_event(watch: Watch) -> Past | None:
    """The first event of a watch from the oldest on, with heartbeats; None where there is none."""
    async with aclosing(watch):
        async for item in watch:
            match item:
                case Event():
                    return _past(item, None, 0, None)
                case Gap():
                    continue
                case _:
                    return None
    return None


class _Tracked:
    """One key's past so far, and where the block is by it in each cache and group."""

    __slots__ = ("entries", "residency")

    def __init__(self) -> None:
        self.entries: list[Past] = []
        self.residency: dict[tuple[str, int], int] = {}


def _track(pasts: dict[bytes, _Tracked], event: Event, prefix: bytes) -> None:
    place = (event.cache, event.group)
    if event.type is EventType.CREATED:
        return  # after a restart it comes before the clearing, which has the cause
    if event.type is EventType.CLEARED:
        for tracked in pasts.values():
            before = tracked.residency.get(place, 0)
            if before:
                tracked.entries.append(_past(event, before, 0, None))
                tracked.residency[place] = 0
        return
    gone = event.type is EventType.REMOVED
    for number, key in enumerate(event.keys):
        if not key.startswith(prefix):
            continue
        tracked = pasts.setdefault(key, _Tracked())
        before_ = 0 if event.type is EventType.STORED else tracked.residency.get(place)
        after = 0 if gone else event.residency[number]
        tracked.entries.append(_past(event, before_, after, None if gone else event.priorities[number]))
        tracked.residency[place] = after


def _past(event: Event, before: int | None, after: int, priority: int | None) -> Past:
    return Past(
        cursor=event.cursor,
        time_ns=event.time_ns,
        type=event.type,
        cause=event.cause,
        cache=event.cache,
        group=event.group,
        before=before,
        residency=after,
        priority=priority,
        moved_from=event.moved_from,
        moved_to=event.moved_to,
        moved_bytes=event.moved_bytes // max(1, len(event.packed_keys) // KEY_BYTES),
        queue_ns=event.queue_ns,
        copy_ns=event.copy_ns,
    )


def _block(message: explain_pb2.ExplainedBlock, epoch: int) -> BlockExplained:
    return BlockExplained(
        cache=message.cache,
        group=message.group,
        window_tokens=message.window_tokens,
        parent=message.parent or None,
        depth=message.depth,
        children=message.children,
        residency=message.residency,
        priority=message.priority,
        own_priority=message.own_priority,
        duration_ms=message.duration_ms,
        deadline_ns=message.deadline_ns,
        hot=message.hot,
        waiting=message.waiting,
        copies=tuple(map(_copy, message.copies)),
        moves=tuple(
            MoveExplained(tier_from_wire(each.moved_from), tier_from_wire(each.moved_to), _cause(each.cause))
            for each in message.moves
        ),
        leases=tuple(map(_lease, message.leases)),
        as_of=Cursor(epoch, message.as_of_event),
    )


def _copy(message: explain_pb2.ExplainedCopy) -> CopyExplained:
    return CopyExplained(
        tier=tier_from_wire(message.tier),
        slot=message.slot,
        state=CopyState(message.state),
        leases=message.leases,
        pins=message.pins,
        readers=message.readers,
        waiters=message.waiters,
        threshold=message.threshold,
        obstacles=tuple(map(Obstacle, message.obstacles)),
        departure=Departure(message.departure),
        ahead=message.ahead,
        precision=Precision(message.precision),
        free_slots=message.free_slots,
        unheld_slots=message.unheld_slots,
    )


def _lease(message: explain_pb2.ExplainedLease) -> LeaseExplained:
    return LeaseExplained(
        lease_id=message.lease_id,
        tier=tier_from_wire(message.tier),
        age_ns=message.age_ns,
        orphaned=message.orphaned,
        session_id=message.session_id,
        pid=message.pid,
        uid=message.uid,
        command=message.command,
    )


def _cause(value: int) -> Cause | int:
    return Cause(value) if value in _CAUSES else value


_CAUSES: Final = frozenset(Cause)


def _fields(value: Any) -> dict[str, Any]:
    """Of these dataclasses what JSON can say; residency sets as lists of tiers."""
    named = {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    for name in {"residency", "before"} & named.keys():
        named[name] = None if named[name] is None else [str(tier) for tier in tiers_of(named[name])]
    return named


def _plain(value: Any) -> Any:
    if isinstance(value, (_Word, Tier, Cause, EventType, Cursor)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return _fields(value) if hasattr(value, "__dataclass_fields__") else value
