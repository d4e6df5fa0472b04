"""What each window group gets of a tier's budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.service.budgets import REFERENCE_TOKENS, least_bytes, split

TPB = 16


def spec(*groups: tuple[int, int]) -> CacheSpec:
    """Groups of (window in tokens, pages a slot)."""
    made = CacheSpec(
        "m", "uint8", TPB, groups=tuple(WindowGroupSpec(w, (PoolSpec(pages, 1, 256),)) for w, pages in groups)
    )
    made.validate()
    return made


def kept(window: int, blocks: int) -> int:
    """Blocks of a sequence that a group keeps, from the definition: those with a token in the window, and one more."""
    return blocks if not window else min(blocks, -(-window // TPB) + 1)


specs = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(1, 50_000)), st.integers(1, 9)),
    min_size=1,
    max_size=4,
    unique_by=lambda group: group[0],
).map(lambda groups: spec(*groups))


def test_one_group_gets_all() -> None:
    one = spec((0, 2))
    assert split(one, 10 * one.record_bytes(0) + 1) == (10,)


def test_a_sliding_group_gets_no_more_than_a_sequence_keeps() -> None:
    """gpt-oss-like: layers alternate between full attention and a window of 128 tokens."""
    both = spec((0, 3), (128, 3))
    each = both.record_bytes(0)
    assert split(both, (100 + 9) * each) == (100, 9)


def test_beyond_the_reference_every_group_holds_as_many_sequences() -> None:
    both = spec((0, 1), (1024, 2))
    blocks = REFERENCE_TOKENS // TPB
    one = blocks * both.record_bytes(0) + 65 * both.record_bytes(1)
    assert split(both, one) == (blocks, 65)
    assert split(both, 7 * one) == (7 * blocks, 7 * 65)


@given(specs, st.integers(0, 1 << 34))
def test_a_budget_is_used_up_and_not_passed(cache: CacheSpec, over: int) -> None:
    budget = least_bytes(cache) + over
    slots = split(cache, budget)
    assert min(slots) >= 1
    rest = budget - sum(count * cache.record_bytes(group) for group, count in enumerate(slots))
    assert 0 <= rest < min(cache.record_bytes(group) for group in range(len(cache.groups)))


@given(specs, st.integers(1, REFERENCE_TOKENS // TPB))
def test_what_holds_a_sequence_holds_it_in_every_group(cache: CacheSpec, blocks: int) -> None:
    needs = [kept(group.window_tokens, blocks) for group in cache.groups]
    budget = sum(count * cache.record_bytes(group) for group, count in enumerate(needs))
    assert all(has >= need for has, need in zip(split(cache, budget), needs, strict=True))


@given(specs, st.integers(1, 20))
def test_in_a_large_budget_groups_run_out_together(cache: CacheSpec, times: int) -> None:
    needs = [kept(group.window_tokens, REFERENCE_TOKENS // TPB) for group in cache.groups]
    budget = times * sum(count * cache.record_bytes(group) for group, count in enumerate(needs))
    assert split(cache, budget) == tuple(times * count for count in needs)


def test_less_than_a_slot_for_each_group_is_an_error() -> None:
    both = spec((0, 1), (64, 1))
    with pytest.raises(ValueError, match="at least"):
        split(both, least_bytes(both) - 1)
