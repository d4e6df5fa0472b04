"""The replay's bytes: a check of them must fail wherever and however they are wrong."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.errors import InvalidArgument
from kvtier.replay.payload import Payload

BLOCK_BYTES = 4096
KEYS = st.binary(min_size=32, max_size=32)


def contents(key: bytes, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    block = np.zeros(block_bytes, dtype=np.uint8)
    Payload(block_bytes).write(key, block)
    return block


def flipped(key: bytes, bit: int) -> bytes:
    return (int.from_bytes(key, "little") ^ (1 << bit)).to_bytes(32, "little")


@given(KEYS)
def test_what_was_written_matches(key: bytes) -> None:
    assert Payload(BLOCK_BYTES).matches(key, contents(key))


def test_every_bit_of_the_key_changes_every_word() -> None:
    key = hashlib.sha256(b"some block").digest()
    mine = contents(key).view(np.uint64)
    for bit in range(256):
        others = contents(flipped(key, bit)).view(np.uint64)
        assert np.all(mine != others), f"bit {bit} of the key leaves a word as it was"


@given(KEYS, st.integers(0, 255))
def test_keys_that_differ_in_one_bit_share_almost_no_word(key: bytes, bit: int) -> None:
    mine, other = contents(key).view(np.uint64), contents(flipped(key, bit)).view(np.uint64)
    assert np.count_nonzero(mine == other) <= 1


def test_blocks_of_different_keys_do_not_resemble_each_other_at_any_shift() -> None:
    words = [contents(hashlib.sha256(bytes([n])).digest()).view(np.uint64) for n in range(8)]
    assert len(np.unique(np.concatenate(words))) == 8 * BLOCK_BYTES // 8
    for one, other in combinations(words, 2):
        assert not np.isin(one, other).any()


@given(KEYS, st.integers(0, BLOCK_BYTES - 1), st.integers(1, 255))
def test_one_wrong_byte_anywhere_is_seen(key: bytes, position: int, error: int) -> None:
    block = contents(key)
    block[position] ^= error
    assert not Payload(BLOCK_BYTES).matches(key, block)


@pytest.mark.parametrize(
    "damage",
    [
        lambda block: np.roll(block, 8),
        lambda block: np.roll(block, BLOCK_BYTES // 2),
        lambda block: np.concatenate([block[: BLOCK_BYTES // 2]] * 2),
        np.zeros_like,
        lambda block: np.concatenate([block[:-8], np.zeros(8, np.uint8)]),
    ],
    ids=["shifted by a word", "halves swapped", "first half twice", "never written", "last word missing"],
)
def test_misplaced_and_partial_blocks_are_seen(damage: object) -> None:
    key = hashlib.sha256(b"x").digest()
    assert callable(damage)
    assert not Payload(BLOCK_BYTES).matches(key, np.ascontiguousarray(damage(contents(key))))


def test_a_block_s_bytes_never_change_between_versions() -> None:
    # Disk tiers outlive releases: pinned.
    digest = hashlib.sha256(contents(bytes(range(32)), 64).tobytes()).hexdigest()
    assert digest == "7d2947faff884ecf0749ec80f9cca555718ba2f6dcbf0b0000a4ef129b14ccfd"


@pytest.mark.parametrize("block_bytes", [0, -8, 4, 12])
def test_sizes_that_are_not_whole_words_are_refused(block_bytes: int) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        Payload(block_bytes)
    assert refusal.value.field == "block_bytes"
