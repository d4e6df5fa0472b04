"""The files of the log: what comes back of them, after damage and deletion, too."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.event_log import segments
from kvtierd.event_log.segments import LogSegments
from tests.unit.event_log.runs import MB, held, ids, run


def files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def test_runs_come_back_as_they_were(tmp_path: Path) -> None:
    log = LogSegments(tmp_path / "log", MB)
    plain, with_tokens = run(1, 3), run(4, 9, private=100)
    log.append([plain, with_tokens], 1)
    assert log.read(0, 1, 1024) == plain
    assert log.read(3, 1, 1024) == with_tokens
    assert ids(log.read(0, MB, 1024)) == list(range(1, 10))
    again = LogSegments(tmp_path / "log", MB)
    assert (again.last, again.read(3, 1, 1024)) == (9, with_tokens)
    assert stat.S_IMODE(os.stat(tmp_path / "log").st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in files(tmp_path / "log")} == {0o600}


def test_a_piece_is_bounded_and_ends_at_a_hole_and_with_its_epoch(tmp_path: Path) -> None:
    log = LogSegments(tmp_path / "log", MB)
    log.append([run(1, 5), run(6, 10)], 1)
    log.append([run(21, 30), run(31, 40)], 1)
    log.append([run(41, 42, epoch=2)], 41)

    def read(cursor: int) -> list[int]:
        return ids(log.read(cursor, MB, 1024))

    assert read(0) == list(range(1, 11))
    assert read(7) == list(range(6, 11)), "a record is told whole"
    assert read(10) == read(15) == list(range(21, 41))
    assert read(40) == [41, 42]
    assert read(42) == []
    assert ids(log.read(0, MB, 9)) == list(range(1, 6))
    assert ids(log.read(0, 1, 1024)) == list(range(1, 6))


def test_the_oldest_files_go_for_size_and_what_went_is_known(tmp_path: Path) -> None:
    log = LogSegments(tmp_path / "log", MB)
    for number in range(1, 401):
        log.append([run(number, number, size=10_000, time_ns=number)], 1)
        assert sum(each.stat().st_size for each in files(tmp_path / "log")) <= MB
    numbers = held(log)
    assert numbers == list(range(numbers[0], 401))
    assert 70 < len(numbers) < 110
    gone = numbers[0] - 1
    for each in (log, LogSegments(tmp_path / "log", MB)):
        assert (each.files[0].first, each.files[0].before, each.files[0].before_ns) == (numbers[0], gone, gone)


def test_many_lives_do_not_make_files_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MOST_SEGMENTS", 5)
    for number in range(1, 20):
        LogSegments(tmp_path / "log", MB).append([run(number, number)], 1)
    assert held(LogSegments(tmp_path / "log", MB)) == [15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda data: data[:-1], [1, 2, 4]),  # a write that a kill cut short
        (lambda data: data + b"half a record", [1, 2, 3, 4]),
        (lambda data: data[:-100] + b"x" + data[-99:], [1, 2, 4]),
        (lambda data: data[:64] + bytes(8) + data[72:], [4]),
        (lambda data: b"not a log" + data[9:], [4]),
        (lambda data: b"", [4]),
    ],
)
def test_what_is_damaged_is_a_hole(tmp_path: Path, spoil: Callable[[bytes], bytes], left: list[int]) -> None:
    log = LogSegments(tmp_path / "log", MB)
    for number in (1, 2, 3):
        log.append([run(number, number, size=5000)], 1)
    (file,) = files(tmp_path / "log")
    file.write_bytes(spoil(file.read_bytes()))
    again = LogSegments(tmp_path / "log", MB)
    again.append([run(4, 4)], 1)
    assert held(again) == left
    assert held(LogSegments(tmp_path / "log", MB)) == left


def test_no_flipped_bit_is_told(tmp_path: Path) -> None:
    log = LogSegments(tmp_path / "log", MB)
    written = {number: run(number, number, size=20) for number in (1, 2, 3)}
    for one in written.values():
        log.append([one], 1)
    (file,) = files(tmp_path / "log")
    sound = file.read_bytes()
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        found, cursor = LogSegments(tmp_path / "log", MB), 0
        while (told := found.read(cursor, 1, 1)) is not None:
            assert told == written[told.last]
            cursor = told.last
        assert cursor < 3, "what is damaged, and what stands behind it, is missing"


def test_a_write_that_fails_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogSegments(tmp_path / "log", MB)
    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            with pytest.raises(OSError, match="full"):
                log.append([run(number, number)], 1)
        assert held(log) == list(range(1, number))
        log.append([run(number, number)], 1)
        assert held(log) == held(LogSegments(tmp_path / "log", MB)) == list(range(1, number + 1))


def fails(fd: int) -> None:
    raise OSError(28, "full")


def test_a_time_is_found_although_the_clock_jumped(tmp_path: Path) -> None:
    """Events of times 100, 200, then the clock is set back, 50, 120, then right again, 300."""
    log = LogSegments(tmp_path / "log", MB)
    for first, time_ns in ((1, 100), (11, 200), (21, 50), (31, 120), (41, 300)):
        log = LogSegments(tmp_path / "log", MB)  # each in a file of its own
        log.append([run(first, first + 9, time_ns=time_ns)], 1)
    found = {time_ns: log.since(time_ns) for time_ns in (0, 100, 101, 200, 201, 300, 301)}
    assert found == {0: 1, 100: 1, 101: 11, 200: 11, 201: 41, 300: 41, 301: None}


def test_a_file_that_is_deleted_while_it_is_read_is_no_error(tmp_path: Path) -> None:
    log = LogSegments(tmp_path / "log", MB)
    log.append([run(1, 3)], 1)
    files(tmp_path / "log")[0].unlink()
    assert log.read(0, MB, 1024) is None
    assert log.since(0) is None


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 2)), max_size=30))
def test_like_a_list_that_forgets_its_beginning(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, int]]
) -> None:
    """``steps``: events of a run, whether the log is opened anew before, ids that are left out."""
    path = tmp_path_factory.mktemp("log")
    log, last = LogSegments(path, MB), 0
    expected: list[int] = []
    for count, anew, gap in steps:
        log = LogSegments(path, MB) if anew else log
        last += gap
        log.append([run(number, number, size=5000) for number in range(last + 1, last + count + 1)], 1)
        expected += range(last + 1, last + count + 1)
        last += count
    told = held(log)
    assert told == expected[len(expected) - len(told) :]
    assert len(told) >= min(len(expected), 90)
    for cursor in (0, last // 2, max(0, last - 1), last):
        assert held(log, cursor, MB) == [number for number in told if number > cursor]
