"""What the disk remembers of a block besides its bytes: over a restart, after a change, and from older daemons."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import pytest
import xxhash

from kvtierd.core.ids import SlotId
from kvtierd.core.traits import MAX_TOKEN_BYTES, Label, Traits
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk import DiskStore, Recovery
from kvtierd.tiers.disk.index import index_bytes
from kvtierd.tiers.disk.store import INDEX, create_files, slab_name
from tests.unit.disk.disk_blocks import (
    FINGERPRINT,
    GROUP,
    SHAPE_BYTES,
    block,
    key,
    new_store,
    open_store,
    payload,
    reopened,
    shapes,
    verdicts,
)

LABELLED = Traits(50, 2000, 77, Label(b"\x01" * 32, b"tokens"))


def traits(recovery: Recovery) -> dict[bytes, Traits]:
    return {record.key: record.traits for record in recovery.records[GROUP]}


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return new_store(tmp_path / "store")


def test_traits_outlive_a_restart(store: DiskStore, tmp_path: Path) -> None:
    assert not store.write([block("a", 0, traits=LABELLED), block("b", 1, "a")])
    with reopened(store, tmp_path / "store") as (_, found):
        assert traits(found) == {key("a"): LABELLED, key("b"): Traits(35)}


def test_what_is_restated_outlives_a_restart_and_keeps_its_label(store: DiskStore, tmp_path: Path) -> None:
    store.write([block("a", 0, traits=LABELLED), block("b", 1, "a"), block("c", 2, "a")])
    store.write([], restate=[(GROUP, key("a"), Traits(9, 8, 7)), (GROUP, key("b"), Traits(100))])
    with reopened(store, tmp_path / "store") as (again, found):
        assert traits(found) == {
            key("a"): Traits(9, 8, 7, LABELLED.label),
            key("b"): Traits(100),
            key("c"): Traits(35),
        }
        assert verdicts(again, {"a": 0, "b": 1, "c": 2}) == {"a": "ok", "b": "ok", "c": "ok"}


def test_what_is_not_on_disk_is_not_restated_into_it(store: DiskStore, tmp_path: Path) -> None:
    store.write([block("a", 0)])
    store.write(
        [], [(GROUP, key("a"), SlotId(0))], restate=[(GROUP, key("a"), Traits(9)), (GROUP, key("x"), Traits(9))]
    )
    with reopened(store, tmp_path / "store") as (_, found):
        assert traits(found) == {}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Traits(101), "priority"),
        (Traits(-1), "priority"),
        (Traits(35, 2**32), "duration_ms"),
        (Traits(35, 0, -1), "deadline_ns"),
        (Traits(35, label=Label(b"five!")), "event_hash"),
        (Traits(35, label=Label(tokens=bytes(MAX_TOKEN_BYTES + 1))), "tokens"),
    ],
)
def test_traits_out_of_range_are_refused_whole(store: DiskStore, wrong: Traits, field: str) -> None:
    with pytest.raises(TierConfigError, match=field):
        store.write([block("a", 0), block("b", 1, traits=wrong)])
    with pytest.raises(TierConfigError, match=field):
        store.write([block("a", 0)], restate=[(GROUP, key("a"), wrong)])
    assert verdicts(store, {"a": 0}) == {"a": "corrupt"}


def first_version(directory: Path, names: list[str]) -> None:
    """A store with a chain of blocks in slots 0, 1, ... as daemons before record version 2 left it."""
    create_files(directory, shapes(), index_bytes(16))
    above = bytes(32)
    with (
        open(directory / slab_name(GROUP), "r+b") as slab,
        lmdb.open(str(directory / INDEX), map_size=index_bytes(16), max_dbs=4, lib_version=0) as env,
        env.begin(write=True) as txn,
    ):
        records = env.open_db(f"records-{GROUP}".encode(), txn)
        for slot, name in enumerate(names):
            record = b"".join(part.tobytes() for part in payload(key(name)))
            slab.seek(slot * SHAPE_BYTES)
            slab.write(record)
            checksum = xxhash.xxh3_128(record + key(name) + FINGERPRINT).digest()
            row = (1, int(slot > 0), 60 + slot, slot, 1 + slot, len(record), checksum, above)
            txn.put(key(name), struct.pack("<BBBxIQQ16s32s", *row), db=records)
            above = key(name)


def test_a_store_of_the_first_version_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "old"
    directory.mkdir()
    first_version(directory, ["a", "b", "c"])
    store = open_store(directory)
    found = store.recover()
    assert found.dropped == 0
    assert [(record.key, record.parent) for record in found.records[GROUP]] == [
        (key("a"), None),
        (key("b"), key("a")),
        (key("c"), key("b")),
    ]
    assert traits(found) == {key("a"): Traits(60), key("b"): Traits(61), key("c"): Traits(62)}
    assert verdicts(store, {"a": 0, "b": 1, "c": 2}) == {"a": "ok", "b": "ok", "c": "ok"}
    store.write([block("d", 3, "c", traits=LABELLED)], restate=[(GROUP, key("b"), Traits(1, 2, 3))])
    with reopened(store, directory) as (again, found):
        assert traits(found)[key("b")] == Traits(1, 2, 3)
        assert traits(found)[key("c")] == Traits(62)
        assert traits(found)[key("d")] == LABELLED
        assert set(verdicts(again, {"a": 0, "b": 1, "c": 2, "d": 3}).values()) == {"ok"}
