"""TensorRT-LLM's names for blocks.

Two vectors are those of TensorRT-LLM's own test of its event manager. The other pinned values come from its
``hash_v1_block_key`` (``runtime/kv_cache_hash.py``) and ``Hasher`` (``kv_cache_manager_v2/_block_radix_tree.py``).
"""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.event_hashes import HASH_BYTES, V1_BLOCK_KEY, V2_SHA256, V2_SHA256_64, event_hashes
from kvtier.abi.keys import KeyChainError, MultimodalItem, Scope

TOKENS = list(range(100, 108))
SALTED = Scope(7, "abc")
SALT_ID = 3697813978277427044
"""Of the salt "abc", by TensorRT-LLM's own test of ``get_cache_salt_id``."""

DIGEST = bytes(range(32))
IMAGE = Scope(multimodal=(MultimodalItem(DIGEST, 2, 4),))


@pytest.mark.parametrize(
    ("scope", "salt_id", "number"), [(Scope(), None, 924206229973855), (Scope(salt="any"), 123, 6280297290684427985)]
)
def test_v1_is_the_number_that_tensorrt_llm_publishes(scope, salt_id, number):
    packed = event_hashes(V1_BLOCK_KEY, [1, 2, 3, 4], 4, scope, salt_id=salt_id)
    assert int.from_bytes(packed, "big") == number


def test_v1_of_plain_tokens():
    assert event_hashes(V1_BLOCK_KEY, TOKENS, 4).hex() == "00040327bf5cef36dcfb340497509010"


def test_v1_with_lora_and_salt():
    hashes = event_hashes(V1_BLOCK_KEY, TOKENS, 4, SALTED, salt_id=SALT_ID)
    assert hashes.hex() == "c5eb150621b10bfb4431f5043ca13db6"


def test_v2_of_plain_tokens():
    assert event_hashes(V2_SHA256, TOKENS, 4).hex() == (
        "12762ae885def36a1eb66d96deb73d2646b81b5ff8b24a0cd06b03bc1f5d07c0"
        "cae9a1cdf77532b4b6ab6be294ab7be215516de555cc308daa446ce1ee3901de"
    )


def test_v2_with_lora_and_salt():
    assert event_hashes(V2_SHA256, TOKENS, 4, SALTED, salt_id=SALT_ID).hex() == (
        "6ddff1fc519de9db27756f1190bd09fd05aa535d6630cd91f9a4b091ffbc069c"
        "624938938bffe910283b4979273cd994e09cf34d6669f4833d2b8e622ef230fc"
    )


def test_v2_with_an_image_over_the_edge_of_two_blocks():
    assert event_hashes(V2_SHA256, TOKENS, 4, IMAGE, vocab_size=32000).hex() == (
        "74d55b2a8167b9be39da4e19aa4f67cb6902b43dc39c235e02c419ae09fe5ea7"
        "5782dda6b959352346eb67f0aef95ede5d58523a2a12a9391f121e4336fec689"
    )


def test_v2_is_the_documented_encoding():
    root = hashlib.sha256(b"\x03" + (7).to_bytes(8, "little") + SALT_ID.to_bytes(8, "little")).digest()
    first = hashlib.sha256(root + b"".join(t.to_bytes(4, "little") for t in TOKENS[:4])).digest()
    assert event_hashes(V2_SHA256, TOKENS[:4], 4, SALTED, salt_id=SALT_ID) == first


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_the_short_digests_begin_the_long_ones(ids, step):
    long, short = event_hashes(V2_SHA256, ids, step), event_hashes(V2_SHA256_64, ids, step)
    assert [long[start : start + 8] for start in range(0, len(long), 32)] == [
        short[start : start + 8] for start in range(0, len(short), 8)
    ]


@pytest.mark.parametrize("algorithm", HASH_BYTES)
@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=40), cut=st.integers(0, 40), step=st.integers(1, 9))
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(algorithm, ids, cut, step):
    whole = event_hashes(algorithm, ids, step)
    assert len(whole) == len(ids) // step * HASH_BYTES[algorithm]
    assert whole.startswith(event_hashes(algorithm, ids[:cut], step))


def _mix(seed, part):
    return seed ^ (part + (seed << 6) + (seed >> 2)) % 2**64


def _word(value):
    for _ in range(2):
        value = ((value >> 16) ^ value) * 0x45D9F3B % 2**32
    return ((value >> 16) ^ value) + 0x9E3779B9 & 0xFFFFFFFF


def _long(value):
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return (value ^ value >> 31) + 0x9E3779B9


@pytest.mark.parametrize("algorithm", HASH_BYTES)
def test_a_partial_block_is_hashed_over_the_tokens_that_it_has(algorithm):
    size = HASH_BYTES[algorithm]
    assert event_hashes(algorithm, TOKENS[:3], 4, partial=True) == event_hashes(algorithm, TOKENS[:3], 3)
    assert event_hashes(algorithm, TOKENS[:7], 4, partial=True)[:size] == event_hashes(algorithm, TOKENS[:7], 4)
    assert event_hashes(algorithm, TOKENS, 4, partial=True) == event_hashes(algorithm, TOKENS, 4)


def test_v1_mixes_in_items_and_extra_ids_as_documented():
    """One block of two tokens; the image covers the second, which is its third."""
    scope = Scope(9, multimodal=(MultimodalItem(DIGEST, 1, 5),))
    words = [int.from_bytes(DIGEST[start : start + 4], "little") for start in range(0, 32, 4)]

    def block(tokens, parent, place):
        seed = 2 ^ parent * 0xBF58476D1CE4E5B9 % 2**64
        for token, extra in tokens:
            seed = _mix(_mix(seed, _word(token)), _long(extra))
        seed = _mix(seed, _long(9))
        for word in words:
            seed = _mix(seed, _word(word))
        return _mix(seed, _long(place))

    first = block([(5, 0), (6, 2**64 - 1)], 0, 0)
    second = block([(7, 3), (8, 4)], first, 1)
    hashes = event_hashes(V1_BLOCK_KEY, [5, 6, 7, 8], 2, scope, [0, 2**64 - 1, 3, 4])
    assert hashes == first.to_bytes(8, "big") + second.to_bytes(8, "big")


@pytest.mark.parametrize(
    ("algorithm", "scope", "extra_ids", "salt_id", "field"),
    [
        ("sha1", Scope(), None, None, "event_hash"),
        (V1_BLOCK_KEY, Scope(salt="x"), None, None, "salt_id"),
        (V1_BLOCK_KEY, Scope(), None, 5, "salt_id"),
        (V1_BLOCK_KEY, Scope(salt="x"), None, 2**64, "salt_id"),
        (V1_BLOCK_KEY, Scope(), [1], None, "extra_ids"),
        (V2_SHA256, Scope(), [0] * 8, None, "extra_ids"),
        (V2_SHA256_64, IMAGE, None, None, "vocab_size"),
    ],
)
def test_what_cannot_be_hashed_is_refused_by_name(algorithm, scope, extra_ids, salt_id, field):
    with pytest.raises(KeyChainError) as refused:
        event_hashes(algorithm, TOKENS, 4, scope, extra_ids, salt_id=salt_id)
    assert refused.value.field == field
