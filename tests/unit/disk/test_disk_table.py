"""What a group's table says of keys and slots, and what it takes."""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import numpy as np
import pytest

from kvtierd.core.ids import Key, SlotId
from kvtierd.tiers.disk.table import GroupTable


def keys(count: int) -> list[Key]:
    return [Key(hashlib.sha256(b"%d" % number).digest()) for number in range(count)]


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 50])
def test_a_key_is_found_where_it_was_put_last_and_nowhere_once_it_is_gone(capacity: int) -> None:
    chance, table = random.Random(capacity), GroupTable(capacity)
    model: dict[Key, SlotId] = {}
    names = keys(3 * capacity)
    for _ in range(3000):
        name, slot = chance.choice(names), SlotId(chance.randrange(capacity))
        if chance.random() < 0.6:
            table.put(name, slot, bytes(16))
            model = {other: place for other, place in model.items() if place != slot} | {name: slot}
        else:
            table.discard(name)
            model.pop(name, None)
        assert [table.slot_of(name) for name in names] == [model.get(name) for name in names]
        assert len(table) == len(model)


def test_a_block_takes_few_bytes_besides_its_key() -> None:
    """As many of them as take a dictionary the most: it has just grown."""
    count = 90_000
    names, last_use = keys(count), np.arange(count, dtype=np.uint64)
    tracemalloc.start()
    table = GroupTable(count)
    table.fill(names, np.arange(count, dtype=np.uint32), np.zeros(count, "V16"), last_use)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.slot_of(names[-1]) == count - 1
    assert taken < 48 * count, "a slot's key, checksum and last use, 32 bytes, and where the key's slot stands"
