"""Block keys: SHA-256 chained over parent key and token ids, rooted in the scope.

Encoding, integers little-endian::

    key  = SHA-256(parent key, 32 bytes ‖ the block's token ids, u32 each ‖ extension)
    the parent key of a chain's first block is its root:
    root = SHA-256(b"kvtier.scope" ‖ u32 version = 1
                   ‖ u8 has_lora ‖ u64 lora_id (0 without)
                   ‖ u8 has_salt ‖ u32 length ‖ salt in UTF-8
                   ‖ u32 0)

The extension is empty for most blocks. A block with an extra id other than 0, or with tokens of an image or a sound,
has::

    extension = b"kvtier.block" ‖ u8 has_extra_ids ‖ the extra ids, u64 each, if it has
                ‖ u32 number of items ‖ each: 32 bytes digest ‖ u64 place in the item of its first token in the block
                                            ‖ u32 place in the block of this token ‖ u32 number of tokens in the block

Prompts that differ only in an item share the blocks before it. A partial block, which has fewer tokens than a full
block, ends the extension with::

    b"kvtier.partial" ‖ u32 number of tokens

No other block, longer or shorter, is hashed from the same bytes: the lengths modulo 4 and the last bytes differ. A root
is never a block: it only separates scopes. Keys travel packed, 32 bytes each, without separator.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.spec import InvalidArgument, require_all, require_int
from kvtier.abi.words import DIGEST_BYTES as DIGEST_BYTES  # noqa: PLC0414  re-exported
from kvtier.abi.words import KEY_BYTES as KEY_BYTES  # noqa: PLC0414
from kvtier.abi.words import ROOT_PARENT as ROOT_PARENT  # noqa: PLC0414

KEY_DTYPE: Final = np.dtype(f"V{KEY_BYTES}")
MAX_TOKEN_ID: Final = 2**32 - 1
MAX_EXTRA_ID: Final = 2**64 - 1

TokenIds = NDArray[np.integer[Any]] | Sequence[int]

_SCOPE_VERSION: Final = 1
_EXTENSION: Final = b"kvtier.block"
_PARTIAL: Final = b"kvtier.partial"


class KeyChainError(InvalidArgument, ValueError):
    """Invalid tokens or an invalid scope: ``field``, ``value``, ``limit``."""


@dataclass(slots=True, frozen=True)
class MultimodalItem:
    """An image or a sound: ``tokens`` placeholders from ``first_token`` on stand for it; ``digest``: 32 bytes."""

    digest: bytes
    first_token: int
    tokens: int


@dataclass(slots=True, frozen=True)
class Scope:
    """The inputs that decide a block's bytes besides the tokens. Blocks of different adapters or salts share no key.

    ``lora_id``: the adapter, 0 to 2^64-1. ``salt``: keeps tenants apart. ``multimodal``: the prompt's items in the
    order of their tokens, which do not overlap. Prompts share the blocks before the first item in which they differ.
    """

    lora_id: int | None = None
    salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        if self.lora_id is not None:
            require_int("scope.lora_id", self.lora_id, 0, 2**64 - 1, KeyChainError)
        if not isinstance(self.salt, str | None):
            raise KeyChainError("scope.salt", self.salt, "text")
        require_all("scope.multimodal", self.multimodal, MultimodalItem, KeyChainError)


PLAIN: Final = Scope()


@dataclass(slots=True, frozen=True)
class Covered:
    """The part of an item that lies in a block: ``tokens`` tokens, from ``offset`` in the item and ``position`` in the
    block on."""

    digest: bytes
    offset: int
    position: int
    tokens: int


def root(scope: Scope) -> bytes:
    """Returns the 32 bytes that stand as parent of a chain's first block. Raises :class:`KeyChainError`."""
    if not isinstance(scope, Scope):
        raise KeyChainError("scope", scope, "a Scope")
    try:
        salt = b"" if scope.salt is None else scope.salt.encode()
    except UnicodeEncodeError as error:
        raise KeyChainError("scope.salt", scope.salt, "text that UTF-8 can encode") from error
    digest = hashlib.sha256(b"kvtier.scope" + struct.pack("<I", _SCOPE_VERSION))
    digest.update(struct.pack("<BQ", scope.lora_id is not None, scope.lora_id or 0))
    digest.update(struct.pack("<BI", scope.salt is not None, len(salt)) + salt)
    digest.update(struct.pack("<I", 0))
    return digest.digest()


def chain_keys(
    token_ids: TokenIds,
    tokens_per_block: int,
    scope: Scope = PLAIN,
    extra_ids: TokenIds | None = None,
    *,
    partial: bool = False,
) -> bytes:
    """Returns the keys of all full blocks of a prompt, packed: ``len(token_ids) // tokens_per_block`` x 32 bytes.

    The keys of a prefix are a prefix of the keys. ``partial``: the remaining tokens get a key of their own.

    Args:
        token_ids: integers from 0 to 2^32-1.
        extra_ids: one per token, 0 to 2^64-1, for tokens whose id alone does not identify their content (virtual tokens
            of prompt tuning); 0 = none.
    Raises: :class:`KeyChainError`, which names the argument at fault.
    """
    require_int("tokens_per_block", tokens_per_block, 1, MAX_TOKEN_ID, KeyChainError)
    tokens = np.ascontiguousarray(_as_unsigned("token_ids", token_ids, MAX_TOKEN_ID), "<u4")
    count, left = divmod(len(tokens), tokens_per_block)
    full = count * tokens_per_block
    parent = root(scope)
    extensions = _extensions(len(tokens), len(tokens) if partial else full, tokens_per_block, scope, extra_ids)
    blocks: list[bytes] = tokens[:full].view(f"V{tokens_per_block * 4}").tolist() if count else []
    if partial and left:
        blocks.append(tokens[full:].tobytes())
    for number, extension in extensions.items():
        blocks[number] += extension
    if len(blocks) > count:
        blocks[count] += _PARTIAL + struct.pack("<I", left)
    sha256 = hashlib.sha256
    return b"".join([parent := sha256(parent + block).digest() for block in blocks])


def covered_blocks(scope: Scope, tokens: int, tokens_per_block: int) -> dict[int, list[Covered]]:
    """Returns the parts of multimodal items in a prompt's first ``tokens`` tokens, by block. Raises
    :class:`KeyChainError`."""
    found: dict[int, list[Covered]] = {}
    free = 0
    for number, item in enumerate(scope.multimodal):
        field = f"scope.multimodal[{number}]"
        if len(item.digest) != DIGEST_BYTES:
            raise KeyChainError(f"{field}.digest", f"{len(item.digest)} bytes", f"{DIGEST_BYTES} bytes")
        first = require_int(f"{field}.first_token", item.first_token, free, MAX_TOKEN_ID, KeyChainError)
        end = free = first + require_int(f"{field}.tokens", item.tokens, 1, MAX_TOKEN_ID, KeyChainError)
        end = min(end, tokens)
        for block in range(first // tokens_per_block, -(-end // tokens_per_block) if first < end else 0):
            start = block * tokens_per_block
            here = max(first, start)
            count = min(end, start + tokens_per_block) - here
            found.setdefault(block, []).append(Covered(item.digest, here - first, here - start, count))
    return found


def are_distinct(keys: bytes) -> bool:
    """Whether no key occurs twice; the daemon refuses calls with duplicates. Compares parts of the keys, so distinct
    keys rarely yield False."""
    words = np.sort(np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8])
    return not bool((words[1:] == words[:-1]).any())


def token_array(token_ids: TokenIds) -> NDArray[np.uint32]:
    """Token ids as one-dimensional little-endian u32. Raises :class:`KeyChainError`."""
    return _as_unsigned("token_ids", token_ids, MAX_TOKEN_ID).astype("<u4")


def extra_id_array(extra_ids: TokenIds, tokens: int) -> NDArray[np.uint64]:
    """Extra ids as one-dimensional little-endian u64, one per token. Raises :class:`KeyChainError`."""
    ids = _as_unsigned("extra_ids", extra_ids, MAX_EXTRA_ID).astype("<u8")
    if len(ids) != tokens:
        raise KeyChainError("extra_ids", f"{len(ids)} ids", f"{tokens}, one a token")
    return ids


def _extensions(
    tokens: int, counted: int, tokens_per_block: int, scope: Scope, extra_ids: TokenIds | None
) -> dict[int, bytes]:
    """Returns the extensions by block. ``counted``: number of tokens in blocks."""
    covered = covered_blocks(scope, counted, tokens_per_block) if scope.multimodal else {}
    extra: dict[int, bytes] = {}
    if extra_ids is not None:
        ids = extra_id_array(extra_ids, tokens)[:counted]
        blocks = np.unique(np.flatnonzero(ids) // tokens_per_block).tolist()
        extra = {block: ids[block * tokens_per_block : (block + 1) * tokens_per_block].tobytes() for block in blocks}
    return {
        block: _EXTENSION
        + struct.pack("<B", block in extra)
        + extra.get(block, b"")
        + struct.pack("<I", len(covered.get(block, ())))
        + b"".join(
            part.digest + struct.pack("<QII", part.offset, part.position, part.tokens)
            for part in covered.get(block, ())
        )
        for block in covered.keys() | extra.keys()
    }


def _as_unsigned(field: str, values: TokenIds, most: int) -> NDArray[np.integer[Any]]:
    try:
        ids = np.asarray(values)
    except ValueError as error:  # sequences of unequal length
        raise KeyChainError(field, values, "one-dimensional, of integers") from error
    if ids.ndim != 1:
        shown = f"{ids.ndim} dimensions" if ids.ndim else values
        raise KeyChainError(field, shown, "one-dimensional, of integers")
    if ids.size == 0:
        return np.empty(0, dtype=np.uint64)
    if ids.dtype.kind not in "iu":
        # Floats, bools, integers too large for numpy, and small integers in one list with integers from 2^63 on.
        _refuse_first_bad(field, ids.tolist() if isinstance(values, np.ndarray) else values, most)
        return np.array(values, dtype=np.uint64)
    if (ids.dtype.kind == "i" and ids.min() < 0) or ids.max() > most:
        _refuse_first_bad(field, ids.tolist(), most)
    return ids


def _refuse_first_bad(field: str, values: Sequence[object], most: int) -> None:
    for index, value in enumerate(values):
        require_int(f"{field}[{index}]", value, 0, most, KeyChainError)
