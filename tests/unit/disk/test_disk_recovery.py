"""What an index that cannot be taken at its word still gives: blocks that can be reached, in the order of their use."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.ids import Key, SlotId, Traits
from kvtierd.tiers.disk.index import StoredGroup
from kvtierd.tiers.disk.records import encode_record, encode_touches
from kvtierd.tiers.disk.recovery import RecoveredGroup, recover_group
from kvtierd.tiers.disk.slab import SlabShape
from tests.unit.disk.disk_blocks import GROUP, block, key, names, new_store, open_store, reopened, verdicts

SHAPE = SlabShape(record_bytes=4096, slots=16)
CHECKSUM = bytes(16)


@dataclass(frozen=True)
class Row:
    name: int | str
    slot: int
    parent: int | str | None = None
    last_use: int = 1
    size: int = SHAPE.record_bytes

    @property
    def value(self) -> bytes:
        above = None if self.parent is None else key(self.parent)
        return encode_record(key(self.name), SlotId(self.slot), self.last_use, self.size, CHECKSUM, above, Traits(35))


def stored(rows: Sequence[Row], touches: Sequence[bytes] = ()) -> StoredGroup:
    ordered = sorted(rows, key=lambda row: key(row.name))
    return StoredGroup(
        keys=[key(row.name) for row in ordered],
        records=[row.value for row in ordered],
        touches=touches,
        quarantined=frozenset(),
    )


def test_blocks_of_a_sliding_group_need_no_ancestors() -> None:
    rows = [Row("d", 3, "missing", last_use=4), Row("e", 4, "d", last_use=2), Row("a", 0, last_use=3)]
    found = recover_group(stored(rows), replace(SHAPE, chained=False))
    assert [(record.key, record.parent) for record in found.records] == [
        (key("e"), key("d")),
        (key("a"), None),
        (key("d"), key("missing")),
    ]
    assert found.dropped == []


def test_the_latest_word_on_a_slots_use_counts() -> None:
    rows = [Row(name, slot, last_use=10 + slot) for slot, name in enumerate("abcd")]
    touches = [
        *encode_touches([SlotId(3), SlotId(0), SlotId(2)], first=20),
        *encode_touches([SlotId(1), SlotId(0), SlotId(1), SlotId(99)], first=30),
    ]
    rows[3] = replace(rows[3], last_use=25)
    found = recover_group(stored(rows, touches), SHAPE)
    assert [(record.key, found.table.last_use[record.slot or 0]) for record in found.records] == [
        (key("c"), 22),
        (key("d"), 25),
        (key("a"), 31),
        (key("b"), 32),
    ]
    assert found.table.counter == 33


def test_counters_go_on_above_everything_ever_noted() -> None:
    touches = [*encode_touches([SlotId(7)], first=500)]
    assert recover_group(stored([Row("a", 0, last_use=3)], touches), SHAPE).table.counter == 501
    assert recover_group(stored([Row("a", 0, last_use=900)], touches), SHAPE).table.counter == 901


parents = st.one_of(st.none(), st.integers(0, 24))
forests = st.lists(st.tuples(st.integers(0, 19), parents, st.integers(1, 10**6)), max_size=24)


@given(forests)
def test_any_index_gives_the_order_a_plain_scan_gives(forest: list[tuple[int, int | None, int]]) -> None:
    rows = [Row(name, slot, parent, use) for name, (slot, parent, use) in enumerate(forest)]
    assert_order(recover_group(stored(rows), SHAPE), rows)


def assert_order(found: RecoveredGroup, rows: Sequence[Row]) -> None:
    """Against the definition, carried out literally."""
    holders: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: (row.last_use, key(row.name))):
        if row.slot < SHAPE.slots:
            holders[row.slot] = row
    waiting = {row.name: row for row in holders.values()}
    done: list[Key] = []
    while True:
        free = [row for row in waiting.values() if row.parent is None or key(row.parent) in done]
        if not free:
            break
        first = min(free, key=lambda row: (row.last_use, row.slot))
        done.append(key(waiting.pop(first.name).name))
    assert [record.key for record in found.records] == done
    assert set(found.dropped) == {key(row.name) for row in rows} - set(done)


def test_what_is_dropped_is_deleted_and_its_slots_can_be_used(tmp_path: Path) -> None:
    """Through the files: an index written by hand, with an orphan, records of another slab and a torn one."""
    store = new_store(tmp_path)
    store.write([block("a", 0), block("b", 1, "a"), block("c", 2, "b")])
    store.close()
    env = lmdb.open(
        str(tmp_path / "index"), max_dbs=4, lib_version=0, map_size=(tmp_path / "index/data.mdb").stat().st_size
    )
    records = env.open_db(b"records-0", create=False)
    with env.begin(write=True) as txn:
        assert txn.delete(key("b"), db=records)
        assert txn.put(key("far"), Row("far", 99, size=12288).value, db=records)
        assert txn.put(key("small"), Row("small", 5, size=4096).value, db=records)
        assert txn.put(key("torn"), b"\x01", db=records)
        for odd in (b"x", key("a") + b"x"):  # keys whose length is damaged
            for name in (b"records-0", b"touches-0", b"quarantine-0"):
                assert txn.put(odd, Row("a", 0).value, db=env.open_db(name, txn=txn))
        assert txn.put((99).to_bytes(4, "big"), b"", db=env.open_db(b"quarantine-0", txn=txn))
    env.close()

    again = open_store(tmp_path)
    recovery = again.recover()
    assert names(recovery, "abc") == ["a"]
    assert recovery.dropped == 4
    assert recovery.corrupt == {GROUP: [key("torn")]}
    assert recovery.quarantined == {GROUP: frozenset()}, "a slab of 16 has no slot 99"
    assert again.write([block("d", 1, "a"), block("e", 2, "d")]) == frozenset()
    with reopened(again, tmp_path) as (last, second):
        assert second.dropped == 0
        assert names(second, "abcde") == ["a", "d", "e"]
        assert verdicts(last, {"a": 0, "d": 1, "e": 2, "c": 2}) == {"a": "ok", "d": "ok", "e": "ok", "c": "corrupt"}


def test_keys_parents_and_checksums_that_end_in_zeros_are_whole() -> None:
    """numpy's fixed-width strings would cut them."""
    parent, child, digest = Key(b"\x01" + bytes(31)), Key(bytes(32)), b"\x02" + bytes(15)
    values = [
        encode_record(own, SlotId(slot), 1, 4096, digest, above, Traits(35))
        for own, slot, above in ((parent, 3, None), (child, 4, parent))
    ]
    found = recover_group(StoredGroup([parent, child], values, [], frozenset()), SHAPE)
    assert [(record.key, record.parent) for record in found.records] == [(parent, None), (child, parent)]
    assert [found.table.key_at(SlotId(slot)) for slot in (3, 4, 5)] == [parent, child, None]
    assert found.table.checksum_at(SlotId(4)) == digest
