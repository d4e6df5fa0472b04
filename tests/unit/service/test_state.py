import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd import state
from kvtierd.state import RESERVED_IDS, DurableSequencer, StateDir
from kvtierd.tiers.base import LockedDirectory, TierIOError
from kvtierd.tiers.disk import superblock
from kvtierd.tiers.disk.superblock import SUPERBLOCK, read_superblock


def life(path: Path) -> StateDir:
    opened = StateDir.open(path)
    opened.begin()
    return opened


def test_a_directory_that_another_daemon_makes_its_own_meanwhile_is_locked(tmp_path, monkeypatch) -> None:
    others: list[StateDir] = []

    def overtaken(directory: Path, kind: str) -> object:
        content = read_superblock(directory, kind)
        monkeypatch.undo()
        others.append(StateDir.open(directory))
        return content

    monkeypatch.setattr(superblock, "read_superblock", overtaken)
    with pytest.raises(LockedDirectory):
        StateDir.open(tmp_path)
    others[0].close(None)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("epoch", "last"), [(1, 0), (1, 17), (0, 0)])
def test_a_log_that_is_behind_changes_nothing(tmp_path: Path, clean: bool, epoch: int, last: int) -> None:
    life(tmp_path).close(17 if clean else None)
    opened = StateDir.open(tmp_path)
    before = opened.identity
    opened.begin(epoch, last)
    assert opened.identity == before
    assert before.unclean is not clean
    opened.close(None)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("epoch", "last"), [(1, 5 * RESERVED_IDS), (4, 5 * RESERVED_IDS), (4, 3)])
def test_a_state_that_is_behind_the_log_begins_an_epoch_above_it(
    tmp_path: Path, clean: bool, epoch: int, last: int
) -> None:
    life(tmp_path).close(17 if clean else None)
    opened = StateDir.open(tmp_path)
    opened.begin(epoch, last)
    now = opened.identity
    assert now.unclean
    assert now.epoch == epoch + 1
    assert now.epoch_first == now.last + 1 == DurableSequencer(opened).take()
    assert now.last >= last + RESERVED_IDS
    opened.close(None)
    again = life(tmp_path)
    assert (again.identity.epoch, again.identity.epoch_first > now.epoch_first) == (epoch + 2, True)
    again.close(None)


def test_a_life_that_never_began_leaves_no_trace(tmp_path: Path) -> None:
    life(tmp_path).close(5)
    before = (tmp_path / SUPERBLOCK).read_bytes()
    StateDir.open(tmp_path).close(None)
    assert (tmp_path / SUPERBLOCK).read_bytes() == before


def test_a_write_that_a_crash_cut_short_changes_nothing(tmp_path: Path) -> None:
    life(tmp_path).close(5)
    (tmp_path / f"{SUPERBLOCK}.new").write_bytes(b"kvtier state 1 half a li")
    again = life(tmp_path)
    assert (again.identity.last, again.identity.unclean) == (5, False)
    again.close(5)


def test_what_a_crash_left_as_one_file_is_not_written_over(tmp_path: Path) -> None:
    """A system that went down while one state took the place of another."""
    life(tmp_path).close(5)
    (tmp_path / f"{SUPERBLOCK}.new").unlink()
    os.link(tmp_path / SUPERBLOCK, tmp_path / f"{SUPERBLOCK}.new")
    os.link(tmp_path / SUPERBLOCK, tmp_path / f"{SUPERBLOCK}.old")
    with (tmp_path / SUPERBLOCK).open("rb") as before:
        again = life(tmp_path)
        assert b'"last": 5' in before.read(), "it was replaced, not changed"
    assert (again.identity.last, again.identity.unclean) == (5, False)
    again.close(6)


LIVES_ON_A_FULL_DISK = """
import errno, os, pathlib, sys
from kvtierd.state import StateDir

home = pathlib.Path(sys.argv[1])
opened = StateDir.open(home / "state")
opened.begin()
opened.close(5)
with open(home / "rest", "wb", buffering=0) as rest:
    try:
        while True:
            rest.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
for life in range(3):
    opened = StateDir.open(home / "state")
    assert (opened.identity.epoch, opened.identity.last) == (1, 5 + life)
    opened.begin()
    opened.reserve(1 << 40)
    opened.close(6 + life)
"""


def test_a_full_disk_keeps_no_life_from_beginning(tmp_path: Path) -> None:
    mounted = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount anything")
    shell = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = [*mounted, "sh", "-c", shell, "sh", str(tmp_path), sys.executable, LIVES_ON_A_FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ids_stay_below_what_is_durable_while_a_thread_moves_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "RESERVED_IDS", 64)
    opened = life(tmp_path)
    ids = DurableSequencer(opened)
    for expected in range(1, 1001):
        assert ids.take() == expected
        durable = int((tmp_path / SUPERBLOCK).read_text().split('"last":')[1].split("\n")[0])
        assert expected <= durable
    opened.close(1000)


def test_the_mark_moves_ahead_of_need_without_the_caller_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = life(tmp_path)
    ids = DurableSequencer(opened)
    callers: list[str] = []
    monkeypatch.setattr(StateDir, "reserve", _recording(callers, StateDir.reserve))
    for _ in range(RESERVED_IDS // 2 + 1):
        ids.take()
    deadline = time.monotonic() + 5
    while opened.mark <= RESERVED_IDS and time.monotonic() < deadline:
        time.sleep(0.001)
    assert opened.mark == 2 * RESERVED_IDS
    assert set(callers) == {"kvtierd-ids"}
    opened.close(None)


def test_no_id_above_the_mark_leaves_when_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RESERVED_IDS", 8)
    opened = life(tmp_path)
    ids = DurableSequencer(opened)

    def full(*_: object, **__: object) -> None:
        raise TierIOError(28, "No space left on device")

    monkeypatch.setattr(superblock, "write_superblock", full)
    given = []
    with pytest.raises(TierIOError):
        while True:
            given.append(ids.take())
    assert max(given) == 8
    opened.close(None)


def _recording(callers: list[str], real: Callable[[StateDir, int], None]) -> Callable[[StateDir, int], None]:
    def reserve(self: StateDir, mark: int) -> None:
        callers.append(threading.current_thread().name)
        real(self, mark)

    return reserve


def test_a_history_is_kept_over_all_lives_of_a_state_and_by_no_other(tmp_path: Path) -> None:
    one, other = life(tmp_path / "one"), life(tmp_path / "other")
    history = one.identity.history
    assert other.identity.history != history
    other.close(None)
    for last in (5, None, None):
        one.close(last)
        one = life(tmp_path / "one")
        assert one.identity.history == history
    one.close(None)
