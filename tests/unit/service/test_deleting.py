"""Which objects of a store go by age and by use, whatever the store holds."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtierd.core.ids import GroupId, Key, Traits
from kvtierd.mover.executor import ShuttingDown
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.remote.deleting import BATCH, Deleter
from kvtierd.service.remote.sources import Known
from kvtierd.tiers.remote.base import Listed, RemoteStore
from kvtierd.tiers.remote.objects import GroupPrefix, encode, parse

PLACE = GroupPrefix("c", bytes(32), GroupId(0))


def key(number):
    return Key(number.to_bytes(32, "big"))


def name(number):
    return PLACE.name(key(number))


class Store:
    """As far as deleting needs one: it answers at once. ``ages``: seconds, of objects of ten bytes. ``parents``: by
    number; none = no object has one."""

    def __init__(self, ages, parents=None):
        now = time.time()
        self.parents = parents or {}
        self.listed: Callable[[], None] = lambda: None
        self.objects = {name(number): Listed(name(number), 10, now - age) for number, age in enumerate(ages)}

    async def listing(self, prefix):
        for listed in list(self.objects.values()):
            yield listed
        self.listed()

    async def begins(self, names, nbytes):
        numbers = [int(found.hex(), 16) for _, found in filter(None, map(parse, names))]
        parents = [key(self.parents[number]) if number in self.parents else None for number in numbers]
        return [
            encode(PLACE, key(n), above, Traits(35), [])[:nbytes] for n, above in zip(numbers, parents, strict=True)
        ]

    async def delete(self, names):
        assert len(names) <= BATCH
        for each in names:
            del self.objects[each]


def deleter_of(store, known):
    return Deleter(cast("RemoteStore", store), known, Forgotten(Path("nothing is forgotten")))


@example([500, 100], None, 10, 1)
@given(
    st.lists(st.integers(0, 900), max_size=12),
    st.none() | st.integers(1, 900),
    st.none() | st.integers(0, 130),
    st.integers(0, 12),
)
def test_the_oldest_go_and_no_more_than_must(ages, older_than, keep, used):
    async def run():
        store, known = Store(ages), Known(time.monotonic)
        known.use(name(number) for number in range(used))
        rule: tuple[list[str], float | None, int | None] = ([], None if older_than is None else older_than + 0.5, keep)
        deleter = deleter_of(store, known)
        said = await deleter.run(*rule, dry_run=True)
        assert len(store.objects) == len(ages)
        assert await deleter.run(*rule, dry_run=False) == said
        return said, {number for number in range(len(ages)) if name(number) in store.objects}

    said, kept = asyncio.run(run())
    assert (said.kept, said.kept_bytes, said.gone) == (len(kept), 10 * len(kept), len(ages) - len(kept))
    young = {number for number, age in enumerate(ages) if older_than is None or age <= older_than}
    assert kept <= young
    if keep is None:
        assert kept == young
        return
    assert len(kept) == min(len(young), keep // 10)
    last_use = [0 if number < used else age for number, age in enumerate(ages)]
    for gone in young - kept:
        assert all(last_use[gone] > last_use[other] - 60 for other in kept), "by the minute"


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 900)), max_size=13), st.integers(0, 13))
def test_chains_go_from_their_ends(blocks, keep):
    """Each block has its parent among those before it, or is a root, and any age."""
    parents = {number: parent for number, (parent, _) in enumerate(blocks) if parent < number}
    store = Store([age for _, age in blocks], parents)
    deleter = deleter_of(store, Known(time.monotonic))
    said = asyncio.run(deleter.run([], None, 10 * keep, dry_run=False))
    kept = {number for number in range(len(blocks)) if name(number) in store.objects}
    assert (len(kept), said.gone) == (min(keep, len(blocks)), len(blocks) - len(kept))
    assert all(parents[number] in kept for number in kept if number in parents)

    def used(number):
        below = [child for child, parent in parents.items() if parent == number]
        return min([blocks[number][1], *map(used, below)])

    gone = set(range(len(blocks))) - kept
    assert all(used(one) > used(other) - 60 for one in gone for other in kept), "by the minute"


async def test_of_a_block_that_was_stored_anew_the_old_object_goes():
    """And of a listing that takes long, what was written or fetched meanwhile stays."""
    store, known = Store([100, 500, 300]), Known(time.monotonic)
    new = replace(PLACE, revision=7).name(key(1))
    store.objects[new] = Listed(new, 10, time.time())
    assert (await deleter_of(store, known).run([], None, 30, dry_run=False)).gone == 1
    assert set(store.objects) == {name(0), name(2), new}
    store.listed = lambda: known.use([name(2)])
    assert (await deleter_of(store, known).run([], None, 10, dry_run=False)).gone == 1
    assert set(store.objects) == {name(2), new}


async def test_hostile_objects_end_no_loop():
    store = Store([100] * 4, {0: 1, 1: 2, 2: 0, 3: 3})
    said = await deleter_of(store, Known(time.monotonic)).run([], None, 10, dry_run=False)
    assert (said.gone, said.kept) == (3, 1)


async def test_a_large_store_leaves_the_loop_to_others():
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await deleter_of(Store([0] * 20 * BATCH), Known(time.monotonic)).run([], 1e6, None, dry_run=True)
    task.cancel()
    assert turns >= 19


async def test_a_daemon_that_stops_deletes_no_more():
    store = Store([100] * 3 * BATCH)
    deleter = deleter_of(store, Known(time.monotonic))
    running = asyncio.create_task(deleter.run([], 1.0, None, dry_run=False))
    await asyncio.sleep(0)
    deleter.stop()
    with pytest.raises(ShuttingDown):
        await running
    assert len(store.objects) == 2 * BATCH
