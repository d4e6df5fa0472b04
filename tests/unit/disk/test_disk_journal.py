"""The index's log: what stands in it and what has been carried over to the records are together what was committed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.ids import Key, SlotId
from kvtierd.core.traits import Traits
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk import index as index_module
from kvtierd.tiers.disk.changes import Changes
from kvtierd.tiers.disk.index import Index, index_bytes
from kvtierd.tiers.disk.journal import MOST_INLINE, decode_journal, encode_journal, fit, journal_bytes
from kvtierd.tiers.disk.records import Place, encode_record, restated, sequence_key
from tests.unit.disk.disk_blocks import GROUP, key

MAP_BYTES = index_bytes(64)
"""Its journal holds some thirty records."""
RECORD = encode_record(Place(SlotId(1), 1, 4096, bytes(16)), None, Traits(35))


def reopened(index: Index, path: Path) -> Index:
    index.close()
    return Index.open(path, [GROUP], MAP_BYTES)


def held(index: Index) -> dict[Key, bytes]:
    stored = index.load(GROUP)
    assert len(set(stored.keys)) == len(stored.keys)
    return dict(zip(stored.keys, stored.records, strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Index.create(tmp_path / "index", [GROUP], MAP_BYTES)
    return tmp_path / "index"


@pytest.fixture
def index(path: Path) -> Iterator[Index]:
    index = Index.open(path, [GROUP], MAP_BYTES)
    yield index
    index.close()


def entries(index: Index) -> tuple[int, int]:
    """In the tree of records, and in the journal."""
    group = index._groups[GROUP]
    with index._env.begin() as txn:
        return txn.stat(group.records)["entries"], txn.stat(group.journal)["entries"]


RECORDS = st.none() | st.binary(min_size=1, max_size=MOST_INLINE - 42)


@given(st.lists(st.dictionaries(st.integers(0, 20).map(key), RECORDS, max_size=9), max_size=9))
def test_what_goes_into_the_journal_comes_out(commits: list[dict[Key, bytes | None]]) -> None:
    values = [value for ops in commits for value in encode_journal(ops)]
    assert all(len(value) <= MOST_INLINE for value in values)
    together: dict[Key, bytes | None] = {}
    for ops in commits:
        together.update(ops)
        assert journal_bytes(ops) == sum(len(value) - 8 for value in encode_journal(ops))
    assert decode_journal(values) == together


def test_the_longest_record_that_fits_is_a_value_of_its_own() -> None:
    assert fit({key(1): bytes(MOST_INLINE - 42), key(2): None})
    assert not fit({key(1): bytes(1), key(2): bytes(MOST_INLINE - 41)})
    assert [len(value) for value in encode_journal({key(1): b"x" * (MOST_INLINE - 42), key(2): None})] == [
        MOST_INLINE,
        42,
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_index_holds_what_was_committed_whatever_has_been_carried_over(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    index = Index.open(path, [GROUP], MAP_BYTES)
    model: dict[Key, bytes] = {}
    carried_over = 0
    for turn in range(120):
        names = [key(chance.randrange(50)) for _ in range(chance.randrange(1, 9))]
        puts = [(name, RECORD + b"%d" % turn) for name in names[::2]]
        traits = Traits(priority=chance.randrange(100))
        if turn % 40 == 39:
            puts.append((key("long"), b"x" * 1950))
        index.commit({GROUP: Changes(deletes=names[1::2], puts=puts, restate=[(names[0], traits)])})
        for name in names[1::2]:
            model.pop(name, None)
        model.update(puts)
        model[names[0]] = restated(model[names[0]], traits)
        assert held(index) == model
        carried_over += entries(index)[1] == 0
        if chance.random() < 0.1:
            index = reopened(index, path)
            assert held(index) == model
    index.close()
    assert 0 < carried_over < 60, "both, the journal and the tree, had their part"


def test_a_commit_takes_few_entries_until_the_journal_is_full(index: Index) -> None:
    index.commit({GROUP: Changes(puts=[(key(n), RECORD) for n in range(12)])})
    assert entries(index) == (0, 1)
    index.commit({GROUP: Changes(deletes=[key(0)], puts=[(key(n), RECORD) for n in range(12, 64)])})
    assert entries(index) == (63, 0)


def test_the_journal_is_carried_over_a_little_with_each_commit(index: Index, path: Path) -> None:
    """So that no transaction changes many pages, whose memory LMDB keeps."""
    model: dict[Key, bytes] = {}
    in_tree, in_journal, most_at_once = 0, [], 0
    for turn in range(300):
        names = [key(2 * turn), key(2 * turn + 1)]
        gone = [key(turn - 20)] if turn >= 20 else []
        index.commit({GROUP: Changes(deletes=gone, puts=[(name, RECORD) for name in names])})
        model.update(dict.fromkeys(names, RECORD))
        for name in gone:
            model.pop(name, None)
        records, values = entries(index)
        most_at_once = max(most_at_once, records - in_tree)
        in_tree = records
        in_journal.append(values)
    assert 0 < most_at_once <= 6, "twice as many as a commit changes"
    assert any(after < before for before, after in pairwise(in_journal)), (
        "what has been carried over leaves the journal"
    )
    assert max(in_journal[150:]) <= max(in_journal[:150]), "which does not grow"
    assert held(index) == model
    again = reopened(index, path)
    assert held(again) == model
    again.close()


def test_where_carrying_over_finds_no_room_the_journal_goes_on(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    records = dict.fromkeys(map(key, range(64)), RECORD)
    carry_over = index_module._carry_over

    def no_room(*arguments: object) -> None:
        raise lmdb.MapFullError("mdb_put", -30792)

    monkeypatch.setattr(index_module, "_carry_over", no_room)
    index.commit({GROUP: Changes(puts=list(records.items()))})
    assert held(index) == records
    assert entries(index)[0] == 0
    monkeypatch.setattr(index_module, "_carry_over", carry_over)
    index.commit({GROUP: Changes(deletes=[key(0)])})
    del records[key(0)]
    assert held(index) == records
    assert entries(index) == (63, 0)


def put_entry(path: Path, value: bytes) -> None:
    """As the journal's only one."""
    with lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=5, lib_version=0) as env:
        journal = env.open_db(f"journal-{GROUP}".encode(), create=False)
        with env.begin(write=True) as txn:
            txn.put(sequence_key(0), value, db=journal)


def test_a_journal_of_another_version_is_not_guessed_at(index: Index, path: Path) -> None:
    index.close()
    put_entry(path, b"\x02" + bytes(49))
    with pytest.raises(DamagedDirectory, match="version 02"):
        Index.open(path, [GROUP], MAP_BYTES)


def test_a_torn_journal_is_damage_wherever_it_ends(index: Index, path: Path) -> None:
    index.close()
    (whole,) = encode_journal({key(1): RECORD})
    put_entry(path, whole)
    Index.open(path, [GROUP], MAP_BYTES).close()
    for end in range(len(whole) - len(RECORD) - 34 + 1, len(whole)):
        with pytest.raises(ValueError, match="in the middle of a record"):
            decode_journal([whole[:end]])
    put_entry(path, whole[:20])
    with pytest.raises(DamagedDirectory, match="in the middle of a record") as damage:
        Index.open(path, [GROUP], MAP_BYTES)
    put_entry(path, whole)
    Index.open(path, [GROUP], MAP_BYTES).close()
    del damage  # its frames would have kept the file open
