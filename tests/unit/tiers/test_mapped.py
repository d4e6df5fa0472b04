"""Slots in mapped memory: each has bytes of its own, poison spoils one, and a view outlives its arena."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtierd.core.ids import SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes, MemoryStore
from kvtierd.tiers.mapped import StandInDevice
from tests.unit.tiers.arena_helpers import GROUP, POOL_BYTES, make_arena

SLOTS = {Tier.DEVICE: 4, Tier.HOST: 6}


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = make_arena("stores")
    yield arena
    arena.close()


def block(seed: int) -> list[Bytes]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size, dtype=np.uint8) for size in POOL_BYTES]


def write(store: MemoryStore, slot: int, parts: Sequence[Bytes]) -> None:
    for target, part in zip(store.parts(GROUP, SlotId(slot)), parts, strict=True):
        np.copyto(target, part)


def reads_as(store: MemoryStore, slot: int, parts: Sequence[Bytes]) -> bool:
    return all(map(np.array_equal, store.parts(GROUP, SlotId(slot)), parts))


def test_a_freed_and_poisoned_slot_reads_wrong_in_every_part(arena: Arena) -> None:
    """The stand-in's purpose: a reader that kept a view past its lease must not find the old block in any part."""
    store = StandInDevice(arena)
    for slot in range(SLOTS[Tier.DEVICE]):
        write(store, slot, block(slot))
    kept = store.parts(GROUP, SlotId(1))
    store.poison(GROUP, SlotId(1))
    large, small = block(1)
    assert (kept[0][:4096] == 0xA5).all() and (kept[0][-4096:] == 0xA5).all()
    assert (kept[1] == 0xA5).all()
    assert not np.array_equal(kept[0], large) and not np.array_equal(kept[1], small)
    others = [slot for slot in range(SLOTS[Tier.DEVICE]) if slot != 1]
    assert all(reads_as(store, slot, block(slot)) for slot in others)
