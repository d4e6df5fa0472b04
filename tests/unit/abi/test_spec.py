from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.spec import DTYPE_BYTES, PAGE, CacheSpec, PoolSpec, SpecError, WindowGroupSpec, padded

LLAMA = CacheSpec.single("llama-3-8b", "bfloat16", 16, layers=32, kv_heads=8, head_size=128)

pools = st.builds(
    PoolSpec,
    layers=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    head_size=st.integers(1, 256),
    kv_factor=st.integers(1, 2),
)
specs = st.builds(
    lambda model, dtype, tokens, rank, pools: CacheSpec(
        model, dtype, tokens, rank, world_size=8, groups=(WindowGroupSpec(pools=tuple(pools)),)
    ),
    model=st.text(st.characters(min_codepoint=33, max_codepoint=0x24F, categories=("L", "N", "P")), min_size=1),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    tokens=st.integers(1, 64),
    rank=st.integers(0, 7),
    pools=st.lists(pools, min_size=1, max_size=4),
).filter(lambda spec: len(spec.model.encode()) <= 256)


def with_pool(**changes: Any) -> CacheSpec:
    pool = dataclasses.replace(LLAMA.groups[0].pools[0], **changes)
    return dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=(pool,)),))


def test_sizes_of_a_known_model() -> None:
    assert LLAMA.pool_bytes(0, 0) == LLAMA.block_bytes(0) == LLAMA.record_bytes(0) == 2 * 1024 * 1024


def test_record_pads_each_pool_on_its_own() -> None:
    small = PoolSpec(layers=1, kv_heads=1, head_size=5, kv_factor=1)
    spec = CacheSpec("m", "uint8", 1, groups=(WindowGroupSpec(pools=(small, small, small)),))
    spec.validate()
    assert spec.block_bytes(0) == 15
    assert spec.record_bytes(0) == 3 * PAGE


@given(st.integers(0, 1 << 40))
def test_padded_is_the_next_multiple(nbytes: int) -> None:
    assert padded(nbytes) % PAGE == 0
    assert 0 <= padded(nbytes) - nbytes < PAGE


def test_fingerprint_is_the_documented_encoding() -> None:
    encoded = (
        b"kvtier.cachespec"
        + struct.pack("<I", 1)
        + struct.pack("<I", 10)
        + b"llama-3-8b"
        + struct.pack("<I", 8)
        + b"bfloat16"
        + struct.pack("<4I", 16, 0, 1, 1)
        + struct.pack("<2I", 0, 1)
        + struct.pack("<4I", 32, 8, 128, 2)
    )
    assert LLAMA.fingerprint() == hashlib.sha256(encoded).digest()
    # Pinned besides: disks out there carry it.
    assert LLAMA.fingerprint().hex() == "b16c9d97f72fe93351cc2ba4535c26cf0a9ab3e5001a3f2fdef8be7285d02352"


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(LLAMA, model="llama-3-8c"),
        dataclasses.replace(LLAMA, dtype="float16"),
        dataclasses.replace(LLAMA, tokens_per_block=32),
        dataclasses.replace(LLAMA, world_size=2),
        dataclasses.replace(LLAMA, world_size=2, rank=1),
        with_pool(layers=31),
        with_pool(kv_heads=4),
        with_pool(head_size=64),
        with_pool(kv_factor=1),
        dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=LLAMA.groups[0].pools * 2),)),
    ],
)
def test_every_field_changes_the_fingerprint(other: CacheSpec) -> None:
    assert other.fingerprint() != LLAMA.fingerprint()


@given(specs)
def test_json_round_trip_keeps_spec_and_fingerprint(spec: CacheSpec) -> None:
    again = CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.fingerprint() == spec.fingerprint()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (dataclasses.replace(LLAMA, model=""), "model"),
        (dataclasses.replace(LLAMA, model="a\nb"), "model"),
        (dataclasses.replace(LLAMA, model="\ud800"), "model"),
        (dataclasses.replace(LLAMA, model="é" * 129), "model"),
        (dataclasses.replace(LLAMA, dtype="float64"), "dtype"),
        (dataclasses.replace(LLAMA, dtype=cast(Any, ["float16"])), "dtype"),
        (dataclasses.replace(LLAMA, tokens_per_block=0), "tokens_per_block"),
        (dataclasses.replace(LLAMA, tokens_per_block=-16), "tokens_per_block"),
        (dataclasses.replace(LLAMA, tokens_per_block=2**32), "tokens_per_block"),
        (dataclasses.replace(LLAMA, tokens_per_block=True), "tokens_per_block"),
        (dataclasses.replace(LLAMA, world_size=0), "world_size"),
        (dataclasses.replace(LLAMA, rank=1), "rank"),
        (dataclasses.replace(LLAMA, groups=()), "groups"),
        (dataclasses.replace(LLAMA, groups=LLAMA.groups * 2), "groups"),
        (dataclasses.replace(LLAMA, groups=(WindowGroupSpec(4096, LLAMA.groups[0].pools),)), "groups[0].window_tokens"),
        (dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=()),)), "groups[0].pools"),
        (dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=LLAMA.groups[0].pools * 65),)), "groups[0].pools"),
        (with_pool(layers=0), "groups[0].pools[0].layers"),
        (with_pool(kv_heads=-1), "groups[0].pools[0].kv_heads"),
        (with_pool(head_size=1.5), "groups[0].pools[0].head_size"),
        (with_pool(kv_factor=3), "groups[0].pools[0].kv_factor"),
        (with_pool(layers=4096, kv_heads=4096, head_size=65536), "groups[0]"),
    ],
)
def test_bad_specs_are_refused_by_name(spec: CacheSpec, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec.validate()
    assert refused.value.field == field
    assert refused.value.limit in str(refused.value)
    with pytest.raises(SpecError):
        spec.fingerprint()


@pytest.mark.parametrize("change", ["unknown", "missing", "pool", "groups"])
def test_from_dict_is_strict(change: str) -> None:
    values = LLAMA.to_dict()
    match change:
        case "unknown":
            values["colour"] = "blue"
        case "missing":
            del values["rank"]
        case "pool":
            values["groups"][0]["pools"][0]["extra"] = 1
        case "groups":
            values["groups"] = {"0": values["groups"][0]}
    with pytest.raises(SpecError):
        CacheSpec.from_dict(values)


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(SpecError) as refused:
        dataclasses.replace(LLAMA, model="x" * 100_000).validate()
    assert len(str(refused.value)) < 300
