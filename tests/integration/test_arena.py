"""What a client maps: views of slots, and what a forked child has of them."""

import gc
import mmap
import signal

import numpy as np
import pytest

from kvtier import Tier
from kvtier.arena import MappedArena
from tests.forking import in_child
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.raw import close_all
from tests.integration.touching import bytes_in

KEYS = chain("mapped", 2)
SLOTS = 4


async def test_rows_are_handed_out_one_by_one_and_reshape_without_a_copy(client, name):
    """All rows of a pool are apart by a stride: numpy reshapes such an array into a copy, and writes to it are lost."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=SLOTS))
    async with cache.reserve(2) as lease:
        for index, stored in enumerate(blocks(KEYS)):
            parts = lease.view(index)
            split = np.split(stored, np.cumsum([part.nbytes for part in parts])[:-1])
            for part, data in zip(parts, split, strict=True):
                part.reshape(2, -1)[:] = data.reshape(2, -1)
        await lease.commit(KEYS)
    assert_bytes(KEYS, await cache.get(KEYS))
    handed_out = [getattr(cache.arena, each) for each in dir(cache.arena) if not each.startswith("_")]
    assert not [each for each in handed_out if isinstance(each, np.ndarray)]
    assert not hasattr(cache.arena, "pools")


@pytest.fixture
async def arenas(raw, name):
    """A writer's and a reader's, in a list: the only references to them."""
    cache_id = (await raw.open(name, budgets=sizes(host=SLOTS))).cache_id
    made = []
    for write in (True, False):
        fds = raw.socket.map(cache_id, write=write)
        made.append(MappedArena(fds, write=write, spec=SPEC))
        close_all(fds)
    return made


def test_a_forked_child_writes_into_nobodys_slots(arenas):
    """Its parent's may be somebody else's by then. It may read what the parent mapped to be read."""
    mine, read = (arena.view(Tier.HOST, 0, 0, write=arena.writable) for arena in arenas)
    mine[0][:] = 7

    def write():
        mine[0][:] = 8
        return 0

    def write_among_new_memory():
        kept = [mmap.mmap(-1, mmap.PAGESIZE << shift) for shift in range(12) for _ in range(4)]
        return write() + len(kept)

    assert in_child(write) == -signal.SIGSEGV
    assert in_child(write_among_new_memory) == -signal.SIGSEGV
    assert in_child(lambda: int(len(bytes_in(read)) != BLOCK_BYTES or (read[0] != 7).any())) == 0
    assert (mine[0] == 7).all()


def test_a_forked_child_that_drops_what_its_parent_mapped_loses_no_memory_of_its_own(arenas):
    gc.collect()

    def drop():
        new = [mmap.mmap(-1, mmap.PAGESIZE << shift) for shift in range(12) for _ in range(4)]
        arenas.clear()
        for each in new:
            each[:] = b"\1" * len(each)
        return 0

    assert in_child(drop) == 0
    assert arenas[0].view(Tier.HOST, 0, 0, write=True)
