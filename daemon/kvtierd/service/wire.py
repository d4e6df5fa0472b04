"""Translation between the core's values and ``kvtier.v1`` messages. No decisions here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from google.protobuf.message import DecodeError, Message

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.v1 import blocks_pb2, caches_pb2, common_pb2, events_pb2
from kvtierd.core.events import Changes, Event, EventType
from kvtierd.core.ids import KEY_BYTES, GroupId, Key, Label, LeaseId, Tier
from kvtierd.core.transfers import ListingRow

ROOT_PARENT: Final = bytes(KEY_BYTES)
"""On the wire: the parent of a chain's first block."""

TIER_TO_WIRE: Final[Mapping[Tier, common_pb2.Tier.ValueType]] = {
    Tier.DEVICE: common_pb2.TIER_DEVICE,
    Tier.HOST: common_pb2.TIER_HOST,
    Tier.DISK: common_pb2.TIER_DISK,
}
TIER_FROM_WIRE: Final[Mapping[int, Tier]] = {value: tier for tier, value in TIER_TO_WIRE.items()}


def granted_leases(reply: Message | None) -> list[LeaseId]:
    """The leases that a call granted."""
    if isinstance(reply, blocks_pb2.ReserveResponse):
        return [LeaseId(reply.lease_id)]
    if isinstance(reply, blocks_pb2.AcquireResponse):
        leases = [chain.lease_id for chain in reply.chains]
        leases += [part.lease_id for chain in reply.chains for part in chain.groups]
        return [LeaseId(lease) for lease in leases if lease]
    return []


def parents(values: Iterable[Key | None]) -> bytes:
    return b"".join([ROOT_PARENT if value is None else value for value in values])


def spec(value: CacheSpec) -> caches_pb2.CacheSpec:
    return caches_pb2.CacheSpec(
        model=value.model,
        dtype=value.dtype,
        tokens_per_block=value.tokens_per_block,
        rank=value.rank,
        world_size=value.world_size,
        groups=[
            caches_pb2.WindowGroupSpec(
                window_tokens=group.window_tokens,
                pools=[
                    caches_pb2.PoolSpec(
                        layers=pool.layers,
                        kv_heads=pool.kv_heads,
                        head_size=pool.head_size,
                        kv_factor=pool.kv_factor,
                        dtype=pool.dtype,
                    )
                    for pool in group.pools
                ],
            )
            for group in value.groups
        ],
    )


def spec_from_wire(value: caches_pb2.CacheSpec) -> CacheSpec:
    """The specification as sent; not yet validated."""
    return CacheSpec(
        model=value.model,
        dtype=value.dtype,
        tokens_per_block=value.tokens_per_block,
        rank=value.rank,
        world_size=value.world_size,
        groups=tuple(
            WindowGroupSpec(
                window_tokens=group.window_tokens,
                pools=tuple(PoolSpec(p.layers, p.kv_heads, p.head_size, p.kv_factor, p.dtype) for p in group.pools),
            )
            for group in value.groups
        ),
    )


@dataclass(slots=True, frozen=True)
class CacheHeader:
    """What events say of their cache.

    ``event_hash``: how its blocks are named besides their keys; "" = not at all. ``windows``: tokens, by group. Only
    the name of a cache of an earlier life is known.
    """

    name: str
    event_hash: str = ""
    windows: tuple[int, ...] = ()
    tokens_per_block: int = 0

    @classmethod
    def of(cls, name: str, spec: CacheSpec, event_hash: str) -> Self:
        return cls(name, event_hash, tuple(group.window_tokens for group in spec.groups), spec.tokens_per_block)

    @property
    def hash_bytes(self) -> int:
        """Of one event hash; 0 = it has none."""
        return HASH_BYTES[self.event_hash] if self.event_hash else 0

    def window(self, group: GroupId) -> int:
        """0 = full attention, or not known."""
        return self.windows[group] if group < len(self.windows) else 0


def event(value: Event, header: CacheHeader) -> events_pb2.Event:
    """Which fields an event carries follows from its type; see ``events.proto``. Private ones included."""
    message = events_pb2.Event(
        id=value.id,
        type=events_pb2.EventType.ValueType(value.type),
        cause=common_pb2.Cause.ValueType(value.cause),
        cache=header.name,
        group=value.group,
        time_ns=value.time_ns,
        num_blocks_per_cache_level=[slots for _, slots in value.capacity],
        event_hash=header.event_hash,
        window_tokens=header.window(value.group),
    )
    blocks = value.blocks
    if blocks.keys:
        stored = value.type is EventType.STORED
        _add_blocks(message, value.type, blocks)
        _add_labels(message, blocks.labels, blocks.parent_labels, header.hash_bytes, stored=stored)
    if value.type is EventType.CREATED:
        message.tokens_per_block = header.tokens_per_block
        message.all_window_tokens.extend(header.windows)
    if value.moved_from is not None:
        message.moved_from = TIER_TO_WIRE[value.moved_from]
    if value.moved_to is not None:
        message.moved_to = TIER_TO_WIRE[value.moved_to]
    if value.moved_bytes:
        message.moved_bytes, message.queue_ns, message.copy_ns = value.moved_bytes, value.queue_ns, value.copy_ns
    return message


def _add_blocks(message: events_pb2.Event, kind: EventType, blocks: Changes) -> None:
    message.keys = b"".join(blocks.keys)
    message.residency = bytes(blocks.residencies)
    if kind is not EventType.REMOVED:
        message.priorities = bytes(blocks.priorities)
    if kind is EventType.STORED:
        message.parents = parents(blocks.parents)


def slice_of(
    header: CacheHeader, group: GroupId, rows: Sequence[ListingRow], *, private: bool
) -> events_pb2.SnapshotSlice:
    """``private``: with token ids, where there are any."""
    message = events_pb2.SnapshotSlice(
        cache=header.name,
        group=group,
        keys=b"".join(row.key for row in rows),
        parents=parents(row.parent for row in rows),
        residency=bytes(row.residency for row in rows),
        priorities=bytes(row.priority for row in rows),
        event_hash=header.event_hash,
        window_tokens=header.window(group),
        tokens_per_block=header.tokens_per_block,
        all_window_tokens=header.windows,
    )
    labels, parent_labels = [row.label for row in rows], [row.parent_label for row in rows]
    _add_labels(message, labels, parent_labels, header.hash_bytes, stored=True)
    if not private:
        message.ClearField("tokens")
    return message


def _add_labels(
    message: events_pb2.Event | events_pb2.SnapshotSlice,
    labels: Sequence[Label | None],
    parent_labels: Sequence[Label | None],
    hash_bytes: int,
    *,
    stored: bool,
) -> None:
    """Hashes and tokens of blocks, where the cache keeps any."""
    if hash_bytes:
        message.event_hashes = b"".join([_hash(label, hash_bytes) for label in labels])
    if stored and hash_bytes:
        message.parent_hashes = b"".join([_hash(label, hash_bytes) for label in parent_labels])
    if stored and have_tokens(labels):
        message.tokens.extend([_tokens(label) for label in labels])


def have_tokens(labels: Sequence[Label | None]) -> bool:
    """Whether any of them has."""
    return any(label is not None and label.tokens for label in labels)


def _tokens(label: Label | None) -> events_pb2.BlockTokens:
    """None of a block whose record on disk no longer has what was written: nothing verifies that part of it."""
    try:
        return events_pb2.BlockTokens.FromString(b"" if label is None else label.tokens)
    except DecodeError:
        return events_pb2.BlockTokens()


def _hash(label: Label | None, size: int) -> bytes:
    return label.event_hash if label is not None and label.event_hash else bytes(size)
