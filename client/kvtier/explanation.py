"""Explanations: the place and the past of a block, the stored prefix of a request, and the reason for a miss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import IntEnum
from typing import Any, Final

from kvtier import wire
from kvtier.events import CAUSES, Event, Gap
from kvtier.types import CacheStats, Cause, Cursor, EventType, LeaseInfo, Tier, tiers_of
from kvtier.v1 import admin_pb2
from kvtier.watch import Watch

SHORTEST_PREFIX: Final = 4
MOST_KEYS: Final = 32

_FASTEST: Final = bytes(min(tiers_of(residency), default=0) for residency in range(256))
"""The fastest tier by residency."""
IN_MEMORY_S: Final = {Tier.DEVICE: 0.0, Tier.HOST: 0.0}
"""Seconds to bring a block of memory into memory."""
_RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)

WHY_GONE: Final[Mapping[int, str]] = {
    Cause.CAPACITY: "Room was needed, and no tier below could or should take it.",
    Cause.QUOTA: "Another cache of its family took over the budgets of its idle cache.",
    Cause.EXPLICIT: "It was dropped by call, or its cache was removed.",
    Cause.RESET: "Its cache was reset.",
    Cause.CORRUPT: "Its bytes failed verification, and there was no other copy.",
    Cause.IO_ERROR: "The tier that it was in failed for longer than the grace period, and there was no other copy.",
    Cause.ANCESTOR: "A block that it stands on was dropped or lost; without that block nobody could reach it.",
    Cause.LOST: "It was lost with the memory of a daemon that ended uncleanly.",
    Cause.SHUTDOWN: "The daemon was stopped, and the block was only in memory that ended with it.",
}
"""Maps the cause of a block's last event to a sentence for people."""


class CopyState(IntEnum):
    """State of a copy. ``LEAVING``: the copy goes as soon as it is copied down, unless it is used before."""

    FILLING = 1
    READY = 2
    LEAVING = 3


@dataclass(slots=True, frozen=True)
class CopyExplained:
    """A block's bytes in one tier. ``readers``: number of running copies that read it."""

    tier: Tier
    slot: int
    state: CopyState
    pins: int
    readers: int


@dataclass(slots=True, frozen=True)
class BlockExplained:
    """The block in one cache and window group.

    ``priority`` is effective: the highest of ``own_priority`` and the children's. ``duration_ms``: how long after its
    release the block keeps its own priority, 0 = for ever. ``deadline_ns``: when that time ends, by the daemon's clock,
    0 = it does not run. ``leases``: the leases that hold the block; pid 0 if the caller may not see the owner.
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
        """The tiers where the block is ready, as a bit set."""
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
class RemoteExplained:
    """Whether the remote store has the block of this cache and group, as last known to the daemon; None: unknown."""

    cache: str
    group: int
    there: bool | None


@dataclass(slots=True, frozen=True)
class DepartureExplained:
    """Why a block left a cache and window group. ``session_id``: its request took the room; 0: none did, the daemon did
    so ahead of need, or it is not known. ``pid`` and ``command``: of the session, if the caller may list all leases."""

    cache: str
    group: int
    cause: Cause | int
    time_ns: int
    session_id: int = 0
    pid: int = 0
    command: str = ""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.time_ns / 1e9).isoformat(" ", "milliseconds")
        who = f", pid {self.pid} {self.command}" if self.pid else ""
        whom = f" Session {self.session_id}{who} wanted it." if self.session_id else ""
        return f"Gone since {since}. {why_gone(self.cause)}{whom}"


@dataclass(slots=True, frozen=True)
class Explanation:
    """The daemon's knowledge of a block.

    ``keys``: known keys that begin with ``asked``, at most 32; a single key if the block is unambiguous. ``blocks``:
    where the block is stored, one entry per cache and window group. ``past``: the block's events in the log, the oldest
    first; None if the caller may not watch, or did not ask. ``gaps``: lost events, possibly of the block. ``time_ns``:
    the daemon's clock at the answer. ``remote``: one entry per cache and window group, if there is a remote store.
    ``departures``: from the daemon's memory, which does not go back as far as the log.
    """

    asked: bytes
    keys: tuple[bytes, ...]
    blocks: tuple[BlockExplained, ...]
    past: tuple[Event, ...] | None
    gaps: tuple[Gap, ...]
    as_of: Cursor
    time_ns: int
    remote: tuple[RemoteExplained, ...] = ()
    departures: tuple[DepartureExplained, ...] = ()

    @property
    def state(self) -> str:
        """``stored``; ``ambiguous``; ``remote``: known only to the remote store; ``gone``: stored once, by the log;
        ``unknown``."""
        if self.blocks:
            return "stored"
        if len(self.keys) > 1:
            return "ambiguous"
        if any(each.there for each in self.remote):
            return "remote"
        return "gone" if self.past or self.departures else "unknown"

    def endings(self) -> Iterator[DepartureExplained]:
        """The last departure from each cache and group that the block is gone from."""
        known = {(each.cache, each.group) for each in self.blocks}
        known.update((each.cache, each.group) for each in self.departures)
        last = {(event.cache, event.group): event for event in self.past or ()}
        gone = (EventType.REMOVED, EventType.CLEARED)
        for place, event in last.items():
            if place not in known and event.type in gone:
                yield DepartureExplained(*place, event.cause, event.time_ns)
        yield from self.departures

    def to_json(self) -> dict[str, Any]:
        """A JSON object: keys in hex, tiers and causes by name, times in nanoseconds."""
        return {
            "state": self.state,
            "asked": self.asked.hex(),
            "keys": [key.hex() for key in self.keys],
            "blocks": [block.to_json() for block in self.blocks],
            "remote": [asdict(each) for each in self.remote],
            "departures": [{**asdict(each), "cause": str(each.cause)} for each in self.departures],
            "past": None if self.past is None else [event.to_json() for event in self.past],
            "gaps": [gap.to_json() for gap in self.gaps],
            "as_of": str(self.as_of),
            "time_ns": self.time_ns,
        }


def why_gone(cause: Cause | int) -> str:
    """A sentence that explains a last event with this cause."""
    return WHY_GONE.get(cause, f"Cause {cause}: this client has no words for it.")


def explanation_from_wire(asked: bytes, message: admin_pb2.ExplainResponse) -> Explanation:
    """An explanation without events."""
    return Explanation(
        asked=asked,
        keys=tuple(wire.split_keys(message.keys)),
        blocks=tuple(wire.same_fields(BlockExplained, each, parent=each.parent or None) for each in message.blocks),
        past=None,
        gaps=(),
        as_of=wire.same_fields(Cursor, message.as_of_event),
        time_ns=message.time_ns,
        remote=tuple(
            RemoteExplained(each.cache, each.group, each.there if each.HasField("there") else None)
            for each in message.remote
        ),
        departures=tuple(
            wire.same_fields(DepartureExplained, each, cause=CAUSES.get(each.cause, each.cause))
            for each in message.departures
        ),
    )


async def with_past(now: Explanation, watch: Watch) -> Explanation:
    """Adds the log's events. ``watch``: from the oldest event on, filtered by these keys, with heartbeats."""
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
    return replace(now, keys=tuple(sorted(keys)[:MOST_KEYS]), past=tuple(past) if clear else (), gaps=tuple(gaps))


@dataclass(slots=True, frozen=True)
class TierRun:
    """Blocks of a prefix in a row whose fastest copies are in the same tier. ``load_s``: expected seconds to bring them
    into memory, by the daemon's copies so far; None if there were none."""

    tier: Tier
    first_block: int
    blocks: int
    load_s: float | None


@dataclass(slots=True, frozen=True)
class RequestExplanation:
    """How much of a request's chain a cache has, and why it ends there.

    ``blocks``: of the stored prefix; ``asked``: of the chain. ``remote_blocks``: of the prefix with the remote store's.
    ``why``: the reason for the first miss, if there is one; ``miss``: its block. ``parts_at``: tokens that the nearest
    stored chain shares, at least and at most.
    """

    cache: str
    asked: int
    blocks: int
    remote_blocks: int
    runs: tuple[TierRun, ...]
    parts_at: tuple[int, int]
    why: str
    miss: Explanation | None

    def to_json(self) -> dict[str, Any]:
        runs = [{**asdict(run), "tier": str(run.tier)} for run in self.runs]
        return {**asdict(replace(self, miss=None)), "runs": runs, "miss": self.miss and self.miss.to_json()}


def tier_runs(residency: bytes, seconds_a_block: Mapping[Tier, float]) -> tuple[TierRun, ...]:
    """The runs of a prefix. ``seconds_a_block``: to bring a block from a tier into memory, where that is known."""
    runs: list[TierRun] = []
    for run in _RUN.finditer(residency.translate(_FASTEST)):
        tier, count = Tier(run[0][0]), len(run[0])
        cost = seconds_a_block.get(tier)
        runs.append(TierRun(tier, run.start(), count, None if cost is None else cost * count))
    return tuple(runs)


def seconds_a_block(stats: CacheStats, block_bytes: int) -> dict[Tier, float]:
    """Seconds to bring a block from each tier into memory."""
    seconds = {**IN_MEMORY_S}
    for edge in stats.edges:
        src, dst = (Tier[name.upper()] for name in edge.edge.split(">"))
        if dst is Tier.HOST and edge.copy_ns and edge.bytes:
            seconds[src] = block_bytes * edge.copy_ns / edge.bytes / 1e9
    return seconds


def why_missed(cache: str, groups: int, miss: Explanation, variants: Mapping[str, int], blocks: int) -> str:
    """A sentence for the first missing block of a request that has ``blocks``. ``groups``: number of the cache's window
    groups. ``variants``: stored blocks of other keys of the same tokens, by name."""
    for end in miss.endings():
        if end.cache == cache:
            return str(end)
    if any(each.there and each.cache == cache for each in miss.remote):
        return "Only the remote store has it."
    if any(block.cache == cache and not block.residency for block in miss.blocks):
        return "Its bytes were lost, and it is about to go with the blocks under it."
    there = {block.group for block in miss.blocks if block.cache == cache}
    if there and (lacking := [str(group) for group in range(groups) if group not in there]):
        return f"Window groups {', '.join(lacking)} lack it."
    if elsewhere := sorted({block.cache for block in miss.blocks} - {cache}):
        return f"Cache {elsewhere[0]} has it: other weights, another spec, or another name."
    for name, stored in variants.items():
        if stored > blocks:
            return f"The same tokens are stored {name}: {stored} blocks."
    if miss.past is None:
        return "It was never stored, or its past is not known to this client."
    return "It was never stored, or that is longer ago than the log goes back."
