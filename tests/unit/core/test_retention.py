"""For how long a block keeps its priority: the rules of ``core/retention.py``, one by one."""

from collections.abc import Callable

import pytest

from kvtierd.core.events import Cause, EventType
from kvtierd.core.policy import Policy
from tests.unit.core.bench import DISK, HOST, Bench

A_CALL = 4
MS = 1_000_000


@pytest.mark.parametrize("later", [False, True], ids=["given with the block", "given later"])
def test_the_clock_starts_at_release(later: bool) -> None:
    bench = Bench(device=1)
    lease = bench.store("a") if later else bench.store("a", priority=80, duration_ms=1000)
    if later:
        bench.retain("a", 80, 1000)
    bench.pass_ms(5000)
    assert bench.priority("a") == 80
    bench.release(lease)
    bench.pass_ms(999)
    assert bench.priority("a") == 80
    bench.pass_ms(1)
    assert bench.priority("a") == 35


def test_the_last_hold_counts() -> None:
    bench = Bench(device=1)
    first = bench.store("a", priority=80, duration_ms=1000)
    second = bench.lease(bench.acquire("a")[0])
    bench.release(first)
    bench.pass_ms(1000)
    assert bench.priority("a") == 80
    bench.release(second)
    bench.pass_ms(1000)
    assert bench.priority("a") == 35


@pytest.mark.parametrize("use", [Bench.touch, Bench.tell_read])
def test_a_use_before_the_deadline_starts_the_clock_anew(use: Callable[[Bench, str], None]) -> None:
    bench = Bench(device=1)
    bench.put("a", priority=80, duration_ms=1000)
    bench.pass_ms(900)
    use(bench, "a")
    bench.pass_ms(900)
    assert bench.priority("a") == 80
    bench.now += 100 * MS
    use(bench, "a")
    assert bench.priority("a") == 35


@pytest.mark.parametrize(("late_ms", "left"), [(-1, "a"), (0, "b"), (5, "b"), (10, "b"), (11, "b")])
def test_an_eviction_looks_at_the_clock_without_a_tick(late_ms: int, left: str) -> None:
    bench = Bench(host=2)
    bench.put("a", HOST, priority=80, duration_ms=1000)
    bench.put("b", HOST, priority=50)
    bench.now += (1000 + late_ms) * MS
    bench.reserve(HOST, 1)
    assert bench.stored() == left


def test_what_expires_goes_to_the_tail_of_its_queue() -> None:
    bench = Bench(host=3)
    for name, priority in (("a", 80), ("b", 35), ("c", 35)):
        bench.put(name, HOST, priority=priority, duration_ms=1)
    bench.pass_ms(1)
    bench.reserve(HOST, 2)
    assert bench.stored() == "a"


def test_a_prefix_goes_to_the_tail_ahead_of_what_expired() -> None:
    """The parent outlives its child, whatever else is younger than the parent."""
    bench = Bench(host=3)
    bench.put("a", HOST)
    bench.put("b", HOST, under="a", priority=80, duration_ms=1)
    bench.put("x", HOST)
    bench.pass_ms(1)
    bench.reserve(HOST, 1)
    assert bench.stored() == "ab"


def test_a_child_holds_its_parent_up() -> None:
    """Nothing visible changes when the parent's own priority falls, and nothing is said; later both fall at once."""
    bench = Bench(device=2)
    bench.put("a", priority=80, duration_ms=1000)
    bench.put("b", under="a", priority=80, duration_ms=2000)
    since = len(bench.events)
    bench.pass_ms(1000)
    assert list(bench.said(since)) == []
    assert bench.priority("a") == 80
    bench.pass_ms(1000)
    assert list(bench.said(since)) == [(EventType.UPDATED, Cause.EXPIRED, "ba")]
    assert bench.priority("a") == bench.priority("b") == 35


def test_a_chain_that_expires_at_once_does_so_tail_first() -> None:
    bench = Bench(device=4)
    bench.put("abcd", priority=60, duration_ms=10)
    since = len(bench.events)
    bench.pass_ms(10)
    assert list(bench.said(since)) == [(EventType.UPDATED, Cause.EXPIRED, "dcba")]


def test_a_great_many_expire_in_slices() -> None:
    names = [chr(0x4E00 + n) for n in range(3 * A_CALL)]
    bench = Bench(host=len(names), policy=Policy(blocks_a_call=A_CALL))
    for name in names:
        bench.put(name, HOST, priority=50, duration_ms=10)
    since = len(bench.events)
    for passed_ms in (10, 0, 0):
        bench.pass_ms(passed_ms)
    assert [len(event.blocks) for event in bench.events[since:]] == [A_CALL] * 3
    assert "".join(blocks for _, _, blocks in bench.said(since)) == "".join(names)


# -- on disk ---------------------------------------------------------------------------------------------------------


def test_a_move_carries_duration_and_deadline() -> None:
    bench = Bench(host=1, disk=1)
    bench.put("a", HOST, priority=80, duration_ms=1000)
    bench.move("a", DISK)
    (item,) = bench.moves[0].items
    assert item.traits == (80, 1000, 1_000_000_000, None)


@pytest.mark.parametrize(
    ("deadline_ms", "left_ms"),
    [
        pytest.param(300, 300, id="it ran when the block was written"),
        pytest.param(0, 1000, id="the block was held when it was written"),
        pytest.param(1, 1, id="it ended while nobody ran"),
    ],
)
def test_a_recovered_clock_goes_on(deadline_ms: int, left_ms: int) -> None:
    retained = {"a": (1000, deadline_ms * MS)}
    bench = Bench(disk=2, recovered=[("a", None, 80), ("b", None, 80)], retained=retained)
    bench.pass_ms(left_ms - 1)
    assert bench.priority("a") == 80
    bench.pass_ms(1)
    assert (bench.priority("a"), bench.priority("b")) == (35, 80)
