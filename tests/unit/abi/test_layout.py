"""The arena: its header byte for byte, its layout by the documented rules, and what is refused."""

import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi import control as abi
from kvtier.abi.control import MAX_SLOTS, STATE_OFFSET, ArenaIdentity, ArenaState, Header
from kvtier.abi.layout import DEVICE, DISK, HOST, MEMORY_TIERS, ArenaLayout, first_generation, is_ready
from kvtier.abi.spec import AbiError, CacheSpec, PoolSpec, WindowGroupSpec
from tests.unit.tiers.arena_helpers import parts

MIB = 1 << 20
SEED = bytes(byte + (at % 8 == 0) for at, byte in enumerate(range(0, 64, 2)))
TWO_POOLS = CacheSpec("m", "uint8", 1, groups=(WindowGroupSpec(pools=(PoolSpec(1, 1, 3000), PoolSpec(1, 1, 50))),))
"""Pools of 6,000 and 100 bytes a block."""

pools = st.builds(
    PoolSpec,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 200),
    kv_factor=st.integers(1, 2),
    dtype=st.sampled_from(["", "uint8", "float32"]),
)
groups = st.builds(
    WindowGroupSpec,
    window_tokens=st.sampled_from([0, 64, 1000, 1024]),
    pools=st.lists(pools, min_size=1, max_size=3).map(tuple),
)


@st.composite
def layouts(draw):
    several = st.lists(groups, min_size=1, max_size=3, unique_by=lambda group: group.window_tokens)
    spec = CacheSpec("m", "float16", draw(st.integers(1, 16)), groups=tuple(draw(several)))
    spec.validate()
    places = [(group, tier) for group in range(len(spec.groups)) for tier in (DEVICE, HOST, DISK)]
    slots = draw(st.dictionaries(st.sampled_from(places), st.integers(0, 20)))
    return spec, ArenaLayout.plan(spec, slots, indexed=draw(st.booleans()))


def formatted(layout, spec):
    control = np.zeros(layout.control_bytes, dtype=np.uint8)
    layout.initialise(control, ArenaIdentity(spec.fingerprint(), epoch=3, boot=5, pid=4321), bytes(range(0, 64, 2)))
    return control


def two_pools():
    return ArenaLayout.plan(TWO_POOLS, {(0, DEVICE): 3, (0, HOST): 5, (0, DISK): 9}, indexed=True)


def documented():
    """The header's fields in the docstring: offset and struct code."""
    header, _, _ = (abi.__doc__ or "").partition("Each slot")
    codes = {"u32": "<I", "u64": "<Q", "u32 x 3 x 16": "<48I"}
    rows = re.findall(r"^ +(\d+) +(u32 x 3 x 16|u32|u64|\d+)  +(\w+)", header, re.M)
    return {name: (int(at), codes.get(kind, f"<{kind}s")) for at, kind, name in rows}


def put(control, field, value):
    at, code = documented()[field]
    struct.pack_into(code, control.data, at, value)


def sealed(control):
    """With the right sum over whatever the header says."""
    put(control, "crc", zlib.crc32(control[:296].tobytes()))
    return control


def test_the_header_is_as_documented():
    control = formatted(two_pools(), TWO_POOLS)
    found = {name: struct.unpack_from(code, control.data, at) for name, (at, code) in documented().items()}
    assert found == {
        "magic": (b"KVTARENA",),
        "abi_version": (2,),
        "indexed": (1,),
        "fingerprint": (TWO_POOLS.fingerprint(),),
        "epoch": (3,),
        "boot": (5,),
        "pid": (4321,),
        "index_seed": (SEED,),
        "slots": (3, 5, 9, *[0] * 45),
        "crc": (zlib.crc32(control[:296].tobytes()),),
        "event_epoch": (3,),
        "last_event": (0,),
        "unindexed": (0,),
        "state": (0,),
    }
    named = sum(struct.calcsize(code) for _, code in documented().values())
    assert np.count_nonzero(control[:4096]) <= named


def test_a_layout_is_as_documented():
    layout = two_pools()
    (group,) = layout.groups
    # 4096 + generations of 3 and 5 slots, owners, records, each on a 64-byte line; then 1.5 x 17 places in buckets of 8
    assert (group.generations, group.owners, group.records) == ((4096, 4160), (4224, 4288), (4352, 4928))
    assert (layout.index_offset, layout.index_bytes, layout.control_bytes) == (5888, 4 * 512, 8192)
    assert (layout.host_bytes, layout.device_bytes) == (5 * 12288, 2 * MIB + 3 * 4096)
    assert parts(layout, HOST, 0, 2) == [(2 * 12288, 6000), (2 * 12288 + 8192, 100)]
    assert parts(layout, DEVICE, 0, 2) == [(2 * 8192, 6000), (2 * MIB + 2 * 4096, 100)]
    control = formatted(layout, TWO_POOLS)
    for tier, count in ((DEVICE, 3), (HOST, 5)):
        assert layout.generations(control, tier, 0).tolist() == [(5 << 32) + 1] * count
        assert layout.owners(control, tier, 0).tolist() == [0] * count
        assert not layout.slot_records(control, tier, 0).any()


@given(layouts())
def test_reading_gives_the_plan_back(planned):
    spec, layout = planned
    control = formatted(layout, spec)
    assert ArenaLayout.read(control, spec) == layout
    assert Header.read(control, len(spec.groups)).identity == ArenaIdentity(spec.fingerprint(), 3, 5, 4321)
    assert control[STATE_OFFSET] == ArenaState.OPENING


def taken_of_control(layout):
    yield 0, 4096
    yield layout.index_offset, layout.index_bytes
    for group in layout.groups:
        for tier in MEMORY_TIERS:
            yield group.generations[tier], 8 * group.slots[tier]
            yield group.owners[tier], 8 * group.slots[tier]
            yield group.records[tier], 192 * group.slots[tier]


def assert_apart(pieces, size):
    end = 0
    for start, length in sorted(piece for piece in pieces if piece[1]):
        assert start >= end
        end = start + length
    assert end <= size


@given(layouts())
def test_nothing_overlaps_and_everything_is_aligned(planned):
    spec, layout = planned
    assert_apart(list(taken_of_control(layout)), layout.control_bytes)
    assert all(start % 64 == 0 for start, _ in taken_of_control(layout))
    assert layout.control_bytes % 4096 == 0
    for tier in MEMORY_TIERS:
        pieces = []
        for index, group in enumerate(layout.groups):
            for slot in range(group.slots[tier]):
                exact = parts(layout, tier, index, slot)
                pieces += [(start, -(-size // 4096) * 4096) for start, size in exact]
                assert [size for _, size in exact] == [spec.pool_bytes(index, pool) for pool in range(len(group.pools))]
            assert group.record_bytes == spec.record_bytes(index)
            assert group.host_offset % (2 * MIB) == 0
            assert all(pool.device_offset % (2 * MIB) == 0 for pool in group.pools)
        assert all(start % 4096 == 0 for start, _ in pieces)
        assert_apart(pieces, layout.data_bytes(tier))
        assert (layout.data_bytes(tier) > 0) == any(group.slots[tier] for group in layout.groups)


@given(layouts())
def test_index_has_room_for_the_slots_of_all_tiers(planned):
    spec, layout = planned
    slots = {(n, tier): group.slots[tier] for n, group in enumerate(layout.groups) for tier in (DEVICE, HOST, DISK)}
    layout = ArenaLayout.plan(spec, slots, indexed=True)
    buckets, rest = divmod(layout.index_bytes, 512)
    assert rest == 0
    assert buckets * 8 - 8 < sum(slots.values()) * 1.5 <= buckets * 8
    assert ArenaLayout.plan(spec, slots, indexed=False).index_bytes == 0


@given(layouts())
def test_views_reach_the_bytes_of_their_slots(planned):
    _, layout = planned
    for tier in MEMORY_TIERS:
        data = np.empty(layout.data_bytes(tier), dtype=np.uint8)

        def place(view, base=data.ctypes.data):
            return view.ctypes.data - base, len(view)

        for index, group in enumerate(layout.groups):
            exact = [layout.pool_view(data, tier, index, pool) for pool in range(len(group.pools))]
            wide = [layout.pool_view(data, tier, index, pool, padding=True) for pool in range(len(group.pools))]
            assert {len(view) for view in exact + wide} == {group.slots[tier]}
            for slot in range(group.slots[tier]):
                expected = parts(layout, tier, index, slot)
                assert [place(view[slot]) for view in exact] == expected
                assert [place(view[slot])[0] for view in wide] == [start for start, _ in expected]
                if tier == HOST:
                    record = layout.record_view(data, index)[slot]
                    assert place(record) == (expected[0][0], sum(len(view[slot]) for view in wide))


def test_generations_and_owners_are_views():
    layout = two_pools()
    control = formatted(layout, TWO_POOLS)
    layout.generations(control, HOST, 0)[4] += 1
    layout.owners(control, DEVICE, 0)[2] = 77
    again = control.copy()
    again.flags.writeable = False
    assert layout.generations(again, HOST, 0).tolist() == [first_generation(5)] * 4 + [first_generation(5) + 1]
    assert layout.owners(again, DEVICE, 0).tolist() == [0, 0, 77]
    with pytest.raises(ValueError, match="read-only"):
        layout.generations(again, HOST, 0)[0] = 0


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**32 - 2))
def test_generations_of_a_later_boot_are_above_all_before(boot, earlier, writes):
    if earlier < boot:
        assert first_generation(boot) > first_generation(earlier) + writes
    assert not is_ready(first_generation(boot))
    assert is_ready(first_generation(boot) + 1)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("magic", b"KVTARENB", "header.magic"), ("abi_version", 3, "header.abi_version"),
     ("fingerprint", bytes(32), "header.fingerprint"), ("crc", 0, "header.crc")],
)  # fmt: skip
def test_another_segment_is_refused_by_field(field, value, named):
    control = formatted(two_pools(), TWO_POOLS)
    put(control, field, value)
    with pytest.raises(AbiError) as refused:
        ArenaLayout.read(control if field == "crc" else sealed(control), TWO_POOLS)
    assert refused.value.field == named


@pytest.mark.parametrize(("at", "count"), [(0, MAX_SLOTS + 1), (0, 2**32 - 1), (3, 1), (47, 1)])
def test_slots_that_cannot_be_are_refused(at, count):
    control = formatted(two_pools(), TWO_POOLS)
    struct.pack_into("<I", control.data, 104 + 4 * at, count)
    with pytest.raises(AbiError) as refused:
        ArenaLayout.read(sealed(control), TWO_POOLS)
    assert refused.value.field == "header.slots"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8191])
def test_a_short_segment_is_refused(size):
    with pytest.raises(AbiError) as refused:
        ArenaLayout.read(formatted(two_pools(), TWO_POOLS)[:size], TWO_POOLS)
    assert refused.value.field == "control"


@given(st.integers(0, 299), st.integers(1, 255))
def test_any_flipped_byte_is_noticed(at, flips):
    control = formatted(two_pools(), TWO_POOLS)
    control[at] ^= flips
    with pytest.raises(AbiError):
        ArenaLayout.read(control, TWO_POOLS)


@given(layouts(), st.data())
def test_a_forged_segment_is_refused_or_stays_inside(planned, data):
    """A liar with the right checksum may choose other slots, but none outside the control segment."""
    spec, layout = planned
    control = formatted(layout, spec)
    suspects = st.sampled_from([0, 1, 7, 64, 4096, 2**20, 2**31 - 1, 2**31, 2**32 - 1])
    for _ in range(data.draw(st.integers(1, 4))):
        struct.pack_into("<I", control.data, 104 + 4 * data.draw(st.integers(0, 47)), data.draw(suspects))
    put(control, "indexed", data.draw(suspects))
    try:
        read = ArenaLayout.read(sealed(control), spec)
    except AbiError:
        return
    assert read.index_offset + read.index_bytes <= len(control)
    for index, group in enumerate(read.groups):
        for tier in MEMORY_TIERS:
            assert len(read.generations(control, tier, index)) == group.slots[tier]
            assert len(read.owners(control, tier, index)) == group.slots[tier]


@pytest.mark.parametrize("slots", [{(1, HOST): 1}, {(0, 3): 1}, {(0, HOST): -1}, {(0, HOST): 2**31}])
def test_plan_refuses_what_cannot_be(slots):
    with pytest.raises(AbiError, match="slots"):
        ArenaLayout.plan(TWO_POOLS, slots)
