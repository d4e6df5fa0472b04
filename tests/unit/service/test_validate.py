from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvtierd.core.ids import Key, Tier
from kvtierd.service import validation
from kvtierd.service.errors import CallRefused

A, B = Key(b"a" * 32), Key(b"b" * 32)
HUGE = 2**64 - 1
"""What a negative number becomes in an unsigned field."""


@pytest.mark.parametrize(
    ("check", "field", "limit"),
    [
        (lambda: validation.cache_name(""), "name", "1 to 128"),
        (lambda: validation.cache_name(".hidden"), "name", "the first a letter or a digit"),
        (lambda: validation.cache_name("a/../b"), "name", "A-Z a-z 0-9 . _ -"),
        (lambda: validation.cache_name("x" * 129), "name", "1 to 128"),
        (lambda: validation.cache_name("naïve"), "name", "A-Z a-z 0-9 . _ -"),
        (lambda: validation.cache_name("line\n"), "name", "A-Z a-z 0-9 . _ -"),
        (lambda: validation.keys("keys", b""), "keys", "one or more keys of 32 bytes"),
        (lambda: validation.keys("keys", A[:31]), "keys", "one or more keys of 32 bytes"),
        (lambda: validation.keys("keys", A + B[:1]), "keys", "one or more keys of 32 bytes"),
        (lambda: validation.keys("keys", A + B + A), "keys[2]", "different from keys[0]"),
        (lambda: validation.keys("keys", A + B, max_keys=1), "keys", "at most 1 keys"),
        (lambda: validation.keys("keys", A * (validation.MAX_KEYS + 1)), "keys", f"at most {validation.MAX_KEYS} keys"),
        (lambda: validation.parents("parents", A, [A, B]), "parents", "64 bytes: one parent a key"),
        (lambda: validation.parents("parents", A, [A]), "parents[0]", "not its own parent"),
        (lambda: validation.parents("parents", b"", [A]), "parents", "32 bytes: one parent a key"),
        (lambda: validation.priorities("priorities", b"\x00\x65", 2), "priorities[1]", "0 to 100"),
        (lambda: validation.priorities("priorities", b"\x00", 2), "priorities", "2 bytes, one a key, or none"),
        (lambda: validation.tier("tier", 0, (Tier.DEVICE,)), "tier", "device"),
        (lambda: validation.tier("tier", 3, (Tier.DEVICE, Tier.HOST)), "tier", "device or host"),
        (lambda: validation.tier("tier", 17, (Tier.DEVICE,)), "tier", "device"),
        (lambda: validation.tier("tier", 1, ()), "tier", "a tier that the cache has"),
        (lambda: validation.count("count", 0, 1, 8), "count", "1 to 8"),
        (lambda: validation.count("count", HUGE, 1, 8), "count", "1 to 8"),
        (lambda: validation.timeout_s("timeout_ns", HUGE, 1.0), "timeout_ns", f"0 to {validation.MAX_TIMEOUT_NS}"),
        (lambda: validation.heartbeat_s("heartbeat_ns", 1, 1.0), "heartbeat_ns", f"{validation.MIN_HEARTBEAT_NS} to"),
    ],
)
def test_what_is_refused_says_field_value_and_limit(check: Callable[[], Any], field: str, limit: str) -> None:
    with pytest.raises(CallRefused) as refused:
        check()
    detail = refused.value.detail
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (detail.reason, detail.field) == ("BAD_ARGUMENT", field)
    assert limit in detail.limit
    assert refused.value.message == f"{field} = {detail.value}: must be {detail.limit}"


def test_what_is_accepted_comes_back_in_the_core_s_words() -> None:
    assert validation.cache_name("Llama-3.1_8B.v2") == "Llama-3.1_8B.v2"
    assert validation.keys("keys", A + B) == [A, B]
    assert validation.parents("parents", bytes(32) + A, [A, B]) == [None, A]
    assert validation.priorities("priorities", b"", 3) == bytes([35, 35, 35])
    assert validation.priorities("priorities", b"\x00\x64", 2) == b"\x00\x64"
    assert validation.tier("tier", 2, (Tier.HOST,)) is Tier.HOST
    assert validation.timeout_s("timeout_ns", 0, 7.5) == 7.5
    assert validation.timeout_s("timeout_ns", 10**9, 7.5) == 1.0
    assert validation.heartbeat_s("heartbeat_ns", 0, 7.5) == 7.5


def test_long_values_are_shortened_before_they_are_sent_back() -> None:
    with pytest.raises(CallRefused) as refused:
        validation.cache_name("x" * 100_000)
    assert len(refused.value.detail.value) <= 80
    assert len(refused.value.message) < 300
