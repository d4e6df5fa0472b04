"""TensorRT-LLM's names for blocks, so that routers which know them can read kvtier's events.

kvtier finds blocks by their keys alone (:mod:`kvtier.abi.keys`); these hashes only stand beside them in events. Packed
they are big-endian: ``int.from_bytes(one, "big")`` is the number that TensorRT-LLM shows, ``one.hex()`` the digest.

``v1_block_key`` (64 bits)
    seed = number of tokens XOR parent * 0xbf58476d1ce4e5b9, the parent of a chain's first block being 0; then, each
    mixed into the seed: the salt's id (first block only), every token id and its extra id if the prompt has any, the
    LoRA id, and for each item that covers the block its digest's eight words and the place in the item. Arithmetic
    modulo 2^64, except that a token's or word's own part is modulo 2^32.
``v2_sha256`` (256 bits)
    root = SHA-256(u8 bit 0: LoRA, bit 1: salt ‖ the LoRA id and the salt's id, those that are there, u64 each); then
    SHA-256(parent ‖ token ids, u32 each), little-endian. Of an item's tokens the first one is hashed as the item's 32
    bytes of digest, the n-th as the id ``vocab_size + n``.
``v2_sha256_64`` (64 bits)
    The first eight bytes of the latter.

The encodings are those of TensorRT-LLM in 2026 (``cpp/tensorrt_llm/batch_manager/blockKey.cpp``,
``tensorrt_llm/runtime/kv_cache_hash.py`` and ``kv_cache_manager_v2/_block_radix_tree.py``). No published test vectors
were found. Tokens, LoRA ids, salt ids and items of v2 agree with what those Python functions answer; extra ids and
items under ``v1_block_key`` are unverified: they exist in C++ only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.errors import require_int
from kvtier.abi.keys import (
    MAX_TOKEN_ID,
    PLAIN,
    Covered,
    KeyChainError,
    Scope,
    TokenIds,
    covered_blocks,
    extra_id_array,
    token_array,
)

V1_BLOCK_KEY: Final = "v1_block_key"
V2_SHA256: Final = "v2_sha256"
V2_SHA256_64: Final = "v2_sha256_64"

HASH_BYTES: Final[Mapping[str, int]] = {V1_BLOCK_KEY: 8, V2_SHA256: 32, V2_SHA256_64: 8}
"""Bytes a hash, by algorithm: all that there are."""

_MASK: Final = 2**64 - 1
_PARENT: Final = 0xBF58476D1CE4E5B9
_COMBINE: Final = 0x9E3779B9

U64 = NDArray[np.uint64]


@dataclass(slots=True, frozen=True)
class _Prompt:
    """``extra_ids``: None without any. ``covered``: by block."""

    tokens: NDArray[np.uint32]
    tokens_per_block: int
    lora_id: int | None
    salt_id: int | None
    extra_ids: U64 | None
    covered: Mapping[int, list[Covered]]
    vocab_size: int | None

    @property
    def blocks(self) -> int:
        return len(self.tokens) // self.tokens_per_block


def event_hashes(
    algorithm: str,
    token_ids: TokenIds,
    tokens_per_block: int,
    scope: Scope = PLAIN,
    extra_ids: TokenIds | None = None,
    *,
    salt_id: int | None = None,
    vocab_size: int | None = None,
) -> bytes:
    """The hashes of all full blocks of a prompt, packed: ``len(token_ids) // tokens_per_block`` x ``HASH_BYTES``.

    ``salt_id``: TensorRT-LLM's number for ``scope.salt`` (``get_cache_salt_id`` there; how it is made has changed
    between its versions, so it is not guessed here). ``vocab_size``: needed by the v2 algorithms where the scope has
    multimodal items. Raises :class:`KeyChainError` where these are missing, for an unknown algorithm, for extra ids
    with a v2 algorithm, which has none, and as :func:`kvtier.abi.keys.chain_keys` does.
    """
    hasher = _HASHERS.get(algorithm)
    if hasher is None:
        raise KeyChainError("event_hash", algorithm, " or ".join(HASH_BYTES))
    require_int("tokens_per_block", tokens_per_block, 1, MAX_TOKEN_ID, KeyChainError)
    tokens = token_array(token_ids)
    lora_id = scope.lora_id
    if lora_id is not None:
        require_int("scope.lora_id", lora_id, 0, 2**64 - 1, KeyChainError)
    if (scope.salt is None) != (salt_id is None):
        raise KeyChainError("salt_id", salt_id, "the id of scope.salt where there is one, and none else")
    if salt_id is not None:
        require_int("salt_id", salt_id, 0, 2**64 - 1, KeyChainError)
    prompt = _Prompt(
        tokens,
        tokens_per_block,
        lora_id,
        salt_id,
        None if extra_ids is None else extra_id_array(extra_ids, len(tokens)),
        covered_blocks(scope, len(tokens) // tokens_per_block, tokens_per_block),
        vocab_size,
    )
    return hasher(prompt)


def _v1_block_key(prompt: _Prompt) -> bytes:
    step = prompt.tokens_per_block
    parts = _parts32(prompt.tokens)
    if prompt.extra_ids is not None:
        parts = np.column_stack([parts, _parts64(prompt.extra_ids)]).reshape(-1)
    width = len(parts) // max(1, len(prompt.tokens)) * step
    lora = [] if prompt.lora_id is None else _parts64(np.array([prompt.lora_id], np.uint64)).tolist()
    salt = [] if prompt.salt_id is None else _parts64(np.array([prompt.salt_id], np.uint64)).tolist()
    hashes = []
    parent = 0
    for block in range(prompt.blocks):
        seed = step ^ (parent * _PARENT & _MASK)
        tail = lora + [part for item in prompt.covered.get(block, ()) for part in _item_parts(item)]
        for part in (*(salt if parent == 0 else ()), *parts[block * width : (block + 1) * width].tolist(), *tail):
            seed ^= (part + (seed << 6 & _MASK) + (seed >> 2)) & _MASK
        parent = seed
        hashes.append(seed)
    return np.array(hashes, dtype=">u8").tobytes()


def _item_parts(item: Covered) -> list[int]:
    words = _parts32(np.frombuffer(item.digest, dtype="<u4"))
    return [*words.tolist(), *_parts64(np.array([item.offset], np.uint64)).tolist()]


def _parts32(values: NDArray[Any]) -> U64:
    """What each 32-bit value adds when it is mixed in, whatever the seed."""
    mixed = values.astype(np.uint32)
    for _ in range(2):
        mixed = ((mixed >> np.uint32(16)) ^ mixed) * np.uint32(0x45D9F3B)
    mixed = (mixed >> np.uint32(16)) ^ mixed
    return (mixed + np.uint32(_COMBINE)).astype(np.uint64)


def _parts64(values: U64) -> U64:
    """The same of 64-bit values."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) + np.uint64(_COMBINE)


def _v2_sha256(prompt: _Prompt) -> bytes:
    return b"".join(_v2_digests(prompt))


def _v2_sha256_64(prompt: _Prompt) -> bytes:
    return b"".join(digest[:8] for digest in _v2_digests(prompt))


def _v2_digests(prompt: _Prompt) -> list[bytes]:
    if prompt.extra_ids is not None:
        raise KeyChainError("extra_ids", "some", "none: v2 hashes do not know them")
    scope = (prompt.lora_id, prompt.salt_id)
    root = struct.pack("<B", sum((value is not None) << bit for bit, value in enumerate(scope)))
    parent = hashlib.sha256(root + b"".join(struct.pack("<Q", v) for v in scope if v is not None)).digest()
    step = prompt.tokens_per_block
    digests = []
    for block in range(prompt.blocks):
        payload = prompt.tokens[block * step : (block + 1) * step].tobytes()
        for item in reversed(prompt.covered.get(block, ())):
            start, end = item.position * 4, (item.position + item.tokens) * 4
            payload = payload[:start] + _item_tokens(item, prompt.vocab_size) + payload[end:]
        parent = hashlib.sha256(parent + payload).digest()
        digests.append(parent)
    return digests


def _item_tokens(item: Covered, vocab_size: int | None) -> bytes:
    """Whatever the placeholders are: the digest for the item's first token, ids above the vocabulary for the rest."""
    most = MAX_TOKEN_ID - item.offset - item.tokens
    first = require_int("vocab_size", vocab_size, 1, most, KeyChainError) + item.offset
    ids = np.arange(first, first + item.tokens, dtype="<u4")
    return item.digest + ids[1:].tobytes() if item.offset == 0 else ids.tobytes()


_HASHERS: Final[Mapping[str, Callable[[_Prompt], bytes]]] = {
    V1_BLOCK_KEY: _v1_block_key,
    V2_SHA256: _v2_sha256,
    V2_SHA256_64: _v2_sha256_64,
}
