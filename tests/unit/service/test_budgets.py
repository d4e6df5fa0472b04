from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.ids import Tier
from kvtierd.service.budgets import Budgets, RememberedSlots, slot_bytes
from kvtierd.service.errors import CallRefused
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk.superblock import SUPERBLOCK

SPEC = CacheSpec("m", "uint8", 16, groups=(WindowGroupSpec(pools=(PoolSpec(1, 1, 100), PoolSpec(1, 2, 200))),))


def test_a_slot_takes_padded_parts_in_every_tier() -> None:
    assert slot_bytes(SPEC) == dict.fromkeys(Tier, 4096 + 4 * 4096)


def test_nothing_asked_means_all_that_is_left() -> None:
    each = slot_bytes(SPEC)[Tier.HOST]
    budgets = Budgets({Tier.DEVICE: 3 * each, Tier.HOST: 5 * each + 100})
    assert budgets.slots_for(SPEC, {}) == {Tier.DEVICE: 3, Tier.HOST: 5}
    budgets.take(SPEC, {Tier.DEVICE: 3, Tier.HOST: 1})
    assert budgets.slots_for(SPEC, {}) == {Tier.HOST: 4}
    budgets.take(SPEC, {Tier.HOST: 4})
    with pytest.raises(CallRefused) as refused:
        budgets.slots_for(SPEC, {})
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    budgets.give_back(SPEC, {Tier.HOST: 4})
    assert budgets.slots_for(SPEC, {}) == {Tier.HOST: 4}


def test_what_is_asked_is_given_in_whole_slots() -> None:
    each = slot_bytes(SPEC)[Tier.HOST]
    budgets = Budgets({Tier.DEVICE: 3 * each, Tier.HOST: 5 * each})
    assert budgets.slots_for(SPEC, {Tier.HOST: 2 * each + 1}) == {Tier.HOST: 2}


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
        budgets.slots_for(SPEC, {Tier.HOST: size})
    assert (refused.value.code, refused.value.detail.reason) == (code, reason)
    assert budgets.left(Tier.HOST) == 1 << 20


def test_slots_are_remembered_over_a_restart(tmp_path: Path) -> None:
    RememberedSlots(tmp_path / "caches").put("one", {Tier.HOST: 3, Tier.DISK: 9})
    again = RememberedSlots(tmp_path / "caches")
    assert again.get("one") == {Tier.HOST: 3, Tier.DISK: 9}
    assert again.get("two") is None


@pytest.mark.parametrize(("stored", "left"), [({"stored"}, {"stored"}), (None, {"stored", "unmade"}), (set(), set())])
def test_caches_that_cannot_come_back_are_forgotten(tmp_path: Path, stored: set[str] | None, left: set[str]) -> None:
    """Without a disk tier nobody can tell which of those with disk slots are there."""
    remembered = RememberedSlots(tmp_path)
    remembered.put("stored", {Tier.DEVICE: 1, Tier.DISK: 9})
    remembered.put("unmade", {Tier.DEVICE: 1, Tier.DISK: 9})
    remembered.put("volatile", {Tier.DEVICE: 1, Tier.HOST: 9})
    assert remembered.names == {"stored", "unmade", "volatile"}
    remembered.forget_gone(stored)
    assert RememberedSlots(tmp_path).names == left


def test_damaged_memory_is_refused(tmp_path: Path) -> None:
    RememberedSlots(tmp_path).put("one", {Tier.HOST: 3})
    (tmp_path / SUPERBLOCK).write_bytes((tmp_path / SUPERBLOCK).read_bytes().replace(b"3", b"4"))
    with pytest.raises(DamagedDirectory):
        RememberedSlots(tmp_path)
