from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.config.keys import Share
from kvtierd.core.ids import Tier
from kvtierd.service import budgets
from kvtierd.service.budgets import (
    REFERENCE_TOKENS,
    Budgets,
    PastOptions,
    RememberedSlots,
    TierBudget,
    least_bytes,
    split,
    tier_bytes,
)
from kvtierd.service.errors import CallRefused
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk.superblock import write_superblock

SPEC = CacheSpec("m", "uint8", 16, groups=(WindowGroupSpec(pools=(PoolSpec(1, 1, 100), PoolSpec(1, 2, 200))),))
EACH = SPEC.record_bytes(0)

WINDOWS = CacheSpec(
    "m",
    "uint8",
    16,
    groups=(
        WindowGroupSpec(0, (PoolSpec(1, 1, 128),)),  # a page a slot
        WindowGroupSpec(100, (PoolSpec(2, 1, 128),)),  # two pages, seven blocks cover the window
    ),
)
PAGE, TWO = WINDOWS.record_bytes(0), WINDOWS.record_bytes(1)


def test_a_slot_takes_padded_parts_in_every_tier() -> None:
    assert tier_bytes(SPEC, (3,)) == 3 * (4096 + 4 * 4096)
    assert tier_bytes(WINDOWS, (3, 2)) == 3 * 4096 + 2 * 8192


def test_a_share_of_all_is_what_is_left() -> None:
    budgets = Budgets({Tier.DEVICE: 3 * EACH, Tier.HOST: 5 * EACH + 100})
    assert budgets.slots_for(SPEC, {}) == {Tier.DEVICE: (3,), Tier.HOST: (5,)}
    budgets.take("one", SPEC, {Tier.DEVICE: (3,), Tier.HOST: (1,)})
    assert budgets.slots_for(SPEC, {}) == {Tier.HOST: (4,)}
    budgets.take("two", SPEC, {Tier.HOST: (4,)})
    with pytest.raises(CallRefused) as refused:
        budgets.slots_for(SPEC, {})
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    budgets.give_back("two", {Tier.HOST: (4,)})
    assert budgets.slots_for(SPEC, {}) == {Tier.HOST: (4,)}


def test_nothing_asked_means_the_default_share_of_the_size_and_never_less_than_a_slot() -> None:
    budgets = Budgets({Tier.DEVICE: 3 * EACH, Tier.HOST: 16 * EACH + 100}, default=Share(0.25))
    assert budgets.slots_for(SPEC, {}) == {Tier.DEVICE: (1,), Tier.HOST: (4,)}
    budgets.take("one", SPEC, {Tier.DEVICE: (3,), Tier.HOST: (4,)})
    assert budgets.slots_for(SPEC, {}) == {Tier.HOST: (4,)}
    budgets.take("two", SPEC, {Tier.HOST: (10,)})
    assert budgets.slots_for(SPEC, {}) == {Tier.HOST: (2,)}


def test_a_tier_without_a_slot_for_each_group_is_not_given() -> None:
    budgets = Budgets({Tier.DEVICE: PAGE + TWO - 1, Tier.HOST: PAGE + TWO})
    assert budgets.slots_for(WINDOWS, {}) == {Tier.HOST: (1, 1)}


def test_what_is_asked_is_given_in_whole_slots() -> None:
    budgets = Budgets({Tier.DEVICE: 3 * EACH, Tier.HOST: 5 * EACH})
    assert budgets.slots_for(SPEC, {Tier.HOST: TierBudget(2 * EACH + 1)}) == {Tier.HOST: (2,)}


@pytest.mark.parametrize(
    ("by_hand", "field"),
    [
        ((1 << 19,), "budgets[host].group_bytes"),
        ((1 << 19, 1 << 18, 1 << 18), "budgets[host].group_bytes"),
        ((1 << 19, (1 << 19) + 1), "budgets[host].group_bytes"),
        ((1 << 19, TWO - 1), "budgets[host].group_bytes[1]"),
        ((0, 1 << 19), "budgets[host].group_bytes[0]"),
    ],
)
def test_shares_by_hand_that_cannot_be(by_hand: tuple[int, ...], field: str) -> None:
    with pytest.raises(CallRefused) as refused:
        Budgets({Tier.HOST: 1 << 20}).slots_for(WINDOWS, {Tier.HOST: TierBudget(1 << 20, by_hand)})
    assert (refused.value.code, refused.value.detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("size", "code", "reason"),
    [
        (0, grpc.StatusCode.INVALID_ARGUMENT, "BAD_ARGUMENT"),
        (100, grpc.StatusCode.INVALID_ARGUMENT, "BAD_ARGUMENT"),
        (1 << 30, grpc.StatusCode.RESOURCE_EXHAUSTED, "TIER_FULL"),
        (2**64 - 1, grpc.StatusCode.RESOURCE_EXHAUSTED, "TIER_FULL"),
    ],
)
def test_budgets_that_cannot_be_given(size: int, code: grpc.StatusCode, reason: str) -> None:
    budgets = Budgets({Tier.HOST: 1 << 20})
    with pytest.raises(CallRefused) as refused:
        budgets.slots_for(SPEC, {Tier.HOST: TierBudget(size)})
    assert (refused.value.code, refused.value.detail.reason) == (code, reason)
    assert budgets.left(Tier.HOST) == 1 << 20


def test_slots_remembered_by_a_later_daemon_are_refused(tmp_path: Path) -> None:
    write_superblock(tmp_path, "budgets", {"version": 4, "caches": {}})
    with pytest.raises(DamagedDirectory, match="version 4"):
        RememberedSlots(tmp_path)


@pytest.mark.parametrize(("stored", "left"), [({"stored"}, {"stored"}), (None, {"stored", "unmade"}), (set(), set())])
def test_caches_that_cannot_come_back_are_forgotten(tmp_path: Path, stored: set[str] | None, left: set[str]) -> None:
    """Without a disk tier nobody can tell which of those with disk slots are there."""
    remembered = RememberedSlots(tmp_path)
    remembered.put("stored", {Tier.DEVICE: (1,), Tier.DISK: (9,)})
    remembered.put("unmade", {Tier.DEVICE: (1,), Tier.DISK: (9,)})
    remembered.put("volatile", {Tier.DEVICE: (1,), Tier.HOST: (9,)})
    assert remembered.names == {"stored", "unmade", "volatile"}
    remembered.put("kept", {Tier.HOST: (9,)}, device="GPU-1")
    remembered.forget_gone(stored, {"kept"})
    again = RememberedSlots(tmp_path)
    assert again.names == left | {"kept"}
    assert (again.device("kept"), again.device("volatile")) == ("GPU-1", None)
    again.forget("kept")
    assert RememberedSlots(tmp_path).device("kept") is None


def test_only_the_latest_options_of_gone_caches_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MAX_PAST", 2)
    remembered = RememberedSlots(tmp_path)
    for name in "abcd":
        remembered.put(name, {Tier.HOST: (1,)}, PastOptions(name, {}))
    assert remembered.past_options("a", "a") is not None, "a cache that there is keeps its options"
    remembered.forget_gone(set())
    assert [name for name in "abcd" if remembered.past_options(name, name) is not None] == ["c", "d"]


TPB = 16


def spec(*groups: tuple[int, int]) -> CacheSpec:
    """Groups of (window in tokens, pages a slot)."""
    made = CacheSpec(
        "m", "uint8", TPB, groups=tuple(WindowGroupSpec(w, (PoolSpec(pages, 1, 256),)) for w, pages in groups)
    )
    made.validate()
    return made


def kept(window: int, blocks: int) -> int:
    """Blocks of a sequence that a group keeps, from the definition: those with a token in the window, and one more; of
    states two, and one for every 4,096 tokens."""
    if window == 1:
        return min(blocks, max(2, blocks * TPB // 4096))
    return blocks if not window else min(blocks, -(-window // TPB) + 1)


specs = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(1, 50_000)), st.integers(1, 9)),
    min_size=1,
    max_size=4,
    unique_by=lambda group: group[0],
).map(lambda groups: spec(*groups))


def test_groups_of_opaque_pages_get_as_many_slots_each() -> None:
    pages = WindowGroupSpec(0, (PoolSpec.opaque(4096),)), WindowGroupSpec(64, (PoolSpec.opaque(8192),))
    assert split(CacheSpec("m", "uint8", 16, groups=pages), 30 * 12288) == (30, 30)


def test_states_get_the_bytes_that_they_need() -> None:
    """In pages of 512 tokens, each state as large as three blocks of attention: 8 of them for 64 blocks."""
    states = WindowGroupSpec(1, (PoolSpec.opaque(3 * 4096),), flat=True), WindowGroupSpec(1, (PoolSpec.opaque(4096),))
    pages = WindowGroupSpec(0, (PoolSpec.opaque(4096),), flat=True)
    assert split(CacheSpec("m", "uint8", 512, groups=(pages, *states)), 96 * 4096) == (64, 8, 8)
    assert split(CacheSpec("m", "uint8", 512, groups=(pages, *states)), 9 * 4096) == (2, 2, 1)


@given(specs, st.integers(1, 20))
def test_in_a_large_budget_groups_run_out_together(cache: CacheSpec, times: int) -> None:
    needs = [kept(group.window_tokens, REFERENCE_TOKENS // TPB) for group in cache.groups]
    budget = times * sum(count * cache.record_bytes(group) for group, count in enumerate(needs))
    assert split(cache, budget) == tuple(times * count for count in needs)


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


def test_less_than_a_slot_for_each_group_is_an_error() -> None:
    both = spec((0, 1), (64, 1))
    with pytest.raises(ValueError, match="at least"):
        split(both, least_bytes(both) - 1)
