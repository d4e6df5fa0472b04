"""The blocks that the simulated clients know: trees of keys, each with one parent for ever."""

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
"""All begin with it, so a block that has no other is a prefix of every other."""


def label_of(key: Key) -> Label | None:
    """What is told of a block besides its key; of some blocks nothing. Some have one token: where a block has room for
    more, these are partial."""
    tokens = FIRST_TOKEN + (key[8:] if key[2] % 9 else b"")
    return Label(key[:8], tokens, key[:16] if key[1] % 2 else b"") if key[0] % 4 else None


def hash_of(key: Key) -> Label | None:
    """As much of it as a slot's record in memory keeps."""
    label = label_of(key)
    return replace(label, tokens=b"") if label is not None else None


class Forest:
    """``keys``: all, parents before children. ``parent``: of each, None for a root."""

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
        """Some long chains with forks: what requests that share prefixes look like."""
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
        """From the root to ``leaf``."""
        return self._chains[leaf]
