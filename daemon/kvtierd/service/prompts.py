"""What a commit says of its blocks' prompt: event hashes and tokens, checked and packed for keeping."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.keys import DIGEST_BYTES
from kvtier.v1 import blocks_pb2, events_pb2
from kvtierd.core.ids import Label
from kvtierd.service.entries import Cache
from kvtierd.service.errors import bad_argument

MAX_SALT_BYTES: Final = 1024
_TOKEN_BYTES: Final = 4
_EXTRA_ID_BYTES: Final = 8
_ONLY_WITH_TOKENS: Final = ("token_extra_ids", "mm_digests", "mm_blocks", "mm_offsets")
_ONLY_WITH_TOKENS_EVEN_ZERO: Final = ("lora_id", "cache_salt")


def labels(cache: Cache, request: blocks_pb2.CommitRequest, count: int) -> Sequence[Label | None]:
    """One label a block. Raises INVALID_ARGUMENT, also for what the cache does not keep."""
    options, width = cache.options, cache.spec.tokens_per_block
    size = HASH_BYTES.get(options.event_hash, 0)
    of = f"{size} bytes a block" if size else f"none: cache {cache.name} has no event_hash"
    hashes = _rows("event_hashes", request.event_hashes, size, count, of)
    size = width * _TOKEN_BYTES if options.keep_tokens else 0
    of = f"{size} bytes a block of {width} tokens" if size else f"none: cache {cache.name} keeps no tokens"
    ids = _rows("tokens", request.tokens, size, count, of)
    if request.tokens:
        tokens = [message.SerializeToString() for message in _messages(request, ids, width)]
    else:
        _require_no_scope(request)
        tokens = ids
    rows = zip(hashes, tokens, strict=True)
    return [Label(event_hash, payload) if event_hash or payload else None for event_hash, payload in rows]


def _require_no_scope(request: blocks_pb2.CommitRequest) -> None:
    given = [field for field in _ONLY_WITH_TOKENS if getattr(request, field)]
    given += [field for field in _ONLY_WITH_TOKENS_EVEN_ZERO if request.HasField(field)]
    if given:
        raise bad_argument(given[0], "some", "none without tokens")


def _messages(request: blocks_pb2.CommitRequest, ids: Sequence[bytes], width: int) -> Sequence[events_pb2.BlockTokens]:
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise bad_argument("cache_salt", request.cache_salt, f"at most {MAX_SALT_BYTES} bytes of UTF-8")
    scope = {field: getattr(request, field) for field in _ONLY_WITH_TOKENS_EVEN_ZERO if request.HasField(field)}
    size = width * _EXTRA_ID_BYTES
    extra_ids = _rows("token_extra_ids", request.token_extra_ids, size, len(ids), f"{size} bytes a block")
    messages = [
        events_pb2.BlockTokens(token_ids=own, extra_ids=extra if any(extra) else b"", **scope)
        for own, extra in zip(ids, extra_ids, strict=True)
    ]
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


def _rows(field: str, packed: bytes, size: int, count: int, limit: str) -> list[bytes]:
    """``packed`` cut into ``count`` rows of ``size`` bytes; empty rows if the field is empty."""
    if not packed:
        return [b""] * count
    if len(packed) != count * size:
        raise bad_argument(field, f"{len(packed)} bytes", limit)
    return [packed[start : start + size] for start in range(0, len(packed), size)]
