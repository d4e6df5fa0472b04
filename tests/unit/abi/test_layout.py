from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi import layout as abi
from kvtier.abi.layout import (
    DEVICE,
    DISK,
    HOST,
    MEMORY_TIERS,
    AbiError,
    ArenaIdentity,
    ArenaLayout,
    ArenaState,
    Segment,
    first_generation,
    is_ready,
    read_state,
    write_state,
)
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec

MIB = 1 << 20
IDENTITY = ArenaIdentity(fingerprint=bytes(range(32)), epoch=3, boot=5, pid=4321)
SEED = bytes(byte + (at % 8 == 0) for at, byte in enumerate(range(0, 64, 2)))

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
def layouts(draw: st.DrawFn) -> tuple[CacheSpec, ArenaLayout]:
    several = st.lists(groups, min_size=1, max_size=3, unique_by=lambda group: group.window_tokens)
    spec = CacheSpec("m", "float16", draw(st.integers(1, 16)), groups=tuple(draw(several)))
    spec.validate()
    places = [(group, tier) for group in range(len(spec.groups)) for tier in (DEVICE, HOST, DISK)]
    slots = draw(st.dictionaries(st.sampled_from(places), st.integers(0, 20)))
    return spec, ArenaLayout.plan(spec, slots, indexed=draw(st.booleans()))


def formatted(layout: ArenaLayout) -> Segment:
    control = np.zeros(layout.control_bytes, dtype=np.uint8)
    layout.initialise(control, IDENTITY, bytes(range(0, 64, 2)))
    return control


def two_pools() -> ArenaLayout:
    """One group, pools of 6,000 and 100 bytes a block."""
    pools = (PoolSpec(1, 1, 3000), PoolSpec(1, 1, 50))
    spec = CacheSpec("m", "uint8", 1, groups=(WindowGroupSpec(pools=pools),))
    return ArenaLayout.plan(spec, {(0, DEVICE): 3, (0, HOST): 5, (0, DISK): 9}, indexed=True)


def documented_fields() -> dict[str, dict[str, tuple[int, str]]]:
    """The three tables of the module's docstring: table -> field -> (offset, struct code)."""
    tables: dict[str, dict[str, tuple[int, str]]] = {}
    fields: dict[str, tuple[int, str]] = {}
    for line in (abi.__doc__ or "").splitlines():
        if heading := re.match(r"(Control header|Group entry|Pool entry)", line):
            fields = tables.setdefault(heading[1], {})
        elif row := re.match(r" +(\d+) +(u32|u64|\d+) {1,2}(\w+)", line):
            fields[row[3]] = (int(row[1]), {"u32": "<I", "u64": "<Q"}.get(row[2], f"<{row[2]}s"))
    return tables


def read_documented(table: str, data: bytes) -> dict[str, object]:
    return {name: struct.unpack_from(code, data, at)[0] for name, (at, code) in documented_fields()[table].items()}


def test_segment_is_as_documented() -> None:
    """Reads a segment with nothing but the offsets in the docstring."""
    layout = two_pools()
    control = formatted(layout).tobytes()
    header = read_documented("Control header", control)
    assert (
        header
        == {
            "magic": b"KVTARENA",
            "abi_version": 3,
            "header_bytes": 4096,
            "control_bytes": len(control),
            "page_bytes": 4096,
            "fingerprint": IDENTITY.fingerprint,
            "epoch": 3,
            "boot": 5,
            "pid": 4321,
            "device_bytes": 2 * MIB + 3 * 4096,
            "host_bytes": 5 * 12288,
            "group_count": 1,
            "group_entry_bytes": 128,
            "group_table_offset": 4096,
            "pool_count": 2,
            "pool_entry_bytes": 64,
            "pool_table_offset": 4224,
            "index_offset": layout.index_offset,
            "index_bytes": 4 * 512,  # 1.5 x 17 places, in whole buckets of 8
            "index_bucket_bytes": 512,
            "index_bucket_entries": 8,
            "index_seed": SEED,
            "event_epoch": 3,
            "last_event": 0,
            "unindexed": 0,
            "table_crc": zlib.crc32(control[:4032] + control[4096:4224] + control[4224:4352]),
            "state": 0,
        }
    )
    group = read_documented("Group entry", control[4096:])
    assert [group[name] for name in ("device_slots", "host_slots", "disk_slots")] == [3, 5, 9]
    assert (group["first_pool"], group["pool_count"], group["record_bytes"]) == (0, 2, 12288)
    for run, count in (("device_generations", 3), ("host_generations", 5)):
        at = group[run]
        assert isinstance(at, int) and at % 64 == 0
        assert struct.unpack_from(f"<{count}Q", control, at) == ((5 << 32) + 1,) * count
    for run, count in (("device_owners", 3), ("host_owners", 5)):
        at = group[run]
        assert isinstance(at, int) and at % 64 == 0
        assert struct.unpack_from(f"<{count}Q", control, at) == (0,) * count
    for run, count in (("device_records", 3), ("host_records", 5)):
        at = group[run]
        assert isinstance(at, int) and at % 64 == 0
        assert control[at : at + 160 * count] == bytes(160 * count)
    assert read_documented("Pool entry", control[4224:]) == {
        "block_bytes": 6000,
        "padded_bytes": 8192,
        "record_offset": 0,
        "device_offset": 0,
    }
    assert read_documented("Pool entry", control[4288:]) == {
        "block_bytes": 100,
        "padded_bytes": 4096,
        "record_offset": 8192,
        "device_offset": 2 * MIB,
    }


def test_slots_are_where_documented() -> None:
    layout = two_pools()
    assert layout.parts(HOST, 0, 2) == [(2 * 12288, 6000), (2 * 12288 + 8192, 100)]
    assert layout.padded_parts(HOST, 0, 2) == [(2 * 12288, 8192), (2 * 12288 + 8192, 4096)]
    assert layout.parts(DEVICE, 0, 2) == [(2 * 8192, 6000), (2 * MIB + 2 * 4096, 100)]


@given(layouts())
def test_reading_gives_the_plan_back(planned: tuple[CacheSpec, ArenaLayout]) -> None:
    _, layout = planned
    control = formatted(layout)
    assert ArenaLayout.read(control) == layout
    assert ArenaIdentity.read(control) == IDENTITY
    assert read_state(control) is ArenaState.OPENING


def taken_of_control(layout: ArenaLayout) -> Iterator[tuple[int, int]]:
    yield 0, 4096
    yield layout.group_table_offset, 128 * len(layout.groups)
    yield layout.pool_table_offset, 64 * sum(len(group.pools) for group in layout.groups)
    yield layout.index_offset, layout.index_bytes
    for group in layout.groups:
        for tier in MEMORY_TIERS:
            yield group.generations[tier], 8 * group.slots[tier]
            yield group.owners[tier], 8 * group.slots[tier]


def assert_apart(pieces: list[tuple[int, int]], size: int) -> None:
    end = 0
    for start, length in sorted(piece for piece in pieces if piece[1]):
        assert start >= end
        end = start + length
    assert end <= size


@given(layouts())
def test_nothing_overlaps_and_everything_is_aligned(planned: tuple[CacheSpec, ArenaLayout]) -> None:
    spec, layout = planned
    assert_apart(list(taken_of_control(layout)), layout.control_bytes)
    assert all(start % 64 == 0 for start, _ in taken_of_control(layout))
    assert layout.control_bytes % 4096 == 0
    for tier in MEMORY_TIERS:
        pieces = []
        for index, group in enumerate(layout.groups):
            for slot in range(group.slots[tier]):
                pieces += layout.padded_parts(tier, index, slot)
                exact = layout.parts(tier, index, slot)
                assert [size for _, size in exact] == [spec.pool_bytes(index, pool) for pool in range(len(group.pools))]
                assert [start for start, _ in exact] == [start for start, _ in pieces[-len(exact) :]]
            assert group.record_bytes == spec.record_bytes(index)
            assert group.host_offset % (2 * MIB) == 0
            assert all(pool.device_offset % (2 * MIB) == 0 for pool in group.pools)
        assert all(start % 4096 == 0 for start, _ in pieces)
        assert_apart(pieces, layout.data_bytes(tier))
        assert (layout.data_bytes(tier) > 0) == any(group.slots[tier] for group in layout.groups)


@given(layouts())
def test_index_has_room_for_the_slots_of_all_tiers(planned: tuple[CacheSpec, ArenaLayout]) -> None:
    spec, layout = planned
    slots = {(n, tier): group.slots[tier] for n, group in enumerate(layout.groups) for tier in (DEVICE, HOST, DISK)}
    layout = ArenaLayout.plan(spec, slots, indexed=True)
    buckets, rest = divmod(layout.index_bytes, 512)
    assert rest == 0
    assert buckets * 8 - 8 < sum(slots.values()) * 1.5 <= buckets * 8
    assert ArenaLayout.plan(spec, slots, indexed=False).index_bytes == 0


@given(layouts())
def test_views_reach_the_bytes_that_parts_names(planned: tuple[CacheSpec, ArenaLayout]) -> None:
    _, layout = planned
    for tier in MEMORY_TIERS:
        data = np.empty(layout.data_bytes(tier), dtype=np.uint8)

        def place(view: Segment, base: int = data.ctypes.data) -> tuple[int, int]:
            return view.ctypes.data - base, len(view)

        for index, group in enumerate(layout.groups):
            exact = [layout.pool_view(data, tier, index, pool) for pool in range(len(group.pools))]
            wide = [layout.pool_view(data, tier, index, pool, padding=True) for pool in range(len(group.pools))]
            assert {len(view) for view in exact + wide} == {group.slots[tier]}
            for slot in range(group.slots[tier]):
                assert [place(view[slot]) for view in exact] == layout.parts(tier, index, slot)
                assert [place(view[slot]) for view in wide] == layout.padded_parts(tier, index, slot)


@given(layouts())
def test_a_record_is_the_padded_parts_in_a_row(planned: tuple[CacheSpec, ArenaLayout]) -> None:
    _, layout = planned
    data = np.empty(layout.host_bytes, dtype=np.uint8)
    for index, group in enumerate(layout.groups):
        records = layout.record_view(data, index)
        assert records.shape == (group.slots[HOST], group.record_bytes)
        for slot, record in enumerate(records):
            parts = layout.padded_parts(HOST, index, slot)
            assert record.ctypes.data - data.ctypes.data == parts[0][0]
            assert len(record) == sum(size for _, size in parts)


def test_generations_and_owners_are_views() -> None:
    layout = two_pools()
    control = formatted(layout)
    layout.generations(control, HOST, 0)[4] += 1
    layout.owners(control, DEVICE, 0)[2] = 77
    again = control.copy()
    again.flags.writeable = False
    assert layout.generations(again, HOST, 0).tolist() == [first_generation(5)] * 4 + [first_generation(5) + 1]
    assert layout.owners(again, DEVICE, 0).tolist() == [0, 0, 77]
    with pytest.raises(ValueError, match="read-only"):
        layout.generations(again, HOST, 0)[0] = 0


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**32 - 2))
def test_generations_of_a_later_boot_are_above_all_before(boot: int, earlier: int, writes: int) -> None:
    if earlier < boot:
        assert first_generation(boot) > first_generation(earlier) + writes
    assert not is_ready(first_generation(boot))
    assert is_ready(first_generation(boot) + 1)


def test_state_is_read_back_and_checked() -> None:
    control = formatted(two_pools())
    write_state(control, ArenaState.SERVING)
    assert read_state(control) is ArenaState.SERVING
    assert ArenaLayout.read(control) == two_pools()
    control[4088] = 7
    with pytest.raises(AbiError, match=r"header\.state"):
        read_state(control)


def put(control: Segment, table: str, field: str, value: int | bytes, base: int) -> None:
    at, code = documented_fields()[table][field]
    data = struct.pack(code, value)
    control[base + at : base + at + len(data)] = np.frombuffer(data, dtype=np.uint8)


HEADER, GROUP, POOL = ("Control header", 0), ("Group entry", 4096), ("Pool entry", 4224)


@pytest.mark.parametrize(
    ("table", "field", "value", "named"),
    [
        (HEADER, "magic", b"KVTARENB", "header.magic"),
        (HEADER, "abi_version", 2, "header.abi_version"),
        (HEADER, "header_bytes", 8192, "header.header_bytes"),
        (HEADER, "control_bytes", 2**63, "header.control_bytes"),
        (HEADER, "control_bytes", 4096, "header.group_table_offset"),
        (HEADER, "page_bytes", 512, "header.page_bytes"),
        (HEADER, "boot", 2, "header.boot"),  # below the epoch
        (HEADER, "boot", 2**32, "header.boot"),
        (HEADER, "device_bytes", 2 * MIB + 4096, "groups[0].pools[1].device_offset"),
        (HEADER, "host_bytes", 5 * 12288 - 1, "groups[0].host_offset"),
        (HEADER, "host_bytes", 0, "groups[0].host_offset"),
        (HEADER, "group_count", 0, "header.group_count"),
        (HEADER, "group_count", 2**32 - 1, "header.group_count"),
        (HEADER, "group_entry_bytes", 127, "header.group_entry_bytes"),
        (HEADER, "group_table_offset", 2**64 - 8, "header.group_table_offset"),
        (HEADER, "pool_count", 3, "header.pool_count"),
        (HEADER, "pool_entry_bytes", 0, "header.pool_entry_bytes"),
        (HEADER, "pool_table_offset", 2**63, "header.pool_table_offset"),
        (HEADER, "index_offset", 4096, "header.index_offset"),
        (HEADER, "index_offset", 4352 + 8, "header.index_offset"),
        (HEADER, "index_bytes", 2**63, "header.index_offset"),
        (HEADER, "index_bytes", 100, "header.index_bytes"),
        (HEADER, "index_bucket_bytes", 64, "header.index_bucket_bytes"),
        (HEADER, "index_bytes", 0, "header.index_seed"),
        (HEADER, "index_seed", bytes(32), "header.index_seed"),
        (HEADER, "index_seed", bytes([1, *range(1, 32)]), "header.index_seed"),
        (HEADER, "index_bucket_entries", 4, "header.index_bucket_entries"),
        (HEADER, "epoch", 4, "header.table_crc"),
        (HEADER, "fingerprint", bytes(32), "header.table_crc"),
        (HEADER, "table_crc", 0, "header.table_crc"),
        (HEADER, "state", 3, "header.state"),
        (GROUP, "first_pool", 1, "groups[0].first_pool"),
        (GROUP, "pool_count", 0, "groups[0].pool_count"),
        (GROUP, "pool_count", 3, "groups[0].pool_count"),
        (GROUP, "pool_count", 1, "groups[0].record_bytes"),
        (GROUP, "device_slots", 2**32 - 1, "groups[0].device_slots"),
        (GROUP, "host_slots", 6, "header.index_offset"),
        (GROUP, "host_slots", 2**31 - 1, "groups[0]."),
        (GROUP, "record_bytes", 12287, "groups[0].record_bytes"),
        (GROUP, "host_offset", 4096, "groups[0].host_offset"),
        (GROUP, "host_offset", 2 * MIB, "groups[0].host_offset"),
        (GROUP, "device_generations", 4352 + 8, "groups[0].device_generations"),
        (GROUP, "host_generations", 4352, "groups[0]."),
        (GROUP, "host_records", 0, "groups[0].host_records"),
        (GROUP, "device_records", 2**64 - 64, "groups[0].device_records"),
        (GROUP, "host_owners", 0, "groups[0].host_owners"),
        (GROUP, "device_owners", 2**64 - 64, "groups[0].device_owners"),
        (POOL, "block_bytes", 0, "groups[0].pools[0].block_bytes"),
        (POOL, "block_bytes", 2**64 - 1, "groups[0].pools[0].block_bytes"),
        (POOL, "padded_bytes", 12288, "groups[0].pools[0].padded_bytes"),
        (POOL, "record_offset", 4096, "groups[0].pools[1].record_offset"),
        (POOL, "record_offset", 8192, "groups[0].pools"),
        (POOL, "device_offset", 2 * MIB, "groups[0].pools"),
        (POOL, "device_offset", 2**63, "groups[0].pools[0].device_offset"),
    ],
)
def test_a_wrong_field_is_named(table: tuple[str, int], field: str, value: int | bytes, named: str) -> None:
    control = formatted(two_pools())
    put(control, table[0], field, value, table[1])
    with pytest.raises(AbiError) as refused:
        ArenaLayout.read(control)
    assert refused.value.field.startswith(named)


@pytest.mark.parametrize(
    ("at", "named"),
    [
        *((at, "header") for at in (28, 192, 4031, 4056, 4084, 4095)),
        (4096 + 88, "group"),
        (4224 + 63, "pool"),
    ],
)
def test_bytes_without_a_name_are_zero(at: int, named: str) -> None:
    control = formatted(two_pools())
    control[at] = 1
    with pytest.raises(AbiError) as refused:
        ArenaLayout.read(control)
    assert refused.value.field == f"{named}.reserved"


@pytest.mark.parametrize(
    ("table", "field", "named"),
    [
        (HEADER, "device_bytes", "header.device_bytes"),
        (GROUP, "device_generations", "groups[0].device_generations"),
        (GROUP, "device_owners", "groups[0].device_owners"),
        (POOL, "device_offset", "groups[0].pools[0].device_offset"),
    ],
)
def test_what_is_empty_has_no_place(table: tuple[str, int], field: str, named: str) -> None:
    layout = ArenaLayout.plan(CacheSpec.single("m", "uint8", 1, 1, 1, 8), {(0, HOST): 3})
    control = formatted(layout)
    put(control, table[0], field, 2 * MIB, table[1])
    with pytest.raises(AbiError) as refused:
        ArenaLayout.read(control)
    assert refused.value.field == named


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8191])
def test_a_short_segment_is_refused(size: int) -> None:
    with pytest.raises(AbiError):
        ArenaLayout.read(formatted(two_pools())[:size])


@given(layouts(), st.data())
def test_any_flipped_byte_of_header_or_tables_is_noticed(
    planned: tuple[CacheSpec, ArenaLayout], data: st.DataObject
) -> None:
    _, layout = planned
    control = formatted(layout)
    tables_end = layout.pool_table_offset + 64 * sum(len(group.pools) for group in layout.groups)
    at = data.draw(st.integers(0, tables_end - 1))
    control[at] ^= data.draw(st.integers(1, 255))
    if 4032 <= at < 4056 or (at == 4088 and int(control[at]) in list(ArenaState)):  # these are meant to change
        assert ArenaLayout.read(control) == layout
    else:
        with pytest.raises(AbiError):
            ArenaLayout.read(control)


SUSPECTS = st.sampled_from(
    [0, 1, 7, 64, 4095, 4096, 8192, 2 * MIB, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 4096, 2**64 - 1]
)


@given(layouts(), st.data())
def test_a_forged_segment_is_refused_or_stays_inside(
    planned: tuple[CacheSpec, ArenaLayout], data: st.DataObject
) -> None:
    """A liar with the right checksum may choose another valid layout, but none that reaches outside its segments."""
    _, layout = planned
    control = formatted(layout)
    for _ in range(data.draw(st.integers(1, 4))):
        table, base = data.draw(st.sampled_from([HEADER, GROUP, ("Pool entry", layout.pool_table_offset)]))
        bytes_or_sum = {"magic", "fingerprint", "index_seed", "table_crc"}
        field = data.draw(st.sampled_from(sorted(documented_fields()[table].keys() - bytes_or_sum)))
        _, code = documented_fields()[table][field]
        put(control, table, field, data.draw(SUSPECTS | st.integers(0, 2**20)) % 2 ** (8 * struct.calcsize(code)), base)
    header = read_documented("Control header", control.tobytes())
    groups_at, groups_count, pools_at, pools_count = (
        header[name] for name in ("group_table_offset", "group_count", "pool_table_offset", "pool_count")
    )
    assert isinstance(groups_at, int) and isinstance(groups_count, int)
    assert isinstance(pools_at, int) and isinstance(pools_count, int)
    raw = control.tobytes()
    tables = raw[groups_at : groups_at + 128 * groups_count] + raw[pools_at : pools_at + 64 * pools_count]
    put(control, "Control header", "table_crc", zlib.crc32(raw[:4032] + tables), 0)

    try:
        read = ArenaLayout.read(control)
    except AbiError:
        return
    for index, group in enumerate(read.groups):
        for tier in MEMORY_TIERS:
            assert len(read.generations(control, tier, index)) == group.slots[tier]
            assert len(read.owners(control, tier, index)) == group.slots[tier]
            for slot in {0, group.slots[tier] - 1} if group.slots[tier] else ():
                for start, size in read.padded_parts(tier, index, slot):
                    assert 0 <= start <= start + size <= read.data_bytes(tier)


@given(st.binary(max_size=6000))
def test_garbage_behind_a_good_magic_is_refused(garbage: bytes) -> None:
    raw = struct.pack("<8sII", b"KVTARENA", abi.ABI_VERSION, 4096) + garbage
    with pytest.raises(AbiError):
        ArenaLayout.read(np.frombuffer(raw, dtype=np.uint8))


@pytest.mark.parametrize(
    ("tier", "group", "slot", "named"),
    [
        (HOST, 0, 5, "slot"),
        (HOST, 0, -1, "slot"),
        (DEVICE, 1, 0, "group"),
        (HOST, -1, 0, "group"),
        (DISK, 0, 0, "tier"),
    ],
)
def test_parts_of_what_does_not_exist(tier: int, group: int, slot: int, named: str) -> None:
    with pytest.raises(AbiError) as refused:
        two_pools().parts(tier, group, slot)
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("fingerprint", "epoch", "boot", "named"),
    [
        (bytes(31), 1, 1, "header.fingerprint"),
        (bytes(32), -1, 1, "header.epoch"),
        (bytes(32), 2, 1, "header.boot"),
        (bytes(32), 1, 2**32, "header.boot"),
    ],
)
def test_identities_that_cannot_be(fingerprint: bytes, epoch: int, boot: int, named: str) -> None:
    with pytest.raises(AbiError, match=named):
        ArenaIdentity(fingerprint, epoch, boot, pid=1)


@pytest.mark.parametrize("slots", [{(1, HOST): 1}, {(0, 3): 1}, {(0, HOST): -1}, {(0, HOST): 2**31}])
def test_plan_refuses_what_cannot_be(slots: dict[tuple[int, int], int]) -> None:
    spec = CacheSpec.single("m", "uint8", 1, 1, 1, 8)
    with pytest.raises(AbiError, match="slots"):
        ArenaLayout.plan(spec, slots)
