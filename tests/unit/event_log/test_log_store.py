"""The log's file: what went in comes out, or is a hole; the oldest goes first; no clock deletes what is not old."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.event_log.directory import open_store
from kvtierd.event_log.runs import LoggedRun, decode, encode, key_of
from kvtierd.event_log.store import PIECE_EVENTS, EventStore
from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk.superblock import SUPERBLOCK, write_superblock
from tests.unit.event_log.log_parts import DAY_NS, MB, FakeTime, held, ids, opened, run


def fill(store: EventStore, first: int, count: int, size: int = 40_000) -> int:
    for number in range(first, first + count):
        store.append([run(number, number, size=size)], 1)
    return first + count - 1


def damage(path: Path, spoil: Callable[[bytes], bytes], index: int) -> None:
    """Changes the record of that index behind the store's back."""
    with lmdb.open(str(path), max_dbs=3, map_size=16 * MB, lib_version=0) as env:
        runs = env.open_db(b"runs")
        with env.begin(write=True) as txn:
            key, value = list(txn.cursor(runs))[index]
            txn.put(key, spoil(value), db=runs)


def test_runs_come_back_as_they_were(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    with_tokens = run(4, 9, private=100)
    store.append([run(1, 3), with_tokens], 1)
    found = store.after(0, MB)
    assert found is not None
    assert (found.epoch, found.first, found.last, ids(found)) == (1, 1, 9, list(range(1, 10)))
    assert found.private == run(1, 3).body + with_tokens.private
    assert store.after(9, MB) is None
    store.close()


def test_a_reader_is_served_from_any_id(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    store.append([run(1, 5), run(6, 10)], 1)
    store.append([run(21, 30, epoch=1)], 1)
    for cursor in range(31):
        assert held(store, cursor) == [number for number in (*range(1, 11), *range(21, 31)) if number > cursor]
    store.close()


def test_a_piece_ends_at_a_hole_and_where_an_epoch_ends(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    store.append([run(1, 5)], 1)
    store.append([run(8, 9)], 1)
    store.append([run(10, 12, epoch=2)], 10)
    pieces = [store.after(cursor, MB) for cursor in (0, 5, 9)]
    assert [(piece.epoch, piece.first, piece.last) for piece in pieces if piece] == [(1, 1, 5), (1, 8, 9), (2, 10, 12)]
    assert store.extent.epochs == ((1, 1), (10, 2))
    store.close()


def test_a_piece_of_small_events_is_no_longer_than_the_loop_can_bear(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    store.append([run(first, first + 99) for first in range(1, 3001, 100)], 1)
    piece = store.after(0, 4 * MB)
    assert piece is not None
    assert PIECE_EVENTS // 2 < piece.count <= PIECE_EVENTS
    assert held(store, piece=4 * MB) == list(range(1, 3001))
    store.close()


def test_ids_only_rise(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    store.append([run(5, 9)], 1)
    with pytest.raises(ValueError, match="5"):
        store.append([run(5, 6)], 1)
    assert held(store) == [5, 6, 7, 8, 9]
    store.close()


def test_the_file_stays_within_its_bound_and_the_oldest_goes_first(tmp_path: Path) -> None:
    store = opened(tmp_path / "log", max_bytes=4 * MB)
    last = fill(store, 1, 400)
    numbers = held(store)
    assert numbers == list(range(numbers[0], last + 1))
    assert len(numbers) > 60, "three quarters of the room, and 41 kB each"
    assert (tmp_path / "log" / "data.mdb").stat().st_size <= 4 * MB
    assert store.extent.place.compacted == numbers[0] - 1 == (store.extent.oldest or 0) - 1
    store.close()


def test_a_reader_in_the_way_of_reuse_does_not_break_the_bound(tmp_path: Path) -> None:
    """Pages that a reader still sees cannot be written again: the map is full long before it is."""
    store = opened(tmp_path / "log", max_bytes=2 * MB)
    last = fill(store, 1, 30)
    with store._env.begin():
        last = fill(store, last + 1, 300)
        assert held(store)[-1] == last
    assert fill(store, last + 1, 50) == held(store)[-1]
    assert (tmp_path / "log" / "data.mdb").stat().st_size <= 2 * MB
    store.close()


def test_a_run_larger_than_the_log_is_a_hole(tmp_path: Path) -> None:
    store = opened(tmp_path / "log", max_bytes=MB)
    assert store.append([run(1, 1), run(2, 2, size=MB), run(3, 3)], 1) == 1
    assert held(store) == [1, 3]
    store.close()


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), [1, 3]),
        (lambda value: bytes([value[0] ^ 64]) + value[1:], [1, 3]),
        (lambda value: value[:20], [1, 3]),
        (lambda value: b"", [1, 3]),
        (lambda value: value + b"x", [1, 3]),
        (lambda value: encode(run(9, 9), 0, 0), [1, 3]),
    ],
)
def test_a_damaged_record_is_a_hole(tmp_path: Path, spoil: Callable[[bytes], bytes], left: list[int]) -> None:
    store = opened(tmp_path / "log")
    for number in (1, 2, 3):
        store.append([run(number, number, time_ns=number * 100, size=5000)], 1)
    store.close()
    damage(tmp_path / "log", spoil, 1)
    store = opened(tmp_path / "log")
    assert held(store) == left
    assert [store.since(time_ns) for time_ns in (1, 150, 250, 350)] == [1, 3, 3, None]
    assert store.append([run(4, 4)], 1) == 0
    store.close()


def test_a_key_that_is_none_is_an_error_of_the_log_and_no_other(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    store.append([run(1, 1), run(3, 3)], 1)
    store.close()
    with lmdb.open(str(tmp_path / "log"), max_dbs=3, map_size=16 * MB, lib_version=0) as env:
        runs = env.open_db(b"runs")
        with env.begin(write=True) as txn:
            txn.put(key_of(2) + b"x", b"", db=runs)
    store = opened(tmp_path / "log")
    with pytest.raises(TierIOError, match="a key of 9 bytes"):
        store.after(1, MB)
    store.close()


def test_a_record_stands_only_under_its_own_key() -> None:
    record = encode(run(7, 9), 0, 0)
    assert decode(7, record) is not None
    assert decode(6, record) is None
    assert len(key_of(7)) == 8


def test_what_is_old_goes_with_the_next_append_or_when_asked(tmp_path: Path) -> None:
    time = FakeTime()
    store = opened(tmp_path / "log", time)
    store.append([run(1, 1)], 1)
    time.pass_(4 * DAY_NS)
    store.append([run(2, 2)], 1)
    assert store.oldest_age_ns == 4 * DAY_NS
    time.pass_(4 * DAY_NS)
    store.append([run(3, 3)], 1)
    assert held(store) == [2, 3]
    time.pass_(5 * DAY_NS)
    while store.tidy():
        pass
    assert held(store) == [3]
    assert store.extent.place.compacted == 2
    store.close()


def test_a_year_that_the_wall_clock_jumps_deletes_nothing(tmp_path: Path) -> None:
    time = FakeTime()
    store = opened(tmp_path / "log", time)
    store.append([run(1, 1)], 1)
    for jump in (365 * DAY_NS, -700 * DAY_NS):
        time.wall_ns += jump
        store.append([run(store.extent.place.last + 1, store.extent.place.last + 1)], 1)
        assert not store.tidy()
    store.close()
    time.wall_ns += 365 * DAY_NS  # while no daemon ran, but the system did
    store = opened(tmp_path / "log", time)
    assert not store.tidy()
    assert held(store) == [1, 2, 3]
    store.close()


@pytest.mark.parametrize(("away_ns", "left"), [(8 * DAY_NS, []), (DAY_NS, [1]), (-DAY_NS, [1])])
def test_over_a_reboot_the_wall_clock_says_how_long_it_was(tmp_path: Path, away_ns: int, left: list[int]) -> None:
    time = FakeTime()
    store = opened(tmp_path / "log", time)
    store.append([run(1, 1)], 1)
    store.close()
    store = opened(tmp_path / "log", FakeTime(boot_ns=5, wall_ns=time.wall_ns + away_ns, boot_id=b"c" * 16))
    while store.tidy():
        pass
    assert held(store) == left
    assert store.oldest_age_ns >= 0
    store.close()


def test_a_time_is_found_although_the_clock_jumped(tmp_path: Path) -> None:
    """Events of times 100, 200, then the clock is set back, 50, 120, then right again, 300."""
    store = opened(tmp_path / "log")
    for first, time_ns in ((1, 100), (11, 200), (21, 50), (31, 120), (41, 300)):
        store.append([run(first, first + 9, time_ns=time_ns)], 1)
    expected = {0: 1, 100: 1, 101: 11, 200: 11, 201: 41, 300: 41, 301: None}
    assert {time_ns: store.since(time_ns) for time_ns in expected} == expected
    store.close()


def test_a_short_file_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    fill(store, 1, 20)
    store.close()
    os.truncate(tmp_path / "log" / "data.mdb", 8 * 4096)
    with pytest.raises(DamagedDirectory, match="shorter"):
        opened(tmp_path / "log")


def reopened(path: Path) -> EventStore:
    return open_store(path, 4 * MB, DAY_NS, FakeTime().clocks, lambda store: None)


def test_it_is_private(tmp_path: Path) -> None:
    store = reopened(tmp_path / "deep" / "log")
    store.append([run(1, 1, private=10)], 1)
    store.close()
    assert stat.S_IMODE((tmp_path / "deep" / "log").stat().st_mode) == 0o700
    files = sorted((tmp_path / "deep" / "log").iterdir())
    assert [file.name for file in files] == [SUPERBLOCK, "data.mdb", "lock.mdb"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def foreign(path: Path) -> None:
    (path / SUPERBLOCK).unlink()


def newer(path: Path) -> None:
    text = (path / SUPERBLOCK).read_bytes()
    (path / SUPERBLOCK).write_bytes(text.replace(b"event-log 1", b"event-log 9"))


def another(path: Path) -> None:
    write_superblock(path, "cache", {})


def no_lmdb(path: Path) -> None:
    (path / "data.mdb").write_bytes(b"x" * 100_000)


def short(path: Path) -> None:
    os.truncate(path / "data.mdb", 2 * 4096)


def a_file(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_text("hello")


@pytest.mark.parametrize("spoil", [foreign, newer, another, no_lmdb, short, a_file])
def test_what_cannot_be_a_log_is_set_aside_untouched(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "log"
    store = reopened(path)
    fill(store, 1, 20)
    store.close()
    spoil(path)
    before = contents(path)
    store = reopened(path)
    assert held(store) == []
    store.append([run(1, 1)], 1)
    store.close()
    assert (
        contents(tmp_path / "log.aside-1").items()
        >= {name: data for name, data in before.items() if name != "lock.mdb"}.items()
    )
    again = reopened(path)
    assert held(again) == [1], "the new one is gone on with"
    again.close()


def test_the_newest_that_were_set_aside_stay_and_what_is_no_log_stays_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(1, 7):
        store = reopened(path)
        store.append([run(number, number)], 1)
        store.close()
        no_lmdb(path)
        if number == 2:
            (path / "thesis.tex").write_text("the only copy")
        if number == 3:
            a_file(path)
    (tmp_path / "log.aside-x").mkdir()
    (tmp_path / "log.aside-1000").symlink_to(tmp_path)
    reopened(path).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "log",
        *("log.aside-1000", "log.aside-1001"),
        *("log.aside-2", "log.aside-3", "log.aside-4", "log.aside-5"),
        "log.aside-x",
    ]
    assert (tmp_path / "log.aside-2" / "thesis.tex").read_text() == "the only copy"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else {"": path.read_bytes()}


def test_an_empty_directory_and_an_unfinished_one_become_logs(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir(0o700)
    (tmp_path / "log" / f"{SUPERBLOCK}.new").write_bytes(b"kvt")
    store = reopened(tmp_path / "log")
    store.append([run(1, 1)], 1)
    assert not (tmp_path / "log.aside-1").exists()
    store.close()


def test_a_directory_that_cannot_be_made_is_an_io_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierIOError):
        reopened(tmp_path / "file" / "log")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4), st.integers(1, 40), st.sampled_from([10, 3000, 60_000])),
        st.tuples(st.just("hole"), st.integers(1, 50), st.just(0), st.just(0)),
        st.tuples(st.just("epoch"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.just(0), st.just(0)),
        st.tuples(st.just("clock"), st.integers(-5, 5), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_like_a_list_that_forgets_its_beginning(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("log")
    time = FakeTime()
    store = opened(path, time, max_bytes=2 * MB)
    model: list[LoggedRun] = []
    following, epoch, epoch_first = 1, 1, 1
    for what, number, events, size in steps:
        match what:
            case "append":
                runs = []
                for _ in range(number):
                    runs.append(
                        run(following, following + events - 1, epoch=epoch, time_ns=time.wall_ns, size=size // events)
                    )
                    following += events
                assert store.append(runs, epoch_first) == 0
                model += runs
            case "hole":
                following += number
            case "epoch":
                epoch, epoch_first = epoch + 1, following
            case "reopen":
                store.close()
                store = opened(path, time, max_bytes=2 * MB)
            case "wait":
                time.pass_(number * DAY_NS)
            case "clock":
                time.wall_ns += number * DAY_NS
    all_ids = [number for each in model for number in range(each.first, each.last + 1)]
    kept = held(store)
    assert kept == all_ids[len(all_ids) - len(kept) :], "only the beginning is gone"
    assert not model or kept, "the newest is never deleted for room"
    assert store.extent.oldest == (kept[0] if kept else None)
    assert store.extent.place.last == (all_ids[-1] if all_ids else 0)
    by_time = {number: each.latest_ns for each in model for number in range(each.first, each.last + 1)}
    for time_ns in {each.latest_ns + offset for each in model for offset in (-1, 0, 1)}:
        assert store.since(time_ns) == next((number for number in kept if by_time[number] >= time_ns), None)
    store.close()
