"""Whose directory it is: what is refused stays as it was, to the byte and the timestamp."""

import fcntl
import json
import os
import resource
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvtier.abi.spec import WindowGroupSpec
from kvtierd.core.ids import GroupId
from kvtierd.tiers.base import DamagedDirectory, ForeignDirectory, LockedDirectory, TierConfigError, TierIOError
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.superblock import SUPERBLOCK, format_version, read_superblock, write_superblock
from tests.unit.disk.disk_blocks import GROUP, block, names, open_root, spec


def snapshot(path: Path) -> dict[str, object]:
    """Everything below ``path``: names, modes, sizes, contents, change times."""

    def describe(entry: Path) -> object:
        status = entry.lstat()
        content = entry.read_bytes() if entry.is_file() else sorted(os.listdir(entry))
        return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, content

    return {str(entry): describe(entry) for entry in (path, *sorted(path.rglob("*")))}


def made(path: Path) -> Path:
    """A directory with one cache of 16 slots, and block 1 in slot 3."""
    root = open_root(path)
    root.create("first", spec(), {GROUP: 16}).write([block(1, 3)])
    root.close()
    return path


def superblock(head: str, body: bytes) -> bytes:
    return f"{head} {zlib.crc32(body, zlib.crc32(head.encode())):08x}\n".encode() + body


def test_the_specification_says_which_groups_slide(tmp_path: Path) -> None:
    """Block 2's parent is nowhere: of use in a sliding window, and only there."""
    pools = spec().groups[0].pools
    several = replace(spec(), groups=(WindowGroupSpec(0, pools), WindowGroupSpec(64, pools)))
    full, sliding = GroupId(0), GroupId(1)
    root = open_root(tmp_path)
    store = root.create("both", several, {full: 4, sliding: 4})
    assert store.write([block(2, 3, 1, group=full), block(2, 3, 1, group=sliding)]) == {0}
    root.close()
    root = open_root(tmp_path)
    recovery = root.open_cache("both").recover()
    assert {group: [record.slot for record in records] for group, records in recovery.records.items()} == {
        full: [],
        sliding: [3],
    }
    root.close()


def test_an_empty_directory_is_initialised_and_so_is_a_fresh_file_system(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    open_root(tmp_path).close()
    assert (tmp_path / "SUPERBLOCK").is_file()


@pytest.mark.parametrize("left", [["LOCK"], ["LOCK", "SUPERBLOCK.new"]])
def test_an_interrupted_initialisation_is_finished(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).write_bytes(b"")
    root = open_root(tmp_path)
    root.create("first", spec(), {GROUP: 4})
    root.close()
    assert [cache.name for cache in open_root(tmp_path).caches()] == ["first"]


def test_an_interrupted_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "disk")
    half = tmp_path / "disk" / "caches" / ".new-second"
    half.mkdir()
    (half / "group-0.slab").write_bytes(b"half")
    root = open_root(tmp_path / "disk")
    assert not half.exists()
    assert [cache.name for cache in root.caches()] == ["first"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierIOError, match="No space left") as refused:
        root.create("second", spec(), {GROUP: 4})
    assert refused.value.errno == 28
    monkeypatch.undo()
    assert os.listdir(tmp_path / "disk" / "caches") == ["first"]
    root.create("second", spec(), {GROUP: 4})
    root.close()


def test_a_database_is_refused_and_untouched(tmp_path: Path) -> None:
    """LevelDB has a LOCK, too."""
    for name in ("LOCK", "CURRENT"):
        (tmp_path / name).touch()
    before = snapshot(tmp_path)
    with pytest.raises(ForeignDirectory, match=str(tmp_path)):
        open_root(tmp_path)
    assert snapshot(tmp_path) == before


def test_the_directory_of_the_state_is_no_directory_of_a_disk(tmp_path: Path) -> None:
    write_superblock(tmp_path, "state", {})
    before = snapshot(tmp_path)
    with pytest.raises(DamagedDirectory, match=str(tmp_path)):
        open_root(tmp_path)
    assert snapshot(tmp_path) == before


def change(**fields: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda content: content | fields


def without(name: str) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda content: {field: value for field, value in content.items() if field != name}


@pytest.mark.parametrize(
    "edit",
    [
        change(name="second"),
        change(fingerprint="00" * 32),
        change(slots=[4, 4]),
        change(spec=spec(32).to_dict()),
        without("index_bytes"),
    ],
)
def test_a_cache_whose_superblock_contradicts_itself_is_left_out_untouched(
    tmp_path: Path, edit: Callable[[dict[str, object]], dict[str, object]]
) -> None:
    path = made(tmp_path) / "caches" / "first" / "SUPERBLOCK"
    content = json.loads(path.read_bytes().partition(b"\n")[2])
    path.write_bytes(superblock(f"kvtier cache {format_version('cache')}", json.dumps(edit(content)).encode()))
    before = snapshot(tmp_path / "caches")
    root = open_root(tmp_path)
    assert root.caches() == []
    assert "first" in root.damaged()
    with pytest.raises(DamagedDirectory):
        root.open_cache("first")
    root.close()
    assert snapshot(tmp_path / "caches") == before


@pytest.mark.parametrize("name", ["", "..", "../first", "a/b", ".new-first"])
def test_no_name_reaches_outside_the_directory_of_caches(tmp_path: Path, name: str) -> None:
    root = open_root(made(tmp_path))
    before = snapshot(tmp_path)
    for use in (root.open_cache, root.remove, lambda name: root.create(name, spec(), {GROUP: 4})):
        with pytest.raises(TierConfigError, match="name"):
            use(name)
    assert snapshot(tmp_path) == before
    root.close()


def test_a_cache_that_is_a_link_is_removed_without_what_is_behind_it(tmp_path: Path) -> None:
    path, behind = made(tmp_path / "disk"), tmp_path / "behind"
    (path / "caches" / "first").rename(behind)
    before = snapshot(behind)
    for name in ("first", ".gone-second"):
        (path / "caches" / name).symlink_to(behind)
    root = open_root(path)
    assert "symbolic link" in root.damaged()["first"]
    root.remove("first")
    assert list((path / "caches").iterdir()) == []
    assert snapshot(behind) == before


@pytest.mark.parametrize("left", ["", "4194305\n"], ids=["nobody", "one-that-is-gone"])
def test_a_holder_that_has_yet_to_write_itself_in_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    made(tmp_path)
    (tmp_path / "LOCK").write_text(left)  # no process has a number above 4,194,304

    def writes_itself_in(_: float) -> None:
        (tmp_path / "LOCK").write_text(f"{os.getpid()}\n")

    monkeypatch.setattr(time, "sleep", writes_itself_in)
    with (tmp_path / "LOCK").open() as just_taken:
        fcntl.flock(just_taken, fcntl.LOCK_EX)
        with pytest.raises(LockedDirectory) as refused:
            open_root(tmp_path)
    assert refused.value.pid == os.getpid()


def test_a_full_disk_does_not_keep_what_is_stored_from_being_served(tmp_path: Path) -> None:
    root = DiskRoot.open(made(tmp_path), floor_bytes=1 << 60)
    assert names(root.open_cache("first").recover(), [1]) == [1]
    root.close()


def test_the_default_floor_is_at_most_a_gibibyte(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    root = DiskRoot.open(tmp_path)
    floor = ByteSize(min(1 << 30, total // 20)).human_readable(separator=" ")
    with pytest.raises(
        TierConfigError, match=f"^[0-9.]+ .iB asked for, .* free on {tmp_path}, {floor} must stay free$"
    ):
        root.create("first", spec(), {GROUP: free // spec().record_bytes(0)})
    root.close()


def test_a_superblock_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    write_superblock(tmp_path, "budgets", {"caches": "few"})
    with pytest.raises(TierIOError):
        write_superblock(tmp_path, "budgets", {"caches": "x" * (1 << 20)})
    assert read_superblock(tmp_path, "budgets") == {"caches": "few"}
    assert os.listdir(tmp_path) == [SUPERBLOCK]


@pytest.mark.parametrize(("slots", "kept"), [(32, [3]), (4, [3]), (3, [])])
def test_a_cache_gets_other_slots_and_keeps_the_records_that_fit(tmp_path: Path, slots: int, kept: list[int]) -> None:
    root = open_root(made(tmp_path))
    root.resize("first", {GROUP: slots}, {"colour": "red"}, label_bytes=500)
    slab, index = (tmp_path / "caches" / "first" / name for name in ("group-0.slab", "index/data.mdb"))
    assert slab.stat().st_size == slots * spec().record_bytes(0)
    assert index.stat().st_size >= json.loads((slab.parent / SUPERBLOCK).read_text().partition("\n")[2])["index_bytes"]
    root.close()
    root = open_root(tmp_path)
    assert [(cache.slots, cache.options) for cache in root.caches()] == [({GROUP: slots}, {"colour": "red"})]
    store = root.open_cache("first")
    assert [record.slot for record in store.recover().records[GROUP]] == kept
    assert not store.write([block(2, 0)])
    root.close()


def test_a_cache_that_cannot_grow_stays_as_it_was(tmp_path: Path) -> None:
    root = open_root(made(tmp_path))
    with pytest.raises(TierConfigError, match="must stay free"):
        root.resize("first", {GROUP: 1 << 30}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(TierIOError, match="cannot resize"):
            root.resize("first", {GROUP: 1 << 12}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.slot for record in root.open_cache("first").recover().records[GROUP]] == [3]
    assert root.caches()[0].slots == {GROUP: 16}
    root.close()
