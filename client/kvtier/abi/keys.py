"""Block keys: SHA-256 chained over parent key and token ids, rooted in the scope.

Encoding, integers little-endian::

    key  = SHA-256(parent key, 32 bytes ‖ the block's token ids, u32 each)
    the parent key of a chain's first block is its root:
    root = SHA-256(b"kvtier.scope" ‖ u32 version = 1
                   ‖ u8 has_lora ‖ u64 lora_id (0 without)
                   ‖ u8 has_salt ‖ u32 length ‖ salt in UTF-8
                   ‖ u32 number of multimodal digests ‖ each: u32 length ‖ bytes)

A root is never a block: it only separates scopes. Keys travel packed, 32 bytes each, without separator.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.errors import FieldError, require_int

KEY_BYTES: Final = 32
MAX_TOKEN_ID: Final = 2**32 - 1

_SCOPE_VERSION: Final = 1
_TOKEN_LIMIT: Final = f"an integer from 0 to {MAX_TOKEN_ID}"


class KeyChainError(FieldError):
    """Tokens, a scope or packed keys that name no blocks: ``field``, ``value``, ``limit``."""


@dataclass(slots=True, frozen=True)
class Scope:
    """What besides the tokens decides a block's bytes. Blocks of different scopes never share a key.

    ``lora_id``: the adapter, 0 to 2^64-1. ``salt``: keeps tenants apart. ``multimodal``: digests of the images and
    sounds that the prompt's placeholder tokens stand for, in prompt order.
    """

    lora_id: int | None = None
    salt: str | None = None
    multimodal: tuple[bytes, ...] = ()


def root(scope: Scope) -> bytes:
    """The 32 bytes that stand as parent of a chain's first block. Raises :class:`KeyChainError`."""
    lora = 0 if scope.lora_id is None else require_int("scope.lora_id", scope.lora_id, 0, 2**64 - 1, KeyChainError)
    try:
        salt = b"" if scope.salt is None else scope.salt.encode()
    except UnicodeEncodeError as error:
        raise KeyChainError("scope.salt", scope.salt, "text that UTF-8 can encode") from error
    digest = hashlib.sha256(b"kvtier.scope" + struct.pack("<I", _SCOPE_VERSION))
    digest.update(struct.pack("<BQ", scope.lora_id is not None, lora))
    digest.update(struct.pack("<BI", scope.salt is not None, len(salt)) + salt)
    digest.update(struct.pack("<I", len(scope.multimodal)))
    for item in scope.multimodal:
        digest.update(struct.pack("<I", len(item)) + item)
    return digest.digest()


def chain_keys(
    token_ids: NDArray[np.integer[Any]] | Sequence[int], tokens_per_block: int, scope: Scope = Scope()
) -> bytes:
    """The keys of all full blocks of a prompt, packed: ``len(token_ids) // tokens_per_block`` x 32 bytes.

    The keys of a prefix are a prefix of the keys. Raises :class:`KeyChainError` for token ids that are not integers
    from 0 to 2^32-1 and for ``tokens_per_block`` < 1.
    """
    require_int("tokens_per_block", tokens_per_block, 1, MAX_TOKEN_ID, KeyChainError)
    payload = memoryview(_as_u32(token_ids).tobytes())
    step = tokens_per_block * 4
    sha256 = hashlib.sha256
    parent = root(scope)
    chain = []
    for start in range(0, len(payload) - step + 1, step):
        digest = sha256(parent)
        digest.update(payload[start : start + step])
        parent = digest.digest()
        chain.append(parent)
    return b"".join(chain)


def split(packed: bytes) -> list[bytes]:
    """Packed keys, one by one. Raises :class:`KeyChainError` where the length is no multiple of 32."""
    if len(packed) % KEY_BYTES:
        raise KeyChainError("keys", f"{len(packed)} bytes", f"a multiple of {KEY_BYTES} bytes")
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]


def join(keys: Iterable[bytes]) -> bytes:
    """Keys packed. Raises :class:`KeyChainError` where one is not 32 bytes long."""
    listed = list(keys)
    for index, key in enumerate(listed):
        if len(key) != KEY_BYTES:
            raise KeyChainError(f"keys[{index}]", f"{len(key)} bytes", f"{KEY_BYTES} bytes")
    return b"".join(listed)


def _as_u32(token_ids: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.uint32]:
    try:
        tokens = np.asarray(token_ids)
    except ValueError as error:  # sequences of unequal length
        raise KeyChainError("token_ids", token_ids, "one-dimensional") from error
    if tokens.ndim != 1:
        raise KeyChainError("token_ids", f"{tokens.ndim} dimensions", "one-dimensional")
    if tokens.size == 0:
        return np.empty(0, dtype="<u4")
    if tokens.dtype.kind not in "iu":
        # Floats, bools and integers too large for numpy all end up here: find the one to name.
        _refuse_first_bad(tokens.tolist() if isinstance(token_ids, np.ndarray) else token_ids)
        raise KeyChainError("token_ids", f"dtype {tokens.dtype}", "integers")
    if (tokens.dtype.kind == "i" and tokens.min() < 0) or tokens.max() > MAX_TOKEN_ID:
        _refuse_first_bad(tokens.tolist())
    return tokens.astype("<u4")


def _refuse_first_bad(tokens: Sequence[object]) -> None:
    for index, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN_ID:
            raise KeyChainError(f"token_ids[{index}]", token, _TOKEN_LIMIT)
