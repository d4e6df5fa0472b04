"""Whose directory it is: what is refused stays as it was, to the byte and the timestamp."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.abi.spec import WindowGroupSpec
from kvtierd.core.ids import GroupId
from kvtierd.tiers.base import (
    DamagedDirectory,
    ForeignDirectory,
    LockedDirectory,
    TierConfigError,
    TierIOError,
)
from kvtierd.tiers.disk import root as root_module
from kvtierd.tiers.disk.root import DiskRoot, StoredCache
from kvtierd.tiers.disk.superblock import SUPERBLOCK, read_superblock, write_superblock
from tests.unit.disk.disk_blocks import GROUP, block, fails, names, open_root, spec, verdicts

HOLDER = """
import sys
from pathlib import Path
from kvtierd.tiers.disk.root import DiskRoot
root = DiskRoot.open(Path(sys.argv[1]), floor_bytes=0)
print("held", flush=True)
sys.stdin.read()
"""


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


def test_a_missing_directory_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    earlier = os.umask(0o000)
    try:
        made(tmp_path / "a" / "disk")
    finally:
        os.umask(earlier)
    modes = {
        (entry.is_dir(), stat.S_IMODE(entry.stat().st_mode)) for entry in (tmp_path / "a", *(tmp_path / "a").rglob("*"))
    }
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_cache_is_there_again_with_its_specification_budget_and_blocks(tmp_path: Path) -> None:
    root = open_root(made(tmp_path / "disk"))
    assert root.caches() == [StoredCache("first", spec(), {GROUP: 16})]
    store = root.open_cache("first")
    assert names(store.recover(), [1]) == [1]
    assert verdicts(store, {1: 3}) == {1: "ok"}
    root.close()


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


def test_caches_are_listed_by_name_and_keep_apart(tmp_path: Path) -> None:
    root = open_root(tmp_path / "disk")
    second = root.create("second", spec(32), {GROUP: 4})
    first = root.create("first", spec(), {GROUP: 8})
    first.write([block(1, 0)])
    assert verdicts(first, {1: 0}) == {1: "ok"}
    assert second.recover().records == {GROUP: []}
    assert [(cache.name, dict(cache.slots)) for cache in root.caches()] == [
        ("first", {GROUP: 8}),
        ("second", {GROUP: 4}),
    ]
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


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": b"chapter 1"},
        {"LOCK": b"", "CURRENT": b"MANIFEST-000001"},
        {"data.mdb": bytes(8192), "lock.mdb": bytes(8192)},
    ],
    ids=["a-file", "a-database", "an-lmdb"],
)
def test_a_foreign_directory_is_refused_and_untouched(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = snapshot(tmp_path)
    with pytest.raises(ForeignDirectory, match=str(tmp_path)):
        open_root(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("mine")
    with pytest.raises(ForeignDirectory, match="not a directory"):
        open_root(tmp_path / "disk")
    assert (tmp_path / "disk").read_text() == "mine"


def with_body(body: bytes) -> Callable[[bytes], bytes]:
    return lambda content: superblock(content.partition(b"\n")[0].rpartition(b" ")[0].decode(), body)


def with_head(head: str) -> Callable[[bytes], bytes]:
    """``KIND`` in it is the kind that the superblock has."""
    return lambda content: superblock(head.replace("KIND", content.split()[1].decode()), content.partition(b"\n")[2])


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "other magic": lambda content: b"kvtiex" + content[6:],
    "other kind": with_head("kvtier state 1"),
    "other version": with_head("kvtier KIND 2"),
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "not JSON": with_body(b"{"),
    "not an object": with_body(b"[]"),
}


def assert_left_out(path: Path, name: str, why: str) -> None:
    """That a cache is not served, but named, and that nothing of it is touched."""
    before = snapshot(path / "caches")
    root = open_root(path)
    assert [cache.name for cache in root.caches() if cache.name == name] == []
    assert why in root.damaged()[name]
    with pytest.raises(DamagedDirectory):
        root.open_cache(name)
    with pytest.raises(TierConfigError, match="not the name of a stored cache"):
        root.create(name, spec(), {GroupId(0): 1})
    root.close()
    assert snapshot(path / "caches") == before


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_superblock_of_a_cache_leaves_it_out_untouched(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = made(tmp_path) / "caches" / "first" / "SUPERBLOCK"
    path.write_bytes(damage(path.read_bytes()))
    assert_left_out(tmp_path, "first", str(path.parent))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_superblock_is_refused_and_everything_untouched(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = made(tmp_path / "disk") / "SUPERBLOCK"
    path.write_bytes(damage(path.read_bytes()))
    before = snapshot(tmp_path)
    with pytest.raises(DamagedDirectory, match=str(path.parent)):
        open_root(tmp_path / "disk")
    assert snapshot(tmp_path) == before


def test_an_unknown_version_is_named(tmp_path: Path) -> None:
    path = made(tmp_path) / "SUPERBLOCK"
    path.write_bytes(DAMAGE["other version"](path.read_bytes()))
    with pytest.raises(DamagedDirectory, match="format version 2"):
        open_root(tmp_path)


def change(**fields: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda content: content | fields


def without(name: str) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda content: {field: value for field, value in content.items() if field != name}


@pytest.mark.parametrize(
    "edit",
    [
        change(name="second"),
        change(fingerprint="00" * 32),
        change(slots=[]),
        change(slots=[0]),
        change(slots=[4, 4]),
        change(slots="many"),
        change(spec={}),
        change(spec=spec(32).to_dict()),
        without("index_bytes"),
        without("name"),
    ],
)
def test_a_cache_whose_superblock_contradicts_itself_is_left_out(
    tmp_path: Path, edit: Callable[[dict[str, object]], dict[str, object]]
) -> None:
    path = made(tmp_path) / "caches" / "first" / "SUPERBLOCK"
    content = json.loads(path.read_bytes().partition(b"\n")[2])
    path.write_bytes(superblock("kvtier cache 1", json.dumps(edit(content)).encode()))
    assert_left_out(tmp_path, "first", "first")


def test_a_removed_cache_is_gone_with_its_bytes_and_its_name_is_free(tmp_path: Path) -> None:
    root = open_root(made(tmp_path))
    store = root.open_cache("first")
    root.remove("first")
    assert store.closed
    assert (root.caches(), os.listdir(tmp_path / "caches")) == ([], [])
    root.remove("first")
    root.create("first", spec(), {GroupId(0): 4})
    root.close()


@pytest.mark.parametrize("name", ["../first", ".new-first", "", "a/b"])
def test_only_names_of_caches_are_removed(tmp_path: Path, name: str) -> None:
    root = open_root(made(tmp_path))
    with pytest.raises(TierConfigError):
        root.remove(name)
    root.close()
    assert (tmp_path / "caches" / "first").is_dir()


def test_a_removal_that_a_crash_cut_short_ends_at_the_next_start(tmp_path: Path) -> None:
    caches = made(tmp_path) / "caches"
    (caches / "first").rename(caches / ".gone-first")
    open_root(tmp_path).close()
    assert os.listdir(caches) == []


@pytest.mark.parametrize("name", ["group-0.slab", "index/data.mdb"])
def test_a_store_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (made(tmp_path) / "caches" / "first" / name).unlink()
    root = open_root(tmp_path)
    with pytest.raises(DamagedDirectory, match="missing"):
        root.open_cache("first")
    root.close()


@pytest.mark.parametrize("size", [0, 8192, 1 << 20])
def test_a_short_index_is_refused_since_lmdb_would_die_of_it(tmp_path: Path, size: int) -> None:
    os.truncate(made(tmp_path) / "caches" / "first" / "index" / "data.mdb", size)
    root = open_root(tmp_path)
    with pytest.raises(DamagedDirectory, match="shorter"):
        root.open_cache("first")
    root.close()


def test_an_index_that_is_not_lmdbs_is_refused(tmp_path: Path) -> None:
    data = made(tmp_path) / "caches" / "first" / "index" / "data.mdb"
    data.write_bytes(os.urandom(data.stat().st_size))
    root = open_root(tmp_path)
    with pytest.raises(DamagedDirectory, match="index"):
        root.open_cache("first")
    root.close()


def test_a_second_process_is_told_who_has_the_directory(tmp_path: Path) -> None:
    made(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        before = snapshot(tmp_path)
        with pytest.raises(LockedDirectory, match=str(holder.pid)) as refused:
            open_root(tmp_path)
        assert refused.value.pid == holder.pid
        assert snapshot(tmp_path) == before
        holder.kill()
    open_root(tmp_path).close()


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


def test_the_lock_ends_with_close_and_with_a_refusal_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = open_root(tmp_path)
    with pytest.raises(LockedDirectory, match=str(os.getpid())):
        open_root(tmp_path)
    root.close()

    monkeypatch.setattr(root_module, "make_private_directory", fails)
    with pytest.raises(TierIOError):
        open_root(tmp_path)
    monkeypatch.undo()
    open_root(tmp_path).close()


def test_close_closes_what_is_still_open(tmp_path: Path) -> None:
    root = open_root(made(tmp_path))
    store = root.open_cache("first")
    root.close()
    assert store.closed
    store.close()
    open_root(tmp_path).close()


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "..", "a b", "ä", "x" * 129, "first\n"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    root = open_root(tmp_path)
    with pytest.raises(TierConfigError, match="name"):
        root.create(name, spec(), {GROUP: 4})
    with pytest.raises(TierConfigError, match="name"):
        root.open_cache(name)
    assert os.listdir(tmp_path / "caches") == []
    root.close()


def test_names_are_not_used_twice(tmp_path: Path) -> None:
    root = open_root(made(tmp_path))
    with pytest.raises(TierConfigError, match="first"):
        root.create("first", spec(), {GROUP: 4})
    store = root.open_cache("first")
    with pytest.raises(TierConfigError, match="first"):
        root.open_cache("first")
    store.close()
    root.open_cache("first").close()
    with pytest.raises(TierConfigError, match="second"):
        root.open_cache("second")
    root.close()


@pytest.mark.parametrize("slots", [{}, {GROUP: 0}, {GROUP: -1}, {GROUP: 1 << 40}, {GroupId(1): 4}])
def test_bad_budgets_are_refused(tmp_path: Path, slots: dict[GroupId, int]) -> None:
    root = open_root(tmp_path)
    with pytest.raises(TierConfigError, match="slots"):
        root.create("first", spec(), slots)
    assert os.listdir(tmp_path / "caches") == []
    root.close()


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    with pytest.raises(TierConfigError, match="stay free"):
        DiskRoot.open(tmp_path / "new", floor_bytes=2 * free)
    assert not (tmp_path / "new").exists()
    root = DiskRoot.open(tmp_path / "new", floor_bytes=free // 2)
    with pytest.raises(TierConfigError, match="stay free"):
        root.create("first", spec(), {GROUP: free // 2 // spec().record_bytes(0)})
    assert os.listdir(tmp_path / "new" / "caches") == []
    root.close()


def test_a_full_disk_does_not_keep_what_is_stored_from_being_served(tmp_path: Path) -> None:
    root = DiskRoot.open(made(tmp_path), floor_bytes=1 << 60)
    assert names(root.open_cache("first").recover(), [1]) == [1]
    root.close()


def test_the_default_floor_is_at_most_a_gibibyte(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    root = DiskRoot.open(tmp_path)
    with pytest.raises(TierConfigError, match=f"{min(1 << 30, total // 20)} of them stay free"):
        root.create("first", spec(), {GROUP: free // spec().record_bytes(0)})
    root.close()


def test_a_superblock_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    write_superblock(tmp_path, "budgets", {"caches": "few"})
    with pytest.raises(TierIOError):
        write_superblock(tmp_path, "budgets", {"caches": "x" * (1 << 20)})
    assert read_superblock(tmp_path, "budgets") == {"caches": "few"}
    assert os.listdir(tmp_path) == [SUPERBLOCK]
