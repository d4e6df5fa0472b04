"""Batches that are finished together: one sync, one transaction, and every block's fate as if each had been alone."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.core.ids import GroupId
from kvtierd.tiers.disk import Begun, DiskStore
from kvtierd.tiers.disk.index import Changes, Index
from tests.unit.disk.disk_blocks import block, names, new_store, reopened, retire, verdicts

SLOTS = 32


def test_batches_finished_together_take_one_sync_and_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path, SLOTS)
    store.write([block(1, 1), block(2, 2)])
    begun = [store.begin([block(3, 3)]), store.begin([block(4, 4, parent=3)]), store.begin([block(5, 5, parent=4)])]
    done: list[str] = []
    sync, commit = os.fdatasync, Index.commit

    def syncs(fd: int) -> None:
        done.append("sync")
        sync(fd)

    def commits(index: Index, changes: Mapping[GroupId, Changes]) -> None:
        done.append("transaction")
        commit(index, changes)

    monkeypatch.setattr(os, "fdatasync", syncs)
    monkeypatch.setattr(Index, "commit", commits)

    assert store.finish(joined(begun), [retire(1, 1), retire(2, 2)]) == frozenset()

    monkeypatch.undo()
    assert done == ["sync", "transaction"]
    with reopened(store, tmp_path, SLOTS) as (again, recovery):
        assert names(recovery, range(9)) == [3, 4, 5]
        assert set(verdicts(again, {3: 3, 4: 4, 5: 5}).values()) == {"ok"}


@dataclass(frozen=True)
class Plan:
    """Groups of batches of blocks: (name, parent), the slot being the name. ``ahead``: before a group is finished, the
    first batch of the next begins."""

    groups: Sequence[Sequence[Sequence[tuple[int, int | None]]]]
    unwritten: frozenset[int]
    unsynced: frozenset[int]
    ahead: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shape = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4))
    name = 0
    groups = []
    for sizes in shape:
        batches = []
        for size in sizes:
            batch: list[tuple[int, int | None]] = []
            for _ in range(size if name + size <= SLOTS else 0):
                batch.append((name, draw(st.none() | st.integers(0, name - 1)) if name else None))
                name += 1
            batches.append(batch)
        groups.append(batches)
    return Plan(
        groups,
        unwritten=draw(st.frozensets(st.integers(0, SLOTS - 1), max_size=3)),
        unsynced=draw(st.frozensets(st.integers(0, len(groups) - 1), max_size=1)),
        ahead=draw(st.booleans()),
    )


def joined(begun: Sequence[Begun]) -> Begun:
    return reduce(Begun.then, begun)


def begin(store: DiskStore, plan: Plan, batch: Sequence[tuple[int, int | None]]) -> Begun:
    unwritten = frozenset(number for number, (name, _) in enumerate(batch) if name in plan.unwritten)
    return replace(store.begin([block(name, name, parent) for name, parent in batch]), failed=unwritten)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_what_is_stored_is_what_was_written_synced_and_can_be_reached(plan: Plan) -> None:
    stored: set[int] = set()
    early: list[Begun] = []
    early_is_lost = False
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        store = new_store(Path(directory), SLOTS)
        for number, group in enumerate(plan.groups):
            begun = early + [begin(store, plan, batch) for batch in group[len(early) :]]
            following = plan.groups[number + 1 : number + 2] if plan.ahead else []
            early = [begin(store, plan, batches[0]) for batches in following]
            fails = number in plan.unsynced and any(group)
            if fails:
                patch.setattr(os, "fdatasync", refuse)
            failed = store.finish(joined(begun))
            patch.undo()

            blocks = [one for batch in group for one in batch]
            lost = fails or early_is_lost
            reached = set() if lost else reachable([one for one in blocks if one[0] not in plan.unwritten], stored)
            assert failed == {place for place, (name, _) in enumerate(blocks) if name not in reached}
            stored |= reached
            early_is_lost = fails and bool(early)
        everything = {name: name for name in range(SLOTS)}
        expected = {name: "ok" if name in stored else "corrupt" for name in everything}
        assert verdicts(store, everything) == expected
        with reopened(store, Path(directory), SLOTS) as (again, recovery):
            assert set(names(recovery, everything)) == stored
            assert verdicts(again, everything) == expected


def reachable(blocks: Sequence[tuple[int, int | None]], stored: set[int]) -> set[int]:
    """Those whose parents are on disk or come there with them; parents stand before their children."""
    reached: set[int] = set()
    for name, parent in blocks:
        if parent is None or parent in stored or parent in reached:
            reached.add(name)
    return reached


def refuse(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")
