import dataclasses
import hashlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.spec import DTYPE_BYTES, PAGE, CacheSpec, PoolSpec, SpecError, WindowGroupSpec, padded

LLAMA = CacheSpec.single("llama-3-8b", "bfloat16", 16, layers=32, kv_heads=8, head_size=128)

pools = st.builds(PoolSpec.opaque, st.integers(1, 1 << 20)) | st.builds(
    PoolSpec,
    layers=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    head_size=st.integers(1, 256),
    kv_factor=st.integers(1, 2),
    dtype=st.sampled_from(["", *sorted(DTYPE_BYTES)]),
)
groups = st.lists(
    st.builds(WindowGroupSpec, st.integers(0, 2**31 - 1), st.lists(pools, min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=4,
)
specs = st.builds(
    lambda model, dtype, tokens, rank, groups, identity: CacheSpec(
        model, dtype, tokens, rank, world_size=8, groups=tuple(groups), identity=identity
    ),
    model=st.text(st.characters(min_codepoint=33, max_codepoint=0x24F, categories=("L", "N", "P")), min_size=1),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    tokens=st.integers(1, 64),
    rank=st.integers(0, 7),
    groups=groups,
    identity=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["NHD", "flash"])),
).filter(lambda spec: len(spec.model.encode()) <= 256)


def with_pool(**changes):
    pool = dataclasses.replace(LLAMA.groups[0].pools[0], **changes)
    return dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=(pool,)),))


def with_group(**changes):
    return dataclasses.replace(LLAMA, groups=(dataclasses.replace(LLAMA.groups[0], **changes),))


def test_an_opaque_block_has_the_bytes_that_it_names():
    spec = with_group(pools=(PoolSpec.opaque(5000), PoolSpec.opaque(4096)))
    assert (spec.block_bytes(0), spec.record_bytes(0)) == (9096, 3 * PAGE)


def test_the_order_of_an_identity_does_not_matter():
    names = {"layout": "NHD", "backend": "flash"}
    one, other = (dataclasses.replace(LLAMA, identity=dict(pairs)) for pairs in (names.items(), [*names.items()][::-1]))
    assert one.fingerprint() == other.fingerprint() != LLAMA.fingerprint()


def test_sizes_of_a_known_model():
    assert LLAMA.pool_bytes(0, 0) == LLAMA.block_bytes(0) == LLAMA.record_bytes(0) == 2 * 1024 * 1024


def test_an_odd_block_is_sized_to_the_byte():
    """Multi-head latent attention in fp8: 61 layers of one compressed vector of 576 a token."""
    spec = CacheSpec.single("deepseek-r1", "float8_e4m3", 32, layers=61, kv_heads=1, head_size=576, kv_factor=1)
    assert spec.block_bytes(0) == 61 * 576 * 32 == 1_124_352
    assert spec.block_bytes(0) % PAGE != 0
    assert spec.record_bytes(0) == 275 * PAGE


def test_scales_are_a_pool_of_their_own_dtype():
    """4-bit KV: two values a byte, and a float8 scale for each 16 of them."""
    data = PoolSpec(32, 8, 64, dtype="uint8")
    scales = PoolSpec(32, 8, 8, dtype="float8_e4m3")
    spec = CacheSpec("m", "bfloat16", 32, groups=(WindowGroupSpec(pools=(data, scales)),))
    spec.validate()
    values = 32 * 2 * 8 * 128 * 32
    assert [spec.pool_bytes(0, pool) for pool in (0, 1)] == [values // 2, values // 16]


def test_record_pads_each_pool_on_its_own():
    small = PoolSpec(layers=1, kv_heads=1, head_size=5, kv_factor=1)
    spec = CacheSpec("m", "uint8", 1, groups=(WindowGroupSpec(pools=(small, small, small)),))
    spec.validate()
    assert spec.block_bytes(0) == 15
    assert spec.record_bytes(0) == 3 * PAGE


@given(st.integers(0, 1 << 40))
def test_padded_is_the_next_multiple(nbytes):
    assert padded(nbytes) % PAGE == 0
    assert 0 <= padded(nbytes) - nbytes < PAGE


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def counted(text):
    return u32(len(text)) + text


def test_fingerprint_is_the_documented_encoding():
    encoded = b"kvtier.cachespec" + u32(1) + counted(b"llama-3-8b") + counted(b"bfloat16")
    encoded += u32(16, 0, 1, 1) + u32(0, 1) + u32(32, 8, 128, 2)
    assert LLAMA.fingerprint() == hashlib.sha256(encoded).digest()
    # Pinned besides: disks out there carry it.
    assert LLAMA.fingerprint().hex() == "b16c9d97f72fe93351cc2ba4535c26cf0a9ab3e5001a3f2fdef8be7285d02352"


def test_fingerprint_of_pools_with_their_own_dtype_is_the_documented_encoding():
    encoded = b"kvtier.cachespec" + u32(2) + counted(b"m") + counted(b"uint8") + u32(16, 0, 1, 2)
    encoded += u32(0, 2) + u32(4, 3, 2, 1) + counted(b"uint8") + u32(4, 3, 1, 1) + counted(b"float32")
    encoded += u32(1024, 1) + u32(1, 1, 1, 2) + counted(b"uint8")
    first = WindowGroupSpec(0, (PoolSpec(4, 3, 2, 1), PoolSpec(4, 3, 1, 1, "float32")))
    spec = CacheSpec("m", "uint8", 16, groups=(first, WindowGroupSpec(1024, (PoolSpec(1, 1, 1),))))
    assert spec.fingerprint() == hashlib.sha256(encoded).digest()


def test_a_pool_that_names_the_cache_s_dtype_says_nothing_new():
    assert with_pool(dtype="bfloat16").fingerprint() == LLAMA.fingerprint()


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
        with_pool(dtype="float16"),
        dataclasses.replace(LLAMA, groups=(WindowGroupSpec(4096, LLAMA.groups[0].pools),)),
        dataclasses.replace(LLAMA, groups=(*LLAMA.groups, WindowGroupSpec(4096, LLAMA.groups[0].pools))),
        dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=LLAMA.groups[0].pools * 2),)),
        dataclasses.replace(LLAMA, groups=LLAMA.groups * 2),
        dataclasses.replace(LLAMA, identity={"layout": "NHD"}),
        with_group(flat=True),
        with_group(flat=True, window_tokens=1),
        with_group(pools=(PoolSpec.opaque(2 << 20),)),
    ],
)
def test_every_field_changes_the_fingerprint(other):
    assert other.fingerprint() != LLAMA.fingerprint()


@given(specs)
def test_json_round_trip_keeps_spec_and_fingerprint(spec):
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
        (dataclasses.replace(LLAMA, tokens_per_block=0), "tokens_per_block"),
        (dataclasses.replace(LLAMA, tokens_per_block=2**32), "tokens_per_block"),
        (dataclasses.replace(LLAMA, world_size=0), "world_size"),
        (dataclasses.replace(LLAMA, rank=1), "rank"),
        (dataclasses.replace(LLAMA, groups=()), "groups"),
        (dataclasses.replace(LLAMA, identity={"layout": ""}), "identity[layout]"),
        (dataclasses.replace(LLAMA, identity={str(name): "x" for name in range(65)}), "identity"),
        (with_group(flat=True, window_tokens=64), "groups[0].flat"),
        (with_group(sink_tokens=4), "groups[0].sink_tokens"),
        (with_pool(block_bytes=4096), "groups[0].pools[0].layers"),
        (with_group(pools=(PoolSpec.opaque((1 << 30) + 1),)), "groups[0].pools[0].block_bytes"),
        (dataclasses.replace(LLAMA, groups=LLAMA.groups * 17), "groups"),
        (dataclasses.replace(LLAMA, groups=(WindowGroupSpec(-1, LLAMA.groups[0].pools),)), "groups[0].window_tokens"),
        (dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=()),)), "groups[0].pools"),
        (dataclasses.replace(LLAMA, groups=(WindowGroupSpec(pools=LLAMA.groups[0].pools * 65),)), "groups[0].pools"),
        (with_pool(layers=0), "groups[0].pools[0].layers"),
        (with_pool(kv_heads=-1), "groups[0].pools[0].kv_heads"),
        (with_pool(head_size=0), "groups[0].pools[0].head_size"),
        (with_pool(kv_factor=3), "groups[0].pools[0].kv_factor"),
        (with_pool(dtype="fp8"), "groups[0].pools[0].dtype"),
        (with_pool(layers=4096, kv_heads=4096, head_size=65536), "groups[0]"),
    ],
)
def test_bad_specs_are_refused_by_name(spec, field):
    with pytest.raises(SpecError) as refused:
        spec.validate()
    assert refused.value.field == field
    assert refused.value.limit in str(refused.value)
    with pytest.raises(SpecError):
        spec.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(colour="blue"),
        lambda values: values.pop("dtype"),
        lambda values: values["groups"][0]["pools"][0].update(extra=1),
        lambda values: values.update(groups={"0": values["groups"][0]}),
    ],
)
def test_from_dict_is_strict(change):
    values = LLAMA.to_dict()
    change(values)
    with pytest.raises(SpecError):
        CacheSpec.from_dict(values)


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(SpecError) as refused:
        dataclasses.replace(LLAMA, model="x" * 100_000).validate()
    assert len(str(refused.value)) < 300


FULL, SLIDING, STATES, FLAT = WindowGroupSpec(), WindowGroupSpec(64), WindowGroupSpec(1), WindowGroupSpec(flat=True)


@pytest.mark.parametrize("beside", [SLIDING, STATES, FLAT])
def test_a_sequence_ends_inside_a_block_of_full_and_sliding_groups_alone(beside):
    spec = dataclasses.replace(LLAMA, groups=(FULL, beside))
    assert [spec.splits(groups) for groups in ([0], [1], [0, 1])] == [True, False, beside is SLIDING]
