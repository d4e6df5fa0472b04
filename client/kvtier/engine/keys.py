"""The keys of one request's blocks, which grow with its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvtier.abi.keys import KEY_BYTES, KEY_DTYPE, PLAIN, ROOT_PARENT, Scope, root, token_array
from kvtier.abi.spec import InvalidArgument


class KeyChain:
    """Keys of a request's full blocks, in the order of the blocks, from the engine's own chained hashes. A hash of 32
    bytes is the key; the key of another hash is its SHA-256."""

    def __init__(self) -> None:
        self._keys: Final = bytearray()
        self.token_ids: Callable[[int, int], Sequence[int]] | None = None
        """Returns the request's token ids ``[first, last)``, if routers may have them."""

    def extend(self, more: Any) -> int:
        """Adds hashes. Returns the new number of blocks."""
        for each in more:
            self._keys.extend(each if len(each) == KEY_BYTES else hashlib.sha256(each).digest())
        return len(self)

    def __len__(self) -> int:
        return len(self._keys) // KEY_BYTES

    @property
    def packed(self) -> bytes:
        return bytes(self._keys)

    def span(self, first: int, last: int) -> bytes:
        """Returns the keys of blocks ``[first, last)``, packed."""
        return bytes(self._keys[first * KEY_BYTES : last * KEY_BYTES])

    def key(self, block: int) -> bytes:
        return self.span(block, block + 1)

    def pick(self, blocks: Sequence[int]) -> bytes:
        """Returns the keys of these blocks, packed."""
        if blocks and blocks[-1] - blocks[0] + 1 == len(blocks):
            return self.span(blocks[0], blocks[-1] + 1)
        return np.frombuffer(self._keys, KEY_DTYPE)[blocks].tobytes() if blocks else b""

    def parent(self, block: int) -> bytes:
        """Returns the key of the block's parent; zeros for the first block's parent."""
        return self.key(block - 1) if block else ROOT_PARENT


class TokenChain(KeyChain):
    """A chain with the keys of :func:`kvtier.chain_keys`."""

    def __init__(self, tokens_per_block: int, scope: Scope = PLAIN) -> None:
        super().__init__()
        if scope.multimodal:
            limit = "none: kvtier.chain_keys knows them, a growing chain not"
            raise InvalidArgument("scope.multimodal", "items", limit)
        self._last = root(scope)
        self._width: Final = tokens_per_block * 4
        self._rest = b""
        """Bytes of the tokens in the last block, which is not full yet."""

    def extend(self, more: Any) -> int:
        """Adds token ids, without hashing earlier ones again. Returns the new number of blocks."""
        tokens = self._rest + token_array(more).tobytes()
        full = len(tokens) - len(tokens) % self._width
        for start in range(0, full, self._width):
            self._last = hashlib.sha256(self._last + tokens[start : start + self._width]).digest()
            self._keys.extend(self._last)
        self._rest = tokens[full:]
        return len(self)
