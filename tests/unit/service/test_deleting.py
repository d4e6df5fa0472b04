"""Which objects of a store go by age and by use, whatever the store holds."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtierd.core.ids import GroupId, Key
from kvtierd.mover.executor import ShuttingDown
from kvtierd.service.remote.deleting import BATCH, Deleter
from kvtierd.service.remote.known import Known
from kvtierd.tiers.remote.base import Listed, RemoteStore
from kvtierd.tiers.remote.objects import Place

PLACE = Place("c", bytes(32), GroupId(0))


def name(number):
    return PLACE.name(Key(number.to_bytes(32, "big")))


class Store:
    """As far as deleting needs one: it answers at once. ``ages``: seconds, of objects of ten bytes."""

    def __init__(self, ages):
        now = time.time()
        self.objects = {name(number): Listed(name(number), 10, now - age) for number, age in enumerate(ages)}

    async def listing(self, prefix):
        for listed in list(self.objects.values()):
            yield listed

    async def delete(self, names):
        assert len(names) <= BATCH
        for each in names:
            del self.objects[each]


def deleter_of(store, known):
    return Deleter(cast("RemoteStore", store), known)


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
