"""What the disk remembers of a block besides its bytes, over a restart and after a change."""

from pathlib import Path

from kvtierd.core.ids import Label, SlotId, Traits
from kvtierd.tiers.disk.recovery import Recovery
from kvtierd.tiers.disk.store import DiskStore
from tests.unit.disk.disk_blocks import GROUP, block, key, reopened, verdicts

LABELLED = Traits(50, 2000, 77, Label(b"\x01" * 32, b"tokens"))


def traits(recovery: Recovery) -> dict[bytes, Traits]:
    return {record.key: record.traits for record in recovery.records[GROUP]}


def test_traits_outlive_a_restart_and_restated_ones_keep_their_label(store: DiskStore, tmp_path: Path) -> None:
    store.write([block("a", 0, traits=LABELLED), block("b", 1, "a"), block("c", 2, "a", traits=LABELLED)])
    store.write([], restate=[(GROUP, key("a"), Traits(9, 8, 7)), (GROUP, key("b"), Traits(100))])
    with reopened(store, tmp_path / "store") as (again, found):
        assert traits(found) == {key("a"): Traits(9, 8, 7, LABELLED.label), key("b"): Traits(100), key("c"): LABELLED}
        assert verdicts(again, {"a": 0, "b": 1, "c": 2}) == {"a": "ok", "b": "ok", "c": "ok"}


def test_what_is_not_on_disk_is_not_restated_into_it(store: DiskStore, tmp_path: Path) -> None:
    store.write([block("a", 0)])
    store.write(
        [], [(GROUP, key("a"), SlotId(0))], restate=[(GROUP, key("a"), Traits(9)), (GROUP, key("x"), Traits(9))]
    )
    with reopened(store, tmp_path / "store") as (_, found):
        assert traits(found) == {}
