"""Checks of requests, before anything is changed: INVALID_ARGUMENT with field, value and limit."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.keys import DIGEST_BYTES, KEY_DTYPE, ROOT_PARENT, are_distinct
from kvtier.abi.words import ENDED_MS
from kvtier.v1 import blocks_pb2, common_pb2, events_pb2
from kvtierd.core.ids import KEY_BYTES, MAX_TOKEN_BYTES, TOKEN_BYTES, GroupId, Key, Label, LeaseId, Tier, rows
from kvtierd.core.policy import DEFAULT_PRIORITY, MAX_PRIORITY, UNCHANGED
from kvtierd.core.transfers import CommitItem
from kvtierd.service.cache import ServedCache
from kvtierd.service.errors import bad_argument
from kvtierd.service.wire import TIER_FROM_WIRE

MAX_KEYS: Final = 16_384
"""Most blocks of a call: 262,144 tokens at 16 a block. A client splits a longer chain."""

MAX_CHAINS: Final = 1_024
MAX_TAG_BYTES: Final = 128
MAX_LEASES: Final = 16_384
MAX_TIMEOUT_NS: Final = 3_600 * 10**9
MIN_HEARTBEAT_NS: Final = 10 * 10**6

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def cache_name(value: str, field: str = "name") -> str:
    if not _NAME.fullmatch(value):
        raise bad_argument(field, value, "1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or a digit")
    return value


def keys(field: str, packed: bytes, *, max_keys: int = MAX_KEYS, least: int = 1) -> list[Key]:
    """The packed keys as a list, all different. No keys are refused: the client may have misnamed the field."""
    if len(packed) % KEY_BYTES:
        raise bad_argument(field, f"{len(packed)} bytes", f"keys of {KEY_BYTES} bytes")
    count = len(packed) // KEY_BYTES
    if count < least:
        raise bad_argument(field, "no keys", f"keys of {KEY_BYTES} bytes, at least one")
    if count > max_keys:
        raise bad_argument(field, f"{count} keys", f"at most {max_keys} keys")
    listed = _split(packed)
    if not are_distinct(packed) and len(set(listed)) < len(listed):
        first = {key: index for index, key in reversed([*enumerate(listed)])}
        index, key = next((index, key) for index, key in enumerate(listed) if first[key] < index)
        raise bad_argument(f"{field}[{index}]", key.hex(), f"different from {field}[{first[key]}]")
    return listed


def conversation(field: str, tag: bytes) -> bytes:
    """A digest of a conversation's tag, so that a long tag takes no more memory; empty = none."""
    if len(tag) > MAX_TAG_BYTES:
        raise bad_argument(field, f"{len(tag)} bytes", f"at most {MAX_TAG_BYTES} bytes")
    return blake2b(tag, digest_size=16).digest() if tag else b""


def parents(field: str, packed: bytes, keys: Sequence[Key]) -> list[Key | None]:
    """A parent per block, never the block itself; 32 zero bytes = a root."""
    size = len(keys) * KEY_BYTES
    if len(packed) != size:
        raise bad_argument(field, f"{len(packed)} bytes", f"{size} bytes: one parent a key")
    listed = _split(packed)
    for index, (parent, key) in enumerate(zip(listed, keys, strict=True)):
        if parent == key:
            raise bad_argument(f"{field}[{index}]", key.hex(), "another key: a block is not its own parent")
    return [None if parent == ROOT_PARENT else parent for parent in listed]


def _split(packed: bytes) -> list[Key]:
    """Splits packed keys, much faster than slices."""
    return cast("list[Key]", np.frombuffer(packed, KEY_DTYPE).tolist()) if packed else []


def durations(field: str, values: Sequence[int], count: int) -> Sequence[int]:
    """Milliseconds per block; no values = for ever for each block."""
    if not values:
        return [0] * count
    if len(values) != count:
        raise bad_argument(field, f"{len(values)} values", f"{count} values, one a key, or none")
    if (most := max(values)) == ENDED_MS:
        raise bad_argument(f"{field}[{list(values).index(most)}]", most, f"at most {ENDED_MS - 1}")
    return values


def priorities(field: str, packed: bytes, count: int, *, some: bool = False) -> bytes:
    """A priority byte per block; no bytes = the default for each block. ``some``: 255 leaves a block as it is."""
    if not packed:
        return bytes([DEFAULT_PRIORITY]) * count
    if len(packed) != count:
        raise bad_argument(field, f"{len(packed)} bytes", f"{count} bytes, one a key, or none")
    if max(packed) > MAX_PRIORITY:
        for index, value in enumerate(packed):
            if value > MAX_PRIORITY and not (some and value == UNCHANGED):
                raise bad_argument(f"{field}[{index}]", value, f"0 to {MAX_PRIORITY}")
    return packed


def tier(field: str, value: int, allowed: Collection[Tier]) -> Tier:
    """The tier of ``value``. ``allowed``: the tiers that the cache has and the verb can use."""
    found = TIER_FROM_WIRE.get(value)
    if found is None or found not in allowed:
        names = " or ".join(map(str, sorted(allowed))) or "a tier that the cache has; it has none for this call"
        raise bad_argument(field, str(found) if found is not None else _tier_name(value), names)
    return found


def _tier_name(value: int) -> str:
    return common_pb2.Tier.Name(common_pb2.Tier.ValueType(value)) if value in common_pb2.Tier.values() else str(value)


def count(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise bad_argument(field, value, f"{low} to {high}")
    return value


def lease(field: str, value: int) -> LeaseId:
    return LeaseId(count(field, value, 1, (1 << 64) - 1))


def group(field: str, value: int, cache: ServedCache) -> GroupId:
    return GroupId(count(field, value, 0, len(cache.spec.groups) - 1))


def timeout_s(field: str, value_ns: int, default_s: float, least_ns: int = 0) -> float:
    """Seconds of a wait; 0 = the daemon's default."""
    return count(field, value_ns, least_ns, MAX_TIMEOUT_NS) / 1e9 if value_ns else default_s


def commit_items(cache: ServedCache, request: blocks_pb2.CommitRequest, slots: Sequence[int]) -> list[CommitItem]:
    """The blocks that a commit stores in ``slots``. Raises INVALID_ARGUMENT."""
    listed = keys("keys", request.keys, least=not request.release)
    number = len(listed)
    if len(slots) != number:
        raise bad_argument("slots", f"{len(slots)} slots", f"{number} slots, one a key")
    if len(set(slots)) < number:
        raise bad_argument("slots", list(slots), "each slot once a call")
    columns = (
        parents("parents", request.parents, listed),
        priorities("priorities", request.priorities, number),
        durations("durations_ms", request.durations_ms, number),
        labels(cache, request, number),
    )
    return list(rows(CommitItem, slots, listed, *columns))


MAX_SALT_BYTES: Final = 1024
_EXTRA_ID_BYTES: Final = 8
_ONLY_WITH_TOKENS: Final = ("partial_tokens", "token_extra_ids", "mm_digests", "mm_blocks", "mm_offsets")
_ONLY_WITH_TOKENS_EVEN_ZERO: Final = ("lora_id", "cache_salt")


def groups(field: str, cache: ServedCache, numbers: Sequence[int]) -> list[GroupId]:
    """Window groups of a cache, each once; none = all. Raises INVALID_ARGUMENT."""
    known = range(len(cache.spec.groups))
    count(field, len(numbers), 0, len(known))
    for index, number in enumerate(numbers):
        count(f"{field}[{index}]", number, 0, len(known) - 1)
        if number in numbers[:index]:
            raise bad_argument(f"{field}[{index}]", number, "each group once")
    return [GroupId(number) for number in numbers or known]


def following(cache: ServedCache, groups: Sequence[GroupId], request: blocks_pb2.MatchRequest) -> tuple[bytes, bytes]:
    """The token ids after a match's keys, fewer than a block has, and their scope. Raises INVALID_ARGUMENT."""
    if not request.tokens:
        _require_no_scope(request)
        return b"", b""
    if not cache.options.keep_tokens:
        raise bad_argument("tokens", "some", f"none: cache {cache.name} keeps no tokens")
    if not cache.spec.splits(groups):
        raise bad_argument("tokens", "some", "none, except for full-attention groups, with sliding ones or without")
    most = (cache.spec.tokens_per_block - 1) * TOKEN_BYTES
    if len(request.tokens) > most or len(request.tokens) % TOKEN_BYTES:
        raise bad_argument("tokens", f"{len(request.tokens)} bytes", f"{TOKEN_BYTES} bytes a token, at most {most}")
    return request.tokens, events_pb2.BlockTokens(**_scope(request)).SerializeToString()


def labels(cache: ServedCache, request: blocks_pb2.CommitRequest, count: int) -> Sequence[Label | None]:
    """A label per block. Raises INVALID_ARGUMENT, also for a label that the cache does not keep."""
    if not request.event_hashes and not request.tokens and not request.checksums:
        _require_no_scope(request)
        return [None] * count
    options, width = cache.options, cache.spec.tokens_per_block
    if request.partial_tokens >= width:
        raise bad_argument("partial_tokens", request.partial_tokens, f"0 to {width - 1}")
    last = request.partial_tokens or width
    size = HASH_BYTES.get(options.event_hash, 0)
    of = f"{size} bytes a block" if size else f"none: cache {cache.name} has no event_hash"
    hashes = _rows("event_hashes", request.event_hashes, size, count, of)
    size = TOKEN_BYTES if options.keep_tokens else 0
    of = f"{width * size} bytes a block of {width} tokens" if size else f"none: cache {cache.name} keeps no tokens"
    ids = _rows("tokens", request.tokens, width * size, count, of, last * size)
    size = options.checksum_bytes
    of = f"{size} bytes a block" if size else f"none: cache {cache.name} has no checksum from the commit on"
    checksums = _rows("checksums", request.checksums, size, count, of)
    if request.tokens:
        scopes = [message.SerializeToString() for message in _scopes(request, count, width, last)]
        longest = max(len(own) + len(scope) for own, scope in zip(ids, scopes, strict=True))
        if longest > MAX_TOKEN_BYTES:
            raise bad_argument("tokens", f"{longest} bytes", f"at most {MAX_TOKEN_BYTES} bytes a block")
    else:
        _require_no_scope(request)
        scopes = ids
    return [Label(*row) if any(row) else None for row in zip(hashes, ids, checksums, scopes, strict=True)]


def _require_no_scope(request: blocks_pb2.CommitRequest | blocks_pb2.MatchRequest) -> None:
    given = [field for field in _ONLY_WITH_TOKENS if getattr(request, field, None)]
    given += [field for field in _ONLY_WITH_TOKENS_EVEN_ZERO if request.HasField(field)]
    if given:
        raise bad_argument(given[0], "some", "none without tokens")


def _scope(request: blocks_pb2.CommitRequest | blocks_pb2.MatchRequest) -> dict[str, Any]:
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise bad_argument("cache_salt", request.cache_salt, f"at most {MAX_SALT_BYTES} bytes of UTF-8")
    return {field: getattr(request, field) for field in _ONLY_WITH_TOKENS_EVEN_ZERO if request.HasField(field)}


def _scopes(request: blocks_pb2.CommitRequest, count: int, width: int, last: int) -> Sequence[events_pb2.BlockTokens]:
    """The scope of each block's tokens, without the token ids. ``last``: tokens of the last block."""
    size = width * _EXTRA_ID_BYTES
    extra_ids = _rows(
        "token_extra_ids", request.token_extra_ids, size, count, f"{size} bytes a block", last * _EXTRA_ID_BYTES
    )
    scope = _scope(request)
    messages = [events_pb2.BlockTokens(extra_ids=extra if any(extra) else b"", **scope) for extra in extra_ids]
    blocks, offsets = request.mm_blocks, request.mm_offsets
    if len(offsets) != len(blocks):
        raise bad_argument("mm_offsets", f"{len(offsets)} offsets", f"{len(blocks)}, one each of mm_blocks")
    for index, (before, block) in enumerate(pairwise((0, *blocks))):
        if not before <= block < len(messages):
            raise bad_argument(f"mm_blocks[{index}]", block, f"{before} to {len(messages) - 1}")
    if len(request.mm_digests) != len(blocks) * DIGEST_BYTES:
        shown = f"{len(request.mm_digests)} bytes"
        raise bad_argument("mm_digests", shown, f"{DIGEST_BYTES} bytes each of {len(blocks)} mm_blocks")
    digests = _rows("mm_digests", request.mm_digests, DIGEST_BYTES, len(blocks), "")
    for block, digest, offset in zip(blocks, digests, offsets, strict=True):
        messages[block].mm_digests += digest
        messages[block].mm_offsets.append(offset)
    return messages


def _rows(field: str, packed: bytes, size: int, count: int, limit: str, last: int | None = None) -> list[bytes]:
    """``packed`` cut into ``count`` rows of ``size`` bytes, the last of ``last``; empty rows if the field is empty."""
    if not packed:
        return [b""] * count
    if len(packed) != count * size - (0 if last is None else size - last):
        raise bad_argument(field, f"{len(packed)} bytes", limit)
    return [packed[start : start + size] for start in range(0, len(packed), size)]
