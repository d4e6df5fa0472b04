"""What a block holds of its prompt, as events tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvtier.abi.keys import KEY_BYTES


@dataclass(slots=True, frozen=True)
class BlockTokens:
    """What a block holds of its prompt. ``extra_ids``: one a token; None = no token has one.

    ``items``: digest, 32 bytes, and the place in the item of its first token in the block, of each multimodal item that
    covers it.
    """

    token_ids: tuple[int, ...]
    extra_ids: tuple[int, ...] | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    items: tuple[tuple[bytes, int], ...] = ()

    @classmethod
    def unpacked(
        cls,
        token_ids: bytes,
        extra_ids: bytes,
        lora_id: int | None,
        cache_salt: str | None,
        digests: bytes,
        offsets: Iterable[int],
    ) -> Self:
        """From the wire's form: ids u32 and extra ids u64, little-endian, these perhaps none; digests one after
        another. Raises ValueError where digests and offsets are not of one number."""
        items = (digests[place : place + KEY_BYTES] for place in range(0, len(digests), KEY_BYTES))
        return cls(
            token_ids=tuple(np.frombuffer(token_ids, "<u4").tolist()),
            extra_ids=tuple(np.frombuffer(extra_ids, "<u8").tolist()) if extra_ids else None,
            lora_id=lora_id,
            cache_salt=cache_salt,
            items=tuple(zip(items, offsets, strict=True)),
        )
