"""kvtier: client of the daemon that keeps LLM engines' KV cache in tiers of GPU, CPU and disk memory.

    async with await kvtier.connect() as client:
        cache = await client.open_cache("llama", spec)
        keys = kvtier.chain_keys(token_ids, spec.tokens_per_block)
        await cache.put(keys, blocks)
        blocks = await cache.get(keys)

    with kvtier.Client() as client:  # the same without an event loop
        cache = client.open_cache("llama", spec)

Names are imported when they are first used: ``import kvtier.abi`` costs no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.abi.event_hashes import event_hashes
    from kvtier.abi.keys import MultimodalItem, Scope, chain_keys
    from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
    from kvtier.cache import Cache
    from kvtier.chains import Prompt
    from kvtier.client import AsyncClient, Explanation, connect
    from kvtier.errors import (
        CallerError,
        ClientClosed,
        CursorCompacted,
        DaemonError,
        DaemonUnavailable,
        DamagedTransfer,
        DataLoss,
        DeadlineExceeded,
        DeviceError,
        InvalidArgument,
        KvtierError,
        LeaseError,
        LeaseLost,
        NotFound,
        PermissionDenied,
        RetryableError,
        SpecMismatch,
        StaleRead,
        StillHeld,
        TierFull,
        TierOffline,
        TooShort,
    )
    from kvtier.events import (
        Disconnected,
        Event,
        Gap,
        Heartbeat,
        Reconnected,
        SnapshotEnd,
        SnapshotSlice,
        SnapshotStart,
    )
    from kvtier.groups import AcrossBlocks, AcrossLease
    from kvtier.lease import ReadLease, WriteLease
    from kvtier.mirror import Mirror, MirroredBlock, MirrorState, Standing, rank_mirrors
    from kvtier.retention import Retention, TokenRange
    from kvtier.sync import Client
    from kvtier.transport import TlsFiles
    from kvtier.types import BlockResult, CacheOptions, Cause, Cursor, EventType, Tier, WritePolicy
    from kvtier.watch import Watch
    from kvtier.wire import AcrossMatch, Location, Locations, Match, ReadCounts

_HOMES = {
    "kvtier.abi.event_hashes": ("event_hashes",),
    "kvtier.abi.keys": ("MultimodalItem", "Scope", "chain_keys"),
    "kvtier.abi.spec": ("CacheSpec", "PoolSpec", "WindowGroupSpec"),
    "kvtier.groups": ("AcrossBlocks", "AcrossLease"),
    "kvtier.wire": ("AcrossMatch", "Location", "Locations", "Match", "ReadCounts"),
    "kvtier.client": ("AsyncClient", "Explanation", "connect"),
    "kvtier.cache": ("Cache",),
    "kvtier.errors": (
        "CallerError",
        "ClientClosed",
        "CursorCompacted",
        "DaemonError",
        "DaemonUnavailable",
        "DamagedTransfer",
        "DataLoss",
        "DeadlineExceeded",
        "DeviceError",
        "InvalidArgument",
        "KvtierError",
        "LeaseError",
        "LeaseLost",
        "NotFound",
        "PermissionDenied",
        "RetryableError",
        "SpecMismatch",
        "StaleRead",
        "StillHeld",
        "TierFull",
        "TierOffline",
        "TooShort",
    ),
    "kvtier.events": (
        "Disconnected",
        "Event",
        "Gap",
        "Heartbeat",
        "Reconnected",
        "SnapshotEnd",
        "SnapshotSlice",
        "SnapshotStart",
    ),
    "kvtier.lease": ("ReadLease", "WriteLease"),
    "kvtier.mirror": ("Mirror", "MirrorState", "MirroredBlock", "Standing", "rank_mirrors"),
    "kvtier.chains": ("Prompt",),
    "kvtier.retention": ("Retention", "TokenRange"),
    "kvtier.sync": ("Client",),
    "kvtier.transport": ("TlsFiles",),
    "kvtier.types": (
        "BlockResult",
        "CacheOptions",
        "Cause",
        "Cursor",
        "EventType",
        "Tier",
        "WritePolicy",
    ),
    "kvtier.watch": ("Watch",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AcrossBlocks",
    "AcrossLease",
    "AcrossMatch",
    "AsyncClient",
    "BlockResult",
    "Cache",
    "CacheOptions",
    "CacheSpec",
    "CallerError",
    "Cause",
    "Client",
    "ClientClosed",
    "Cursor",
    "CursorCompacted",
    "DaemonError",
    "DaemonUnavailable",
    "DamagedTransfer",
    "DataLoss",
    "DeadlineExceeded",
    "DeviceError",
    "Disconnected",
    "Event",
    "EventType",
    "Explanation",
    "Gap",
    "Heartbeat",
    "InvalidArgument",
    "KvtierError",
    "LeaseError",
    "LeaseLost",
    "Location",
    "Locations",
    "Match",
    "Mirror",
    "MirrorState",
    "MirroredBlock",
    "MultimodalItem",
    "NotFound",
    "PermissionDenied",
    "PoolSpec",
    "Prompt",
    "ReadCounts",
    "ReadLease",
    "Reconnected",
    "Retention",
    "RetryableError",
    "Scope",
    "SnapshotEnd",
    "SnapshotSlice",
    "SnapshotStart",
    "SpecMismatch",
    "StaleRead",
    "Standing",
    "StillHeld",
    "Tier",
    "TierFull",
    "TierOffline",
    "TlsFiles",
    "TokenRange",
    "TooShort",
    "Watch",
    "WindowGroupSpec",
    "WriteLease",
    "WritePolicy",
    "chain_keys",
    "connect",
    "event_hashes",
    "rank_mirrors",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
