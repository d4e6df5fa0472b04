"""TensorRT-LLM's hashes of blocks, for routers that know blocks by these hashes.

kvtier finds blocks by their keys alone (:mod:`kvtier.abi.keys`); the hashes stand beside the keys in events. Packed
hashes are big-endian: ``int.from_bytes(hash, "big")`` is the number that TensorRT-LLM shows.

``v1_block_key`` (64 bits)
    seed = number of tokens XOR parent * 0xbf58476d1ce4e5b9; the parent of a chain's first block is 0. Then these values
    are mixed into the seed: the salt's id (first block only), every token id and its extra id if the prompt has any,
    the LoRA id, and for each item that covers the block its digest's eight words and the place in the item. Arithmetic
    is modulo 2^64, but a token's or word's own part is modulo 2^32.
``v2_sha256`` (256 bits)
    root = SHA-256(u8 bit 0: LoRA, bit 1: salt ‖ the LoRA id and the salt's id, if present, u64 each); then
    SHA-256(parent ‖ token ids, u32 each), little-endian. The first token of an item is hashed as the item's 32 bytes
    of digest, the n-th token as the id ``vocab_size + n``.
``v2_sha256_64`` (64 bits)
    The first eight bytes of ``v2_sha256``.

The encodings are TensorRT-LLM's in 2026 (``cpp/tensorrt_llm/batch_manager/blockKey.cpp``,
``tensorrt_llm/runtime/kv_cache_hash.py`` and ``kv_cache_manager_v2/_block_radix_tree.py``), compared with the answers
of these Python functions. Extra ids and items under ``v1_block_key`` exist in C++ only and are unverified.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi import keys
from kvtier.abi.spec import require_int

V1_BLOCK_KEY: Final = "v1_block_key"
V2_SHA256: Final = "v2_sha256"
V2_SHA256_64: Final = "v2_sha256_64"

HASH_BYTES: Final[Mapping[str, int]] = {V1_BLOCK_KEY: 8, V2_SHA256: 32, V2_SHA256_64: 8}
"""Bytes of a hash, by algorithm."""

_MASK: Final = 2**64 - 1
_PARENT: Final = 0xBF58476D1CE4E5B9
_COMBINE: Final = 0x9E3779B9

U64 = NDArray[np.uint64]
Items = Mapping[int, list[keys.Covered]]


def event_hashes(
    algorithm: str,
    token_ids: keys.TokenIds,
    tokens_per_block: int,
    scope: keys.Scope = keys.PLAIN,
    extra_ids: keys.TokenIds | None = None,
    *,
    salt_id: int | None = None,
    vocab_size: int | None = None,
    partial: bool = False,
) -> bytes:
    """Returns TensorRT-LLM's hashes of full blocks, packed: ``len(token_ids) // tokens_per_block`` x ``HASH_BYTES``.

    Args:
        partial: the remaining tokens get a hash of their own.
        salt_id: TensorRT-LLM's number for ``scope.salt``, as its ``get_cache_salt_id`` makes it.
        vocab_size: needed by the v2 algorithms if the scope has multimodal items.

    Raises:
        KeyChainError: for an unknown algorithm, a missing ``salt_id`` or ``vocab_size``, extra ids with a v2 algorithm,
            and for the same reasons as :func:`kvtier.abi.keys.chain_keys`.
    """
    if algorithm not in HASH_BYTES:
        raise keys.KeyChainError("event_hash", algorithm, " or ".join(HASH_BYTES))
    require_int("tokens_per_block", tokens_per_block, 1, keys.MAX_TOKEN_ID, keys.KeyChainError)
    if (scope.salt is None) != (salt_id is None):
        raise keys.KeyChainError("salt_id", salt_id, "the id of scope.salt, if there is one")
    ids = []  # of the adapter and of the salt
    for field, value in (("scope.lora_id", scope.lora_id), ("salt_id", salt_id)):
        ids.append(None if value is None else require_int(field, value, 0, 2**64 - 1, keys.KeyChainError))
    tokens = keys.token_array(token_ids)
    count = len(tokens) if partial else len(tokens) // tokens_per_block * tokens_per_block
    extra = None if extra_ids is None else keys.extra_id_array(extra_ids, len(tokens))[:count]
    covered = keys.covered_blocks(scope, count, tokens_per_block)
    tokens = tokens[:count]
    if algorithm == V1_BLOCK_KEY:
        return _v1(tokens, tokens_per_block, ids, extra, covered)
    if extra is not None:
        raise keys.KeyChainError("extra_ids", "some", "none: v2 hashes do not know them")
    digests = _v2(tokens, tokens_per_block, ids, covered, vocab_size)
    return b"".join(digest[: HASH_BYTES[algorithm]] for digest in digests)


def _v1(tokens: NDArray[np.uint32], step: int, ids: list[int | None], extra: U64 | None, covered: Items) -> bytes:
    parts = _parts32(tokens)[:, None]
    if extra is not None:
        parts = np.column_stack([parts, _parts64(extra)])
    lora, salt = ([] if value is None else _parts64(np.array([value], np.uint64)).tolist() for value in ids)
    hashes: list[int] = []
    parent = 0
    for block in range(-(-len(tokens) // step)):
        rows = parts[block * step : (block + 1) * step]
        seed = len(rows) ^ (parent * _PARENT & _MASK)
        own = rows.reshape(-1).tolist()
        items = [part for item in covered.get(block, ()) for part in _item_parts(item)]
        for part in (*([] if hashes else salt), *own, *lora, *items):
            seed ^= (part + (seed << 6 & _MASK) + (seed >> 2)) & _MASK
        parent = seed
        hashes.append(seed)
    return np.array(hashes, dtype=">u8").tobytes()


def _item_parts(item: keys.Covered) -> list[int]:
    words = _parts32(np.frombuffer(item.digest, dtype="<u4"))
    return [*words.tolist(), *_parts64(np.array([item.offset], np.uint64)).tolist()]


def _parts32(values: NDArray[Any]) -> U64:
    """Returns the number that each 32-bit value adds when it is mixed in."""
    mixed = values.astype(np.uint32)
    for _ in range(2):
        mixed = ((mixed >> np.uint32(16)) ^ mixed) * np.uint32(0x45D9F3B)
    mixed = (mixed >> np.uint32(16)) ^ mixed
    return (mixed + np.uint32(_COMBINE)).astype(np.uint64)


def _parts64(values: U64) -> U64:
    """Returns the number that each 64-bit value adds when it is mixed in."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) + np.uint64(_COMBINE)


def _v2(
    tokens: NDArray[np.uint32], step: int, ids: list[int | None], covered: Items, vocab_size: int | None
) -> list[bytes]:
    root = struct.pack("<B", sum((value is not None) << bit for bit, value in enumerate(ids)))
    parent = hashlib.sha256(root + b"".join(struct.pack("<Q", value) for value in ids if value is not None)).digest()
    digests = []
    for block in range(-(-len(tokens) // step)):
        payload = tokens[block * step : (block + 1) * step].tobytes()
        for item in reversed(covered.get(block, ())):
            start, end = item.position * 4, (item.position + item.tokens) * 4
            payload = payload[:start] + _item_tokens(item, vocab_size) + payload[end:]
        parent = hashlib.sha256(parent + payload).digest()
        digests.append(parent)
    return digests


def _item_tokens(item: keys.Covered, vocab_size: int | None) -> bytes:
    """Returns the digest for the item's first token, and ids above the vocabulary for the others."""
    most = keys.MAX_TOKEN_ID - item.offset - item.tokens
    first = require_int("vocab_size", vocab_size, 1, most, keys.KeyChainError) + item.offset
    ids = np.arange(first, first + item.tokens, dtype="<u4")
    return item.digest + ids[1:].tobytes() if item.offset == 0 else ids.tobytes()
