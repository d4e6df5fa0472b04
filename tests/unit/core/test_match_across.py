"""The longest prefix that all groups can serve, against an oracle that follows the definition word by word."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kvtierd.core.errors import BadArgument
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, GroupId, Key
from kvtierd.core.manager import BlockManager
from kvtierd.core.policy import GroupShape
from kvtierd.core.transfers import AcrossMatch, CommitItem
from tests.unit.core.bench import ALICE, HOST, key

CHAIN: list[Key] = [key(f"block {n}") for n in range(24)]


@dataclass(frozen=True)
class Held:
    """A group: its window in tokens (0 = full attention) and which blocks of the chain it has."""

    window: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Case:
    tokens_per_block: int
    groups: tuple[Held, ...]


def needed(window: int, tokens_per_block: int, blocks: int) -> list[int]:
    """Blocks with a token that attention over a prefix of so many blocks looks at."""
    tokens = blocks * tokens_per_block
    seen = range(max(0, tokens - window), tokens) if window else range(tokens)
    return sorted({token // tokens_per_block for token in seen})


def oracle(case: Case) -> int:
    return max(
        blocks
        for blocks in range(len(CHAIN) + 1)
        if all(group.blocks.issuperset(needed(group.window, case.tokens_per_block, blocks)) for group in case.groups)
    )


def build(case: Case) -> BlockManager:
    shapes = [
        GroupShape(GroupId(number), {HOST: len(CHAIN)}, {HOST: 4096}, group.window, case.tokens_per_block)
        for number, group in enumerate(case.groups)
    ]
    core = BlockManager(CacheId(1), shapes, EventSequencer())
    for shape, group in zip(shapes, case.groups, strict=True):
        _, outcome = core.reserve(ALICE, shape.group, HOST, len(CHAIN), 0)
        (grant,) = outcome.grants
        assert grant.lease is not None
        items = [
            CommitItem(slot, CHAIN[n], CHAIN[n - 1] if n else None, 35)
            for slot, n in zip(grant.slots, sorted(group.blocks), strict=False)
        ]
        if items:
            core.commit(ALICE, grant.lease, items, 0)
        core.release(ALICE, [grant.lease], 0)
    return core


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens_per_block = draw(st.integers(1, 5))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        window = draw(st.just(0) | st.integers(1, 30))
        if window:
            holes = draw(st.sets(st.integers(0, len(CHAIN) - 1), max_size=8))
            blocks = frozenset(range(draw(st.integers(0, len(CHAIN))))) - holes
        else:
            blocks = frozenset(range(draw(st.integers(0, len(CHAIN)))))
        groups.append(Held(window, blocks))
    return Case(tokens_per_block, tuple(groups))


@given(cases())
@example(Case(4, (Held(0, frozenset(range(9))), Held(9, frozenset({2, 3, 4, 6, 7, 8})))))
@example(Case(1, (Held(3, frozenset(range(20)) - {10}), Held(5, frozenset(range(20)) - {6}))))
def test_a_match_is_what_the_definition_says(case: Case) -> None:
    match = build(case).match_across(CHAIN)
    assert match.blocks == oracle(case)
    for group, span in zip(case.groups, match.groups, strict=True):
        covered = list(range(span.first_block, span.first_block + len(span.residency)))
        assert covered == needed(group.window, case.tokens_per_block, match.blocks)
        assert set(span.residency) <= {HOST.bit}


def test_a_match_is_not_the_least_of_separate_ones() -> None:
    """The sliding group lacks the root, so alone it matches nothing; together they serve all that the full one has."""
    core = build(Case(1, (Held(0, frozenset(range(10))), Held(4, frozenset(range(6, 20))))))
    assert core.match(GroupId(1), CHAIN).blocks == 0
    assert core.match_across(CHAIN).blocks == 10


def test_an_empty_chain_matches_nothing() -> None:
    core = build(Case(2, (Held(0, frozenset()), Held(3, frozenset({5})))))
    match = core.match_across([])
    assert isinstance(match, AcrossMatch)
    assert (match.blocks, [span.residency for span in match.groups]) == (0, [(), ()])


def test_groups_agree_on_what_a_block_is() -> None:
    shapes = [GroupShape(GroupId(n), {HOST: 1}, {HOST: 4096}, 0, tokens) for n, tokens in ((0, 16), (1, 32))]
    with pytest.raises(BadArgument, match="tokens_per_block"):
        BlockManager(CacheId(1), shapes, EventSequencer())


def test_a_match_looks_at_every_block_of_a_group_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes in two groups take turns to push the answer down, one block at a time."""
    odd, even = (frozenset(range(first, len(CHAIN), 2)) for first in (0, 1))
    core = build(Case(1, (Held(2, odd), Held(2, even), Held(0, frozenset(range(len(CHAIN)))))))
    looked = 0
    for window in core.windows.values():
        index = window.state.index
        get = index.get

        def counted(key: Key, get: object = get) -> object:
            nonlocal looked
            looked += 1
            assert callable(get)
            return get(key)

        monkeypatch.setattr(window.state, "index", type("Counted", (), {"get": staticmethod(counted)})())
    assert core.match_across(CHAIN).blocks == 0
    assert looked <= len(core.windows) * len(CHAIN)
