"""Events as a watcher gets them: frozen values, and their JSON with TensorRT-LLM's field names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from kvtier.abi.words import DIGEST_BYTES, KEY_BYTES
from kvtier.types import ROOT_PARENT, Cause, Cursor, EventType, Tier, fastest, tiers_of
from kvtier.v1 import events_pb2
from kvtier.wire import same_fields, split_keys, tier_from_wire, tier_to_wire


@dataclass(slots=True, frozen=True)
class BlockTokens:
    """The tokens of a block. ``extra_ids``: one per token; None = no token has one. ``items``: for each multimodal item
    that covers the block, its 32-byte digest and the position within the item of its first token in the block."""

    token_ids: tuple[int, ...]
    extra_ids: tuple[int, ...] | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    items: tuple[tuple[bytes, int], ...] = ()


@dataclass(slots=True, frozen=True)
class ChangedBlocks:
    """Blocks of one window group, in an event or in a slice of a snapshot.

    ``packed_keys``, ``packed_parents`` (stored only): 32 bytes per block. ``residency`` (stored, updated),
    ``priorities``: one byte per block, AFTER the change, so applying an event twice is harmless. ``event_hash``: the
    cache's option; ``packed_hashes``: 8 or 32 bytes per block, zeros for a block without hash. ``tokens`` (stored
    only): one per block, if the cache keeps them and the watcher may see them. ``window_tokens``: 0 is full attention.
    Created and slices only: ``tokens_per_block``, ``fingerprint`` of the specification, and ``all_window_tokens``,
    ``all_sink_tokens``, ``all_flat``, one per window group.
    """

    cache: str
    group: int
    packed_keys: bytes = b""
    packed_parents: bytes = b""
    residency: bytes = b""
    priorities: bytes = b""
    event_hash: str = ""
    packed_hashes: bytes = b""
    packed_parent_hashes: bytes = b""
    tokens: tuple[BlockTokens, ...] = ()
    window_tokens: int = 0
    tokens_per_block: int = 0
    all_window_tokens: tuple[int, ...] = ()
    all_sink_tokens: tuple[int, ...] = ()
    all_flat: tuple[bool, ...] = ()
    fingerprint: bytes = b""

    @property
    def keys(self) -> list[bytes]:
        return split_keys(self.packed_keys)

    @property
    def hashes(self) -> list[bytes]:
        """The hashes, one per key, if the cache has ``event_hash``; all zeros for a block without hash."""
        return split_hashes(self.packed_hashes, len(self.packed_keys) // KEY_BYTES) if self.event_hash else []


@dataclass(slots=True, frozen=True, kw_only=True)
class Event(ChangedBlocks):
    """A change of some blocks of one window group.

    ``moved_from`` to ``copy_ns``: the move behind the event, in bytes and nanoseconds; ``moved_from`` alone: blocks
    left a tier without a copy. ``time_ns``: since the Unix epoch. Created only: ``num_blocks_per_cache_level``, fastest
    tier first.
    """

    epoch: int
    event_id: int
    type: EventType
    cause: Cause | int
    time_ns: int
    moved_from: Tier | None = None
    moved_to: Tier | None = None
    moved_bytes: int = 0
    queue_ns: int = 0
    copy_ns: int = 0
    num_blocks_per_cache_level: tuple[int, ...] = ()

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.event_id)

    @property
    def parents(self) -> list[bytes | None]:
        """The parents, one per key, of a stored event; None = the block is a root."""
        return [None if parent == ROOT_PARENT else parent for parent in split_keys(self.packed_parents)]

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object: keys and hashes in hex, tiers by name, cache levels by number."""
        common = {
            "event_id": self.event_id,
            "epoch": self.epoch,
            "type": str(self.type),
            "cause": str(self.cause),
            "cache": self.cache,
            "group": self.group,
            "time_ns": self.time_ns,
        }
        return common | _JSON_BODIES[self.type](self)


@dataclass(slots=True, frozen=True)
class SnapshotStart:
    """A snapshot begins, or begins again after a break: discard all earlier state."""

    def to_json(self) -> dict[str, Any]:
        return {"type": "snapshot_start"}


@dataclass(slots=True, frozen=True)
class SnapshotSlice(ChangedBlocks):
    """The present state of some blocks; a window group without blocks has an empty slice."""

    def to_json(self) -> dict[str, Any]:
        return {"type": "snapshot", "cache": self.cache, "group": self.group, "blocks": _stored_blocks(self)}


@dataclass(slots=True, frozen=True)
class SnapshotEnd:
    """Slices and events together are exact at this cursor; from here on events alone keep the state exact."""

    cursor: Cursor

    def to_json(self) -> dict[str, Any]:
        return {"type": "snapshot_end", "epoch": self.cursor.epoch, "event_id": self.cursor.id}


@dataclass(slots=True, frozen=True)
class Gap:
    """Events [first_id, last_id] of an epoch that this watcher will never see.

    ``reason``: "slow" (the watcher was slow, and there is no log), "unclean-stop" (the events died with the daemon),
    "compacted" (the daemon no longer held them), "not-logged" (its log had failed), "lost-state" (the daemon lost its
    state and ids restart; only the first id of the unknown range is given) or "unexplained" (ranges did not join: a bug
    of the daemon).
    """

    epoch: int
    first_id: int
    last_id: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "gap"} | asdict(self)


@dataclass(slots=True, frozen=True)
class Heartbeat:
    """No event passed the filter since the last item, up to the cursor."""

    cursor: Cursor

    def to_json(self) -> dict[str, Any]:
        return {"type": "heartbeat", "epoch": self.cursor.epoch, "event_id": self.cursor.id}


@dataclass(slots=True, frozen=True)
class Disconnected:
    """The stream broke, and the watch tries to continue from its cursor. ``reason``: the known cause, in words."""

    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "disconnected", "reason": self.reason}


@dataclass(slots=True, frozen=True)
class Reconnected:
    """The stream continues after a break. Gaps follow for lost events.

    ``epoch``: the daemon's present epoch; first events may be of an earlier epoch, from the log. ``boot``: number of
    starts of the daemon on its state. ``restarted``: whether the daemon restarted during the break.
    """

    epoch: int
    boot: int
    restarted: bool

    def to_json(self) -> dict[str, Any]:
        return {"type": "reconnected", "epoch": self.epoch, "boot": self.boot, "restarted": self.restarted}


WatchItem: TypeAlias = (
    Event | SnapshotStart | SnapshotSlice | SnapshotEnd | Gap | Heartbeat | Disconnected | Reconnected
)


def event_from_wire(epoch: int, message: events_pb2.Event) -> Event:
    type = _TYPES.get(message.type) or EventType(message.type)
    created = type is EventType.CREATED
    return Event(
        epoch=epoch,
        event_id=message.id,
        type=type,
        cause=CAUSES.get(message.cause, message.cause),  # a newer daemon's cause stays a number
        cache=message.cache,
        group=message.group,
        time_ns=message.time_ns,
        packed_keys=message.keys,
        packed_parents=message.parents,
        residency=message.residency,
        priorities=message.priorities,
        moved_from=_tier(message.moved_from),
        moved_to=_tier(message.moved_to),
        moved_bytes=message.moved_bytes,
        queue_ns=message.queue_ns,
        copy_ns=message.copy_ns,
        num_blocks_per_cache_level=tuple(message.num_blocks_per_cache_level) if created else (),
        event_hash=message.event_hash,
        packed_hashes=message.event_hashes,
        packed_parent_hashes=message.parent_hashes,
        tokens=_tokens(message.tokens) if type is EventType.STORED else (),
        window_tokens=message.window_tokens,
        tokens_per_block=message.tokens_per_block,
        all_window_tokens=tuple(message.all_window_tokens) if created else (),
        all_sink_tokens=tuple(message.all_sink_tokens) if created else (),
        all_flat=tuple(message.all_flat) if created else (),
        fingerprint=message.fingerprint,
    )


def slice_from_wire(message: events_pb2.SnapshotSlice) -> SnapshotSlice:
    return same_fields(
        SnapshotSlice,
        message,
        packed_keys=message.keys,
        packed_parents=message.parents,
        packed_hashes=message.event_hashes,
        packed_parent_hashes=message.parent_hashes,
        tokens=_tokens(message.tokens),
    )


def _tokens(messages: Iterable[events_pb2.BlockTokens]) -> tuple[BlockTokens, ...]:
    import numpy as np  # for watchers of tokens

    return tuple(
        BlockTokens(
            token_ids=tuple(np.frombuffer(message.token_ids, "<u4").tolist()),
            extra_ids=tuple(np.frombuffer(message.extra_ids, "<u8").tolist()) if message.extra_ids else None,
            lora_id=message.lora_id if message.HasField("lora_id") else None,
            cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
            items=tuple(
                (message.mm_digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES], offset)
                for place, offset in enumerate(message.mm_offsets)
            ),
        )
        for message in messages
    )


def _tier(value: int) -> Tier | None:
    """The tier of a move's end; None if nothing moved."""
    return _TIERS[value] if value in _TIERS else tier_from_wire(value)


# Dicts are faster than calls of the enumerations, and an event needs four members.
_TYPES: Final[dict[int, EventType]] = {int(each): each for each in EventType}
CAUSES: Final[dict[int, Cause | int]] = {int(each): each for each in Cause}
_TIERS: Final[dict[int, Tier | None]] = {0: None} | {int(tier_to_wire(each)): each for each in Tier}


def split_hashes(packed: bytes, count: int) -> list[bytes]:
    """The hashes of ``count`` blocks, all of one width."""
    size = len(packed) // max(1, count)
    return [packed[place * size : (place + 1) * size] for place in range(count)]


def _block(key: bytes, residency: int, priority: int) -> dict[str, Any]:
    places = [str(tier) for tier in tiers_of(residency)]
    return {"block_hash": key.hex(), "cache_level": fastest(residency), "residency": places, "priority": priority}


def _stored_blocks(item: Event | SnapshotSlice) -> list[dict[str, Any]]:
    rows = zip(
        split_keys(item.packed_keys), split_keys(item.packed_parents), item.residency, item.priorities, strict=True
    )
    blocks: list[dict[str, Any]] = [
        _block(key, residency, priority) | {"parent_hash": None if parent == ROOT_PARENT else parent.hex()}
        for key, parent, residency, priority in rows
    ]
    for block, name in zip(blocks, item.hashes, strict=False):
        block["event_hash"] = name.hex()
    for block, tokens in zip(blocks, item.tokens, strict=False):
        block["token_ids"] = tokens.token_ids
    return blocks


def _left(event: Event) -> dict[str, Any]:
    return {} if event.moved_from is None else {"moved_from": str(event.moved_from)}


def _updated(event: Event) -> dict[str, Any]:
    rows = zip(event.keys, event.residency, event.priorities, strict=True)
    body: dict[str, Any] = {
        "blocks": [_block(*row) for row in rows],
        "cache_level": None,
    }
    if event.moved_from is None or event.moved_to is None:
        return body | _left(event)
    level = {"type": "event_diff", "old_value": event.moved_from, "new_value": event.moved_to}
    return body | {
        "cache_level": None if event.cause is Cause.REMOTE else level,  # the block's tiers here are unchanged
        "moved_from": str(event.moved_from),
        "moved_to": str(event.moved_to),
        "moved_bytes": event.moved_bytes,
        "queue_ns": event.queue_ns,
        "copy_ns": event.copy_ns,
    }


_JSON_BODIES: Final[dict[EventType, Callable[[Event], dict[str, Any]]]] = {
    EventType.CREATED: lambda event: {"num_blocks_per_cache_level": list(event.num_blocks_per_cache_level)},
    EventType.STORED: lambda event: {"blocks": _stored_blocks(event)},
    EventType.REMOVED: lambda event: {"block_hashes": [key.hex() for key in event.keys]} | _left(event),
    EventType.UPDATED: _updated,
    EventType.CLEARED: lambda event: {},
}
