"""A block as an object: it comes back whole, or is told to be bad."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtierd.core.ids import CHECKSUM_BYTES, EVENT_HASH_BYTES, TOKEN_BYTES, GroupId, Key, Label, Traits
from kvtierd.tiers.remote.objects import (
    LINK_BYTES,
    BadObject,
    GroupPrefix,
    OtherObjectVersion,
    decode,
    encode,
    object_bytes,
    parent_in,
    parse,
)

keys = st.binary(min_size=32, max_size=32).map(Key)
places = st.builds(
    GroupPrefix,
    st.sampled_from(["a", "cache-7"]),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 1000).map(GroupId),
    st.just(0) | st.integers(1, 2**63),
)
parts = st.lists(st.binary(max_size=500).map(lambda data: np.frombuffer(data, np.uint8)), min_size=1, max_size=4)
labels = st.builds(
    Label,
    event_hash=st.sampled_from([bytes(range(nbytes)) for nbytes in EVENT_HASH_BYTES]),
    tokens=st.binary(max_size=40).map(lambda data: data * TOKEN_BYTES),
    checksum=st.sampled_from([b"", bytes(range(CHECKSUM_BYTES))]),
    scope=st.binary(max_size=50),
)
traits = st.builds(
    Traits,
    st.integers(0, 100),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.none()
    | labels.filter(lambda label: label != Label() and (label.tokens or not label.scope)),  # a scope is theirs
)


@given(places, keys, st.none() | keys, traits, parts)
def test_a_block_comes_back_with_all_that_is_known_of_it(
    place: GroupPrefix, key: Key, parent: Key | None, known: Traits, written: list[NDArray[np.uint8]]
) -> None:
    whole = encode(place, key, parent, known, written)
    payload_bytes = sum(len(part) for part in written)
    assert len(whole) <= object_bytes(payload_bytes)
    *remembered, payload = decode(place, key, payload_bytes, memoryview(whole))
    assert remembered == [parent, known]
    assert payload == b"".join(part.tobytes() for part in written)
    assert parent_in(whole[:LINK_BYTES]) == parent
    assert parse(place.name(key)) == (place, key)


@given(places, keys, st.none() | keys, traits, parts, st.data())
def test_an_object_that_is_not_whole_is_bad(
    place: GroupPrefix,
    key: Key,
    parent: Key | None,
    known: Traits,
    written: list[NDArray[np.uint8]],
    data: st.DataObject,
) -> None:
    whole = encode(place, key, parent, known, written)
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (flipped, whole[: data.draw(st.integers(0, len(whole) - 1))], whole + data.draw(st.binary(min_size=1))):
        with pytest.raises((BadObject, OtherObjectVersion)):  # a flipped bit may be one of the version
            decode(place, key, sum(len(part) for part in written), memoryview(bad))


@given(places, keys, places, keys, parts)
def test_the_object_of_another_name_is_bad(
    place: GroupPrefix, key: Key, other: GroupPrefix, other_key: Key, written: list[NDArray[np.uint8]]
) -> None:
    payload_bytes = sum(len(part) for part in written)
    whole = memoryview(encode(place, key, None, Traits(35), written))
    if (place.fingerprint, place.group, key) != (other.fingerprint, other.group, other_key):
        with pytest.raises(BadObject):
            decode(other, other_key, payload_bytes, whole)
    with pytest.raises(BadObject):
        decode(place, key, payload_bytes + 1, whole)


@given(places, keys, st.binary(max_size=400), st.integers(0, 200))
def test_any_bytes_are_bad(place: GroupPrefix, key: Key, found: bytes, payload_bytes: int) -> None:
    with pytest.raises(BadObject):
        decode(place, key, payload_bytes, memoryview(found))


@given(places, keys)
def test_a_name_is_short_ascii_below_its_prefix(place: GroupPrefix, key: Key) -> None:
    name = place.name(key)
    assert name.startswith(place.prefix)
    assert name.rpartition("/")[2].partition(".")[0] == key.hex()
    assert name.isascii()
    assert len(name) <= 512
