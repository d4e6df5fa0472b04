"""A model whose keys and values are a function of what they depend on: scope, tokens up to here, layer, role, rank."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tests.trtllm.interface import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion

VOCABULARY: Final = 1000
HEADS: Final = 2
HEAD_SIZE: Final = 4
ELEMENTS: Final = HEADS * HEAD_SIZE
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)

Floats = NDArray[np.float32]
Prefixes = NDArray[np.uint64]


@dataclass(frozen=True)
class Model:
    """``windows``: a layer's attention window in tokens, the position itself included; 0 = full attention.
    ``index``: layers have a third buffer, which is the same on every rank."""

    windows: tuple[int, ...] = (0, 0, 0)
    tokens_per_block: int = 8
    index: bool = False

    @property
    def groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Each window, and the layers that have it."""
        by_window: dict[int, list[int]] = {}
        for layer, window in enumerate(self.windows):
            by_window.setdefault(window, []).append(layer)
        return tuple((window, tuple(layers)) for window, layers in by_window.items())

    @property
    def roles(self) -> tuple[str, ...]:
        return ("key", "index", "value") if self.index else ("key", "value")

    def first_block(self, window: int, position: int) -> int:
        """The first block that attention from ``position`` on reads."""
        return max(0, position - window + 1) // self.tokens_per_block if window else 0

    def values(self, prefixes: Prefixes, layer: int, role: str, rank: int) -> Floats:
        """What the layer writes for tokens with these prefixes, ``[tokens, ELEMENTS]``, none of it NaN."""
        place = f"{layer}/{role}/{'all' if role == 'index' else rank}".encode()
        lanes = np.arange(ELEMENTS, dtype=np.uint64) + np.uint64(zlib.crc32(place) << 8)
        mixed = (prefixes[:, None] ^ (lanes * _MIX)[None]) * _MIX
        return ((mixed ^ (mixed >> np.uint64(29))) * _MIX >> np.uint64(40)).astype(np.float32)


def prefixes(scope: object, tokens: Sequence[int]) -> Prefixes:
    """A number for each token that says what came before it and what it is."""
    number = zlib.crc32(repr(scope).encode())
    chain = [number := hash((number, token)) for token in tokens]
    return np.array(chain, dtype=np.int64).view(np.uint64)


class Pool:
    """One rank's KV memory. ``buffers``: for each layer and role an array of pages, tokens, and a token's numbers."""

    def __init__(self, model: Model, rank: int) -> None:
        self.model: Final = model
        self.rank: Final = rank
        self.buffers: dict[tuple[int, str], Floats] = {}

    def write(self, layer: int, pages: Sequence[int], position: int, prefixes: Prefixes) -> None:
        """The layer's keys and values of the tokens from ``position`` on; ``pages``: the sequence's, by block."""
        block, row = np.divmod(np.arange(position, position + len(prefixes)), self.model.tokens_per_block)
        for role in self.model.roles:
            buffer = self.buffers[layer, role]
            values = self.model.values(prefixes, layer, role, self.rank)
            buffer[np.array(pages)[block], row] = values.reshape(-1, *buffer.shape[2:])

    def read(self, layer: int, role: str, pages: Sequence[int], first: int, end: int) -> Floats:
        """What stands at positions ``first`` to ``end``."""
        block, row = np.divmod(np.arange(first, end), self.model.tokens_per_block)
        return self.buffers[layer, role][np.array(pages)[block], row].reshape(end - first, ELEMENTS)

    def poison(self, layers: Sequence[int], page: int) -> None:
        for layer in layers:
            for role in self.model.roles:
                self.buffers[layer, role][page] = np.nan

    def poisoned(self, layers: Sequence[int], pages: Sequence[int]) -> bool:
        """Nobody wrote a byte there since."""
        return all(
            np.isnan(self.buffers[layer, role][list(pages)]).all() for layer in layers for role in self.model.roles
        )


class FlatPool(Pool):
    """The V1 manager's: one tensor ``[blocks, layers, 2, heads * tokens * size]``."""

    def __init__(self, model: Model, rank: int, pages: int) -> None:
        super().__init__(model, rank)
        shape = (pages, len(model.windows), len(model.roles), HEADS, model.tokens_per_block, HEAD_SIZE)
        memory = np.full(shape, np.nan, np.float32)
        self.tensor: Final = torch.from_numpy(memory.reshape(*shape[:3], -1))
        for layer in range(shape[1]):
            for at, role in enumerate(model.roles):
                self.buffers[layer, role] = memory[:, layer, at].transpose(0, 2, 1, 3)


class GroupedPool(Pool):
    """The V2 manager's: a slot has all buffers of a group's layers, those of all ranks between those of one."""

    def __init__(self, model: Model, rank: int, pages: int) -> None:
        super().__init__(model, rank)
        self._memory: list[Floats] = []  # the regions are addresses only
        groups = [self._group(number, *group, pages) for number, group in enumerate(model.groups)]
        self.layout: Final = KvCacheLayout(model.tokens_per_block, tuple(groups))

    def _group(self, number: int, window: int, layers: tuple[int, ...], pages: int) -> KvCacheLayerGroupLayout:
        size = self.model.tokens_per_block * ELEMENTS
        order = [(layer, role) for layer in layers for role in self.model.roles]
        memory = np.full((pages, len(order) * size + 3), np.nan, np.float32)
        self._memory.append(memory)
        runs: dict[bool, list[tuple[int, list[tuple[int, str]]]]] = {True: [], False: []}
        for at, (layer, role) in enumerate(order):
            place = memory[:, at * size : (at + 1) * size]
            self.buffers[layer, role] = place.reshape(pages, self.model.tokens_per_block, ELEMENTS)
            kind = runs[role == "index"]
            if kind and kind[-1][0] + len(kind[-1][1]) == at:
                kind[-1][1].append((layer, role))
            else:
                kind.append((at, [(layer, role)]))
        regions = {
            kind: tuple(
                KvCacheRegion(
                    base=memory.ctypes.data + at * size * memory.itemsize,
                    size=len(run) * size * memory.itemsize,
                    stride=memory.strides[0],
                    num_slots=pages,
                    buffers=tuple(KvCacheBufferRef(*each) for each in run),
                )
                for at, run in found
            )
            for kind, found in runs.items()
        }
        return KvCacheLayerGroupLayout(number, layers, window or None, regions[False], regions[True])
