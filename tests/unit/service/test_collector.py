"""The garbage collector under a daemon with many blocks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from kvtierd.service.collector import Collector

LIVING = 60_000
OLD_AT_MOST = 40_000
"""Objects that one collection of the old generation may have to look at, however many live."""


class Knot:
    """Refers to itself, so only the collector can find that nobody else does."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold(), len(gc.callbacks)
    yield
    assert (gc.get_threshold(), len(gc.callbacks)) == before


async def test_what_lives_long_is_not_looked_at_again() -> None:
    before = [[number] for number in range(4 * OLD_AT_MOST)]
    gc.collect()  # a quarter of what survives this has to be new before the interpreter collects the old ones by itself
    collector = Collector()
    collector.pause()
    collector.start()
    try:
        living: list[list[int]] = []
        most = 0
        while len(living) < LIVING:
            living.extend([len(living)] for _ in range(500))
            await asyncio.sleep(0)
            most = max(most, len(gc.get_objects(generation=2)))
        assert gc.get_freeze_count() >= LIVING
        assert most <= OLD_AT_MOST
    finally:
        collector.stop()
    assert gc.get_freeze_count() == 0
    assert len(before) == 4 * OLD_AT_MOST


async def test_cycles_that_were_frozen_go_in_the_end() -> None:
    collector = Collector(frozen_calls_max=5)
    collector.pause()
    collector.start()
    try:
        knot = Knot()
        gone = weakref.ref(knot)
        gc.collect()
        await asyncio.sleep(0)  # frozen with all that lives
        del knot
        for _ in range(10):
            assert gone() is not None or collector.full_collections
            gc.collect()
            await asyncio.sleep(0)
        assert collector.full_collections
        assert gone() is None
    finally:
        collector.stop()


async def test_stopping_twice_is_nothing() -> None:
    collector = Collector()
    collector.stop()
    collector.pause()
    collector.start()
    collector.stop()
    collector.stop()
    gc.collect()
    await asyncio.sleep(0)
    assert gc.get_freeze_count() == 0
