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
from typing import Any

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

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
