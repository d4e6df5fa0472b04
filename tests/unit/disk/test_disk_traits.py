"""What the disk remembers of a block besides its bytes, over a restart and after a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.core.ids import SlotId
from kvtierd.core.traits import MAX_TOKEN_BYTES, Label, Traits
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk.store import DiskStore
from kvtierd.tiers.disk.values import Recovery
from tests.unit.disk.disk_blocks import (
    GROUP,
    block,
    key,
    new_store,
    reopened,
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
