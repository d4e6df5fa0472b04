"""What the block manager's calls may be given, as far as it can be told before anything is done.

Each check raises :class:`BadArgument`, which names the argument and what it may be, or :class:`TierOffline`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.errors import BadArgument, TierOffline
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DISK, EVENT_HASH_BYTES, KEY_BYTES, MAX_TOKEN_BYTES, Key, Label, Tier
from kvtierd.core.leases import Lease
from kvtierd.core.retention import check_retention
from kvtierd.core.transfers import ChainRequest, CommitItem


def check_tier(state: GroupState, tier: Tier) -> None:
    """The group has the tier, and it is in service."""
    if tier not in state.slots:
        raise BadArgument("tier", tier, "one of the cache's tiers: " + ", ".join(map(str, state.tiers)))
    if tier is DISK and state.disk_lost:
        raise TierOffline(tier)


def check_memory_tier(state: GroupState, tier: Tier) -> None:
    """As :func:`check_tier`, and somebody can map its slots."""
    if tier is Tier.DISK:
        raise BadArgument("tier", tier, "device or host: disk slots are not mapped by anybody")
    check_tier(state, tier)


def check_keys(keys: Sequence[Key], field: str) -> None:
    """At least one key, each well formed and given once. ``field``: what the caller calls them."""
    if not keys:
        raise BadArgument(field, "no keys", "at least one key")
    for key in keys:
        if len(key) != KEY_BYTES:
            raise BadArgument(field, key.hex(), f"{KEY_BYTES} bytes a key")
    if len(set(keys)) != len(keys):
        raise BadArgument(field, "a key stands twice", "each key once a call")


def check_chains(chains: Sequence[ChainRequest]) -> None:
    """What an acquire asks for."""
    if not chains:
        raise BadArgument("chains", 0, "at least one chain")
    for position, chain in enumerate(chains):
        check_keys(chain.keys, f"chains[{position}].keys")
        if not 0 <= chain.min_blocks <= len(chain.keys):
            raise BadArgument(f"chains[{position}].min_blocks", chain.min_blocks, f"0 to {len(chain.keys)}")
        check_retention(len(chain.keys), chain.priorities, chain.durations_ms, f"chains[{position}].", some=True)


def check_items(lease: Lease, items: Sequence[CommitItem]) -> None:
    """What a commit makes of the lease's blank slots."""
    if not items:
        raise BadArgument("slots", "none", "at least one slot")
    slots, keys, _, priorities, durations_ms, _ = zip(*items, strict=True)
    check_keys(keys, "keys")
    if len(set(slots)) != len(slots):
        raise BadArgument("slots", list(slots), "each slot once a call")
    blank = lease.blank
    for slot, key, parent, _, _, label in items:
        if slot not in blank:
            raise BadArgument("slots", slot, f"a blank slot of lease {lease.id}")
        if parent is not None and len(parent) != KEY_BYTES:
            raise BadArgument("parents", parent.hex(), f"{KEY_BYTES} bytes a key")
        if parent == key:
            raise BadArgument("parents", key.hex(), "a block is not its own parent")
        if label is not None:
            _check_label(label)
    check_retention(len(items), priorities, durations_ms)


def _check_label(label: Label) -> None:
    if len(label.event_hash) not in EVENT_HASH_BYTES:
        raise BadArgument("event_hashes", f"{len(label.event_hash)} bytes", "0, 8 or 32 bytes a block")
    if len(label.tokens) > MAX_TOKEN_BYTES:
        raise BadArgument("tokens", f"{len(label.tokens)} bytes", f"at most {MAX_TOKEN_BYTES} bytes a block")
