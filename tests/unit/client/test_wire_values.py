"""Keys as callers give them, and values that must survive the wire."""

from collections.abc import Callable

import pytest

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.errors import DaemonError, InvalidArgument
from kvtier.retention import chain_message
from kvtier.types import Cause, EventType, Tier, fastest, tiers_of
from kvtier.v1 import common_pb2, events_pb2
from kvtier.wire import (
    budgets_to_wire,
    packed_keys,
    session_number,
    spec_to_wire,
    split_keys,
    tier_from_wire,
    tier_to_wire,
)

KEYS = [bytes([n]) * 32 for n in range(3)]


@pytest.mark.parametrize("keys", [KEYS, tuple(KEYS), iter(KEYS), b"".join(KEYS), bytearray(b"".join(KEYS))])
def test_keys_may_be_packed_or_one_by_one(keys: object) -> None:
    assert split_keys(packed_keys(keys)) == KEYS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: session_number(1 << 64), "session_id"),
        (lambda: session_number(-1), "session_id"),
        (lambda: budgets_to_wire({Tier.HOST: -1}), "budgets[host]"),
        (lambda: budgets_to_wire({Tier.HOST: [1, 1 << 64]}), "budgets[host][1]"),
        (lambda: budgets_to_wire({Tier.HOST: [1 << 63, 1 << 63]}), "budgets[host]"),
        (lambda: chain_message(b"".join(KEYS), -1, None, 16), "min_blocks"),
        (lambda: chain_message(b"".join(KEYS), 4, None, 16), "min_blocks"),
    ],
)
def test_numbers_that_no_message_holds_are_refused_by_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        make()
    assert refusal.value.field == field


def test_a_specification_survives_the_wire() -> None:
    pools = (PoolSpec(24, 8, 128), PoolSpec(8, 2, 128, kv_factor=1))
    spec = CacheSpec("llama", "bfloat16", 16, rank=1, world_size=2, groups=(WindowGroupSpec(0, pools),))
    assert CacheSpec.of(spec_to_wire(spec)) == spec
    assert CacheSpec.of(spec_to_wire(spec)).fingerprint() == spec.fingerprint()


def test_enums_are_the_wire_s() -> None:
    assert {tier.name: tier_to_wire(tier) for tier in Tier} == {
        name.removeprefix("TIER_"): value for name, value in common_pb2.Tier.items() if value
    }
    assert {cause.name: cause.value for cause in Cause} == {
        name.removeprefix("CAUSE_"): value for name, value in common_pb2.Cause.items() if value
    }
    assert {kind.name: kind.value for kind in EventType} == {
        name.removeprefix("EVENT_TYPE_"): value for name, value in events_pb2.EventType.items() if value
    }


def test_a_tier_that_this_client_does_not_know_is_the_daemon_s_fault() -> None:
    with pytest.raises(DaemonError):
        tier_from_wire(9)


def test_residency_sets_list_their_tiers_fastest_first() -> None:
    assert list(tiers_of(0b111)) == [Tier.DEVICE, Tier.HOST, Tier.DISK]
    assert fastest(Tier.HOST.bit | Tier.DISK.bit) is Tier.HOST
    assert fastest(0) is None
