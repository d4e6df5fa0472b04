"""The blocks of the simulated clients: trees of keys. The parent of a key never changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvtierd.core.ids import Key, Label
from tests.simulation.chooser import Chooser


def key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(4, "little")).digest())


FIRST_TOKEN: Final = bytes(4)
"""First token of every block: a block with this token alone is a prefix of every other block."""


def label_of(key: Key) -> Label | None:
    """Returns a block's label; None for some blocks. Some blocks have one token: they are partial in groups with larger
    blocks."""
    tokens = FIRST_TOKEN + (key[8:] if key[2] % 9 else b"")
    return Label(key[:8], tokens, key[:16] if key[1] % 2 else b"") if key[0] % 4 else None


def hash_of(key: Key) -> Label | None:
    """Returns the part of a block's label that a slot's record in memory keeps."""
    label = label_of(key)
    return replace(label, tokens=b"") if label is not None else None


class Forest:
    """``keys``: all keys, parents before children. ``parent``: the parent of each key, None for a root."""

    def __init__(self, parents: Sequence[int | None]) -> None:
        self.keys = tuple(key(number) for number in range(len(parents)))
        self.parent = {
            own: None if above is None else self.keys[above] for own, above in zip(self.keys, parents, strict=True)
        }
        self._chains: dict[Key, tuple[Key, ...]] = {}
        for own, above in self.parent.items():
            self._chains[own] = (*self._chains[above], own) if above is not None else (own,)

    @classmethod
    def draw(cls, choose: Chooser, size: int) -> Forest:
        """Draws some long chains with forks, like the chains of requests that share prefixes."""
        parents: list[int | None] = []
        root = 0
        for number in range(size):
            if number == 0 or choose.chance(12):
                root = number
                parents.append(None)
            else:
                parents.append(choose.between(root, number - 1) if choose.chance(30) else number - 1)
        return cls(parents)

    def chain(self, leaf: Key) -> tuple[Key, ...]:
        """Returns the chain from the root to ``leaf``."""
        return self._chains[leaf]
