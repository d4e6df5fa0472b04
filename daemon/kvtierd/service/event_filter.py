"""What a watcher wants to see, and may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.abi.spec import MAX_GROUPS
from kvtier.v1 import common_pb2, events_pb2
from kvtierd.core.ids import KEY_BYTES, Tier
from kvtierd.core.verbs import ListingRow
from kvtierd.event_log.run import Run, without_tokens
from kvtierd.service import validate, wire
from kvtierd.service.errors import bad_argument
from kvtierd.service.key_prefixes import KeyPrefixes

MAX_PREFIXES: Final = 64
"""Of keys, in a filter."""


MAX_VALUES: Final = 4096
"""Of each other kind: a request has room for millions, and each is looked at."""


@dataclass(slots=True)
class _Latest:
    """What passed of the ids [first, last], the last that were looked at."""

    first: int = 0
    last: int = 0
    passed: bytes = b""


@dataclass(slots=True, frozen=True)
class EventFilter:
    """Empty sets let everything through. ``tiers`` (wire numbers) and ``tier_bits`` say the same. ``keys``: None = all.

    ``visible``: of which caches the watcher may see events; None = of all. ``private``: of which it may see token ids,
    or of all or of none.

    Watchers that want the same share one: what is looked at for the first of them is there for the others.
    """

    types: frozenset[int]
    causes: frozenset[int]
    caches: frozenset[str]
    tiers: frozenset[int]
    tier_bits: int
    groups: frozenset[int]
    keys: KeyPrefixes | None
    visible: Callable[[str], bool] | None
    private: Callable[[str], bool] | bool
    _latest: _Latest = field(default_factory=_Latest, init=False, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        message: events_pb2.WatchFilter,
        tiers: list[Tier],
        visible: Callable[[str], bool] | None = None,
        private: Callable[[str], bool] | bool = False,
    ) -> EventFilter:
        return cls(
            types=frozenset(message.types),
            causes=frozenset(message.causes),
            caches=frozenset(message.caches),
            tiers=frozenset(message.tiers),
            tier_bits=sum(tier.bit for tier in set(tiers)),
            groups=frozenset(message.groups),
            keys=KeyPrefixes.of(message.key_prefixes) if message.key_prefixes else None,
            visible=visible,
            private=private,
        )

    def as_allowed(self, visible: Callable[[str], bool] | None, private: Callable[[str], bool] | bool) -> EventFilter:
        """The same for a watcher with other rights."""
        return replace(self, visible=visible, private=private)

    def may_see_tokens_of(self, cache: str) -> bool:
        return self.private if isinstance(self.private, bool) else self.private(cache)

    @property
    def lets_all_through(self) -> bool:
        some = self.types or self.causes or self.caches or self.tiers or self.groups
        return not some and self.keys is None and self.visible is None

    def wants_cache(self, name: str) -> bool:
        return (not self.caches or name in self.caches) and (self.visible is None or self.visible(name))

    def wants_group(self, group: int) -> bool:
        return not self.groups or group in self.groups

    def wanted_rows(self, rows: Sequence[ListingRow]) -> Sequence[ListingRow]:
        return rows if self.keys is None else [row for row in rows if self.keys.match(row.key)]

    def look_at(self, run: Run) -> bytes:
        """What of ``run`` passes: a serialised ``WatchBatch`` with just these events, cut down to the blocks wanted."""
        body = run.body_for(private=self.private is not False)
        if self.lets_all_through and (isinstance(self.private, bool) or run.private is run.body):
            return body
        if self.keys is not None and not run.keyless and self.keys.absent_from(body):
            return b""
        latest = self._latest
        if (run.first, run.last) != (latest.first, latest.last):
            latest.first, latest.last, latest.passed = run.first, run.last, self._passed(body)
        return latest.passed

    def _passed(self, body: bytes) -> bytes:
        every = events_pb2.WatchBatch.FromString(body).events
        events = [event for event in every if self._wants(event)]
        if self.keys is not None:
            events = self.keys.only_theirs(events)
        if self.tiers:
            events = [event for event in events if self._touches_tiers(event)]
        hidden = not isinstance(self.private, bool) and without_tokens(events, self.private)
        if len(events) == len(every) and self.keys is None and not hidden:
            return body
        return events_pb2.WatchBatch(events=events).SerializeToString()

    def _wants(self, event: events_pb2.Event) -> bool:
        """All that an event is judged by as a whole; keys and tiers are judged by block."""
        return (
            (not self.types or event.type in self.types)
            and (not self.causes or event.cause in self.causes)
            and self.wants_cache(event.cache)
            and self.wants_group(event.group)
        )

    def _touches_tiers(self, event: events_pb2.Event) -> bool:
        if event.moved_from in self.tiers or event.moved_to in self.tiers:
            return True
        if event.type != events_pb2.EVENT_TYPE_STORED:
            return False
        return any(residency & self.tier_bits for residency in event.residency)


def filter_from_wire(message: events_pb2.WatchFilter) -> EventFilter:
    """As asked for, of all caches, without token ids. Raises INVALID_ARGUMENT that names the field."""
    validate.count("filter.types", len(message.types), 0, MAX_VALUES)
    validate.count("filter.causes", len(message.causes), 0, MAX_VALUES)
    validate.count("filter.tiers", len(message.tiers), 0, MAX_VALUES)
    validate.count("filter.caches", len(message.caches), 0, MAX_VALUES)
    validate.count("filter.groups", len(message.groups), 0, MAX_VALUES)
    for index, kind in enumerate(message.types):
        if kind not in events_pb2.EventType.values() or not kind:
            raise bad_argument(f"filter.types[{index}]", kind, "an event type")
    for index, cause in enumerate(message.causes):
        if cause not in common_pb2.Cause.values() or not cause:
            raise bad_argument(f"filter.causes[{index}]", cause, "a cause")
    for index, name in enumerate(message.caches):
        validate.cache_name(name, f"filter.caches[{index}]")
    for index, group in enumerate(message.groups):
        validate.count(f"filter.groups[{index}]", group, 0, MAX_GROUPS - 1)
    validate.count("filter.key_prefixes", len(message.key_prefixes), 0, MAX_PREFIXES)
    for index, prefix in enumerate(message.key_prefixes):
        if not 1 <= len(prefix) <= KEY_BYTES:
            raise bad_argument(f"filter.key_prefixes[{index}]", f"{len(prefix)} bytes", f"1 to {KEY_BYTES} bytes")
    every = tuple(wire.TIER_TO_WIRE)
    tiers = [validate.tier(f"filter.tiers[{index}]", tier, every) for index, tier in enumerate(message.tiers)]
    return EventFilter.of(message, tiers)
