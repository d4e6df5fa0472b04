"""What the key index says of chains, against the definition and against what the core answers."""

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.key_index import IndexReader
from kvtier.abi.keys import are_distinct
from kvtier.abi.layout import HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.chains import Chains
from kvtier.types import Cursor
from kvtierd.core.ids import EventId, GroupId, Key, SlotId, Tier
from kvtierd.tiers.key_index import IndexedBlocks, KeyIndex
from tests.unit.client.windows import (
    FLAT,
    FULL,
    KEYS,
    LENGTH,
    PACKED,
    SINKS,
    TOKENS,
    WINDOWS,
    holdings,
    longest,
    needed,
)

POOLS: Final = (PoolSpec(1, 1, 8),)
SPEC: Final = CacheSpec("m", "uint8", TOKENS, groups=tuple(map(WindowGroupSpec, WINDOWS, repeat(POOLS), FLAT, SINKS)))


class Index:
    """The blocks of one chain, by group, in an index as the daemon writes it."""

    def __init__(self, held: Sequence[set[int]], slots: int = 4 * LENGTH) -> None:
        self.held = held
        layout = ArenaLayout.plan(SPEC, {(0, HOST): slots}, indexed=True)
        self.control = np.zeros(layout.control_bytes, np.uint8)
        identity = ArenaIdentity(SPEC.fingerprint(), epoch=3, boot=3, pid=1)
        layout.initialise(self.control, identity, bytes(range(32)))
        self.writer = KeyIndex(layout, self.control, epoch=3)
        for group, places in enumerate(held):
            for place in places:
                self.put(group, place, Tier.HOST.bit)
        self.writer.show(EventId(17))
        self.chains = Chains(IndexReader(layout, self.control), SPEC)

    def put(self, group: int, place: int, residency: int) -> None:
        key = Key(KEYS[place])
        at = {key: (SlotId(place), 2 * place + 2)}
        self.writer.put(IndexedBlocks(GroupId(group), {key: residency}, at if residency else {}))

    @property
    def unindexed(self) -> int:
        return int(self.control[4048:4056].view("<u8")[0])


@settings(deadline=None)
@given(held=holdings, length=st.integers(0, LENGTH))
def test_lookups_answer_as_defined(held: tuple[set[int], ...], length: int) -> None:
    index = Index(held)
    packed = PACKED[: length * 32]
    for group in range(len(WINDOWS)):
        expected = longest({group: held[group]}, length)
        assert index.chains.prefix_length(packed, [group]) == expected
        match = index.chains.match(packed, [group])
        assert match is not None
        wanted = needed(group, expected)
        residency = bytes(Tier.HOST.bit if place in wanted else 0 for place in range(expected))
        assert (match.blocks, match.residency, match.as_of) == (expected, residency, Cursor(3, 17))
        places = index.chains.locate(packed, group)
        assert places is not None
        assert [place.host_slot for place in places] == [n if n in held[group] else None for n in range(length)]
        assert index.chains.probe(packed, group) == bytes(place.residency for place in places)
    across = index.chains.match(packed, range(len(WINDOWS)))
    assert across is not None
    blocks = longest(dict(enumerate(held)), length)
    assert (across.blocks, across.as_of) == (blocks, Cursor(3, 17))
    for span in across.groups:
        assert {*range(span.sink_blocks), *range(span.first_block, blocks)} == needed(span.group, blocks)
        assert (span.blocks, set(span.residency)) == (blocks, {2} if blocks else set())


def test_what_has_no_place_in_the_index_cannot_be_told() -> None:
    """Two buckets for all: what is found is found, and what is not may be there."""
    index = Index([set(), *[set(range(LENGTH))] * 4], slots=5)
    assert index.unindexed > 0
    places = index.chains.find(PACKED, FULL)
    assert not places.sure.all()
    assert (places.sure == (places.residency != 0)).all()
    assert index.chains.locate(PACKED, FULL) is None
    assert index.chains.match(PACKED, range(len(WINDOWS))) is None
    for group in range(len(WINDOWS)):
        assert index.chains.prefix_length(PACKED, [group]) in (None, LENGTH)
    there = KEYS[int(np.flatnonzero(places.residency)[0])]
    assert index.chains.prefix_length(there, [FULL]) == 1
    assert index.chains.locate(there, FULL) is not None


def test_a_block_that_leaves_during_a_match_shortens_it() -> None:
    index = Index([set(), set(range(8)), set(), set(), set()])
    reader, look_up = index.chains._index, index.chains._index.find

    class Leaving:
        prefix_length = reader.prefix_length
        shown = reader.shown

        def find(self, keys: bytes, group: int) -> object:
            for place in (7, 6, 5):  # a block never outlives its parent
                index.put(FULL, place, 0)
            return look_up(keys, group)

    chains = Chains(Leaving(), SPEC)  # type: ignore[arg-type]
    match = chains.match(PACKED[: 8 * 32], [FULL])
    assert match is not None and match.blocks == 5


@pytest.mark.parametrize("count", [0, 1, 2, 512, 513, 2000])
def test_keys_are_told_apart_also_where_many_end_alike(count: int) -> None:
    words = np.random.default_rng(count).integers(0, 2**63, (count, 4), dtype=np.uint64)
    words[::2, 0] &= ~np.uint64(0xFFFF)
    assert are_distinct(words.tobytes())
    for first, second in ((0, 1), (0, 2), (1, 3), (0, count - 1), (count - 2, count - 1)):
        if 0 <= first < second < count:
            again = words.copy()
            again[second] = again[first]
            assert not are_distinct(again.tobytes())
