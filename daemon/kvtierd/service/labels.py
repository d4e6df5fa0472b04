"""What a commit tells of its blocks besides their keys: event hashes and tokens, checked and put up for keeping."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from google.protobuf.message import Message

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.keys import DIGEST_BYTES
from kvtier.v1 import blocks_pb2, events_pb2
from kvtierd.core.traits import Label
from kvtierd.service.entries import Cache
from kvtierd.service.errors import bad_argument

MAX_SALT_BYTES: Final = 1024
_TOKEN_BYTES: Final = 4
_EXTRA_ID_BYTES: Final = 8
_ONLY_WITH_TOKENS: Final = ("token_extra_ids", "lora_id", "cache_salt", "mm_digests", "mm_blocks", "mm_offsets")
_MAY_BE_ZERO: Final = frozenset({"lora_id", "cache_salt"})
"""Told or not, whatever their values."""


def labels(cache: Cache, request: blocks_pb2.CommitRequest, count: int) -> Sequence[Label | None]:
    """One a block of the call. Raises INVALID_ARGUMENT, also for what the cache does not keep."""
    hashes = _hashes(cache, request.event_hashes, count)
    tokens = _tokens(cache, request, count)
    if not request.event_hashes and not request.tokens:
        return [None] * count
    return [
        Label(event_hash, payload) if event_hash or payload else None
        for event_hash, payload in zip(hashes, tokens, strict=True)
    ]


def _hashes(cache: Cache, packed: bytes, count: int) -> Sequence[bytes]:
    algorithm = cache.options.event_hash
    if not packed:
        return [b""] * count
    if not algorithm:
        raise bad_argument("event_hashes", f"{len(packed)} bytes", f"none: cache {cache.name} has no event_hash")
    size = HASH_BYTES[algorithm]
    _require_length("event_hashes", packed, count * size, f"{size} a block, of {algorithm}")
    return _split(packed, size)


def _tokens(cache: Cache, request: blocks_pb2.CommitRequest, count: int) -> Sequence[bytes]:
    """A serialised ``BlockTokens`` a block."""
    if not request.tokens:
        for field in _ONLY_WITH_TOKENS:
            if _is_told(request, field):
                raise bad_argument(field, "some", "none without tokens")
        return [b""] * count
    if not cache.options.keep_tokens:
        raise bad_argument("tokens", f"{len(request.tokens)} bytes", f"none: cache {cache.name} keeps no tokens")
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise bad_argument("cache_salt", request.cache_salt, f"at most {MAX_SALT_BYTES} bytes of UTF-8")
    messages = [events_pb2.BlockTokens(token_ids=ids) for ids in _ids(cache, request, count)]
    for message, extra in zip(messages, _extra_ids(cache, request, count), strict=True):
        message.extra_ids = extra
        if request.HasField("lora_id"):
            message.lora_id = request.lora_id
        if request.HasField("cache_salt"):
            message.cache_salt = request.cache_salt
    _add_items(request, messages)
    return [message.SerializeToString() for message in messages]


def _is_told(request: Message, field: str) -> bool:
    """All fields of a request at once would be copies of its keys and its parents, too."""
    return request.HasField(field) if field in _MAY_BE_ZERO else bool(getattr(request, field))


def _ids(cache: Cache, request: blocks_pb2.CommitRequest, count: int) -> Sequence[bytes]:
    size = cache.spec.tokens_per_block * _TOKEN_BYTES
    _require_length("tokens", request.tokens, count * size, f"{size} a block of {cache.spec.tokens_per_block} tokens")
    return _split(request.tokens, size)


def _extra_ids(cache: Cache, request: blocks_pb2.CommitRequest, count: int) -> Sequence[bytes]:
    """Empty for a block whose tokens have none."""
    size = cache.spec.tokens_per_block * _EXTRA_ID_BYTES
    if not request.token_extra_ids:
        return [b""] * count
    _require_length("token_extra_ids", request.token_extra_ids, count * size, f"{size} a block, or none")
    return [ids if any(ids) else b"" for ids in _split(request.token_extra_ids, size)]


def _add_items(request: blocks_pb2.CommitRequest, messages: Sequence[events_pb2.BlockTokens]) -> None:
    blocks, offsets = request.mm_blocks, request.mm_offsets
    _require_length("mm_digests", request.mm_digests, len(blocks) * DIGEST_BYTES, f"{DIGEST_BYTES} each of mm_blocks")
    if len(offsets) != len(blocks):
        raise bad_argument("mm_offsets", f"{len(offsets)} offsets", f"{len(blocks)}, one each of mm_blocks")
    for index, (before, block) in enumerate(pairwise((0, *blocks))):
        if not before <= block < len(messages):
            raise bad_argument(f"mm_blocks[{index}]", block, f"{before} to {len(messages) - 1}")
    for block, digest, offset in zip(blocks, _split(request.mm_digests, DIGEST_BYTES), offsets, strict=True):
        messages[block].mm_digests += digest
        messages[block].mm_offsets.append(offset)


def _split(packed: bytes, size: int) -> list[bytes]:
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def _require_length(field: str, packed: bytes, length: int, of: str) -> None:
    if len(packed) != length:
        raise bad_argument(field, f"{len(packed)} bytes", f"{length} bytes, {of}")
