"""Copies downwards that nobody waits for: write-through, selective writes, clean slots."""

import pytest

from kvtierd.core.events import Cause
from kvtierd.core.policy import Policy, WriteMode
from tests.unit.core.bench import BOB, DEVICE, DISK, GROUP, HOST, Bench, keys

THROUGH = Policy(write_policy=WriteMode.THROUGH)
SELECTIVE = Policy(write_policy=WriteMode.SELECTIVE)


# -- write-through ----------------------------------------------------------------------------------------------------


def test_without_a_disk_the_host_is_the_lowest() -> None:
    bench = Bench(device=4, host=4, policy=THROUGH)
    bench.put("ab")
    bench.land()
    assert bench.where("b") == {DEVICE, HOST}


def test_a_promotion_keeps_the_host_copy() -> None:
    bench = Bench(device=1, host=2, policy=THROUGH)
    bench.put("a")
    bench.land()
    bench.put("b")
    bench.land()
    assert bench.where("a") == {HOST}
    bench.acquire("a")
    bench.land()
    assert bench.where("a") == {DEVICE, HOST}


def test_what_policy_keeps_up_is_not_written_through() -> None:
    bench = Bench(device=4, disk=4, policy=THROUGH)
    bench.put("a", priority=29)
    bench.put("b", priority=30)
    assert [name for name, *_ in bench.in_flight()] == ["b"]


def test_writing_through_drops_the_least_recently_used_below() -> None:
    bench = Bench(device=4, disk=2, policy=THROUGH)
    for name in "abc":
        bench.put(name)
        bench.land()
    assert bench.where("a") == {DEVICE}
    assert bench.where("c") == {DEVICE, DISK}


def test_many_blocks_go_down_a_few_at_a_time() -> None:
    names = [chr(0x4E00 + n) for n in range(300)]
    bench = Bench(host=300, disk=400, policy=THROUGH)
    for name in names:
        bench.put(name, HOST)
    assert len(bench.in_flight()) == 256
    bench.land()
    assert all(bench.where(name) == {HOST, DISK} for name in names)


def test_a_reservation_comes_first() -> None:
    """The disk has one slot to give: who demotes for it gets it, though a block waits to be written through."""
    bench = Bench(device=2, host=2, policy=THROUGH)
    bench.store("ab", HOST)
    bench.put("c")
    bench.land()
    assert bench.where("c") == {DEVICE}


# -- selective ---------------------------------------------------------------------------------------------------------


def test_selective_drops_what_was_used_once() -> None:
    bench = Bench(device=1, host=1, policy=SELECTIVE)
    bench.put("a")
    bench.reserve(DEVICE, 1)
    assert bench.stored() == ""
    assert bench.moves == []


def test_selective_demotes_what_was_used_twice() -> None:
    bench = Bench(device=1, host=1, policy=SELECTIVE)
    bench.put("a")
    bench.touch("a")
    bench.land()
    bench.make_room(DEVICE, 1)
    assert bench.where("a") == {HOST}


def test_storing_again_what_is_there_is_a_second_use() -> None:
    bench = Bench(device=3, host=3, policy=SELECTIVE)
    bench.put("a")
    grant = bench.blank(DEVICE, 1)
    bench.commit(grant, [("a", None, 35)])
    bench.land()
    assert bench.where("a") == {DEVICE, HOST}


def test_what_was_found_on_disk_is_worth_keeping() -> None:
    bench = Bench(device=1, host=1, disk=1, recovered=[("a", None, 35)], policy=SELECTIVE)
    (ticket,) = bench.acquire("a")
    bench.land()
    bench.release(bench.lease(ticket))
    bench.make_room(DEVICE, 1)
    assert HOST in bench.where("a")


# -- copies ahead of need ----------------------------------------------------------------------------------------------


def test_where_less_is_clean_than_demand_took_the_next_to_go_are_copied_down() -> None:
    bench = Bench(device=10, host=20, policy=Policy(clean_most=0.5))
    for name in "abcde":
        bench.put(name)
    assert bench.moves == []
    bench.put("f")
    assert bench.in_flight() == [(name, DEVICE, HOST, Cause.WATERMARK) for name in "ab"]
    bench.land()
    assert [bench.where(name) for name in "abc"] == [{DEVICE, HOST}] * 2 + [{DEVICE}]


def test_what_a_burst_took_is_not_kept_ready_for_ever() -> None:
    bench = Bench(host=100, disk=200, policy=Policy(clean_most=0.5))
    for number in range(40):
        bench.put(chr(0x4E00 + number), HOST)
    for _ in range(40):
        bench.pass_ms(1000)
    for number in range(40, 90):
        bench.put(chr(0x4E00 + number), HOST)
        bench.pass_ms(1000)
    assert bench.moves == []


def test_a_chain_is_copied_root_first_into_one_piece_of_the_disk() -> None:
    bench = Bench(host=8, disk=16, policy=Policy(clean_most=1.0))
    bench.put("abcdefg", HOST)
    copied = [item for move in bench.moves for item in move.items]
    assert [item.key for item in copied] == keys("abcdefg")
    assert [item.dst for item in copied] == list(range(7))


def test_a_disk_gives_up_what_is_hot_above_before_what_is_about_to_come_down() -> None:
    bench = Bench(host=8, disk=4, policy=Policy(clean_most=1.0))
    for name in "abcdefgh":
        bench.put(name, HOST)
        bench.land()
    bench.touch("a", HOST)
    bench.put("i", HOST)
    bench.land()
    assert bench.where("a") == {HOST}
    assert [bench.where(name) for name in "cdef"] == [{HOST, DISK}] * 4


def test_a_clean_slot_is_had_without_a_copy() -> None:
    bench = Bench(device=4, host=8, policy=Policy(clean_most=0.5))
    for name in "abcd":
        bench.put(name)
        bench.land()
    ticket = bench.reserve(DEVICE, 2)
    assert ticket in bench.grants
    assert (bench.where("a"), bench.where("b")) == ({HOST}, {HOST})


def test_cleaning_does_not_chase_its_own_tail() -> None:
    """The host is full of what keeps device slots clean: no copy is given up for another of its kind."""
    bench = Bench(device=8, host=2, policy=Policy(clean_most=1.0))
    for name in "abcdefgh":
        bench.put(name)
        bench.land()
    assert sum(bench.where(name) == {DEVICE, HOST} for name in "abcdefgh") == 2
    bench.pass_ms(1000)
    assert bench.moves == []


def test_cleaning_sends_the_hosts_oldest_down_for_its_room() -> None:
    bench = Bench(device=2, host=2, disk=4, policy=Policy(clean_most=0.5))
    bench.put("ab", HOST)
    bench.put("x")
    bench.put("y")
    bench.land()
    assert {name: bench.where(name) for name in "xb"} == {"x": {DEVICE, HOST}, "b": {DISK}}


def land_some(bench: Bench) -> None:
    """As many moves as could come to an end here."""
    for _ in range(100):
        if bench.moves:
            bench.land_one()


def test_copies_ahead_make_no_room_of_each_other() -> None:
    bench = Bench(device=2, host=1, disk=2, policy=Policy(clean_most=1.0))
    for name, tier in (("a", DEVICE), ("b", DEVICE), ("c", HOST)):
        ticket = bench.reserve(tier, 1)
        land_some(bench)
        bench.commit(bench.grants[ticket].only, [(name, None, 35)])
        bench.release(bench.lease(ticket))
        land_some(bench)
    assert not bench.moves, "copies beget copies"


def test_copies_ahead_are_not_given_up_for_room_in_another_tier() -> None:
    """Else they are made anew as long as somebody waits, and he waits as long as they are made."""
    kept = {(DEVICE, HOST): 101, (DEVICE, DISK): 101}
    bench = Bench(device=1, host=11, disk=4, policy=Policy(clean_most=1.0, blocks_a_move=1, thresholds=kept))
    bench.put("a")
    bench.store("b", HOST, under="a")
    for name in "ijklmnopq":
        bench.put(name, HOST)
    assert bench.in_flight() == [(name, HOST, DISK, Cause.WATERMARK) for name in "ijkl"]
    ticket = bench.reserve(DEVICE, 1)
    for _ in range(100):
        if bench.moves:
            deletions = [number for number, move in enumerate(bench.moves) if move.dst is None]
            bench.land_one(deletions[0] if deletions else 0)
    assert not bench.moves, "copies beget copies"
    assert ticket in bench.refusals


def test_what_is_moved_down_goes_from_above_whatever_is_under_way() -> None:
    bench = Bench(device=4, host=4, disk=8, policy=Policy(clean_most=1.0))
    bench.put("abcd")
    assert {(src, dst) for _, src, dst, _ in bench.in_flight()} == {(DEVICE, HOST)}
    bench.move("abcd", DISK)
    while bench.moves:
        bench.land_one(len(bench.moves) - 1)
    assert [bench.where(name) for name in "abcd"] == [{DISK}] * 4


@pytest.mark.parametrize("policy", [THROUGH, SELECTIVE, Policy(clean_most=0.9)])
def test_an_edge_that_fails_does_not_hold_anything_up(policy: Policy) -> None:
    bench = Bench(device=2, host=2, policy=policy)
    for name in "abcdef":
        ticket = bench.reserve(DEVICE, 1)
        for _ in range(8):
            bench.fail_all()
        grant = bench.grants[ticket]
        bench.commit(grant.only, [(name, None, 35)])
        bench.release(bench.lease(ticket))
    assert bench.core.match([GROUP], keys("f")).blocks == 1


def test_a_block_that_goes_to_disk_for_its_child_is_not_sent_there_again() -> None:
    """Room for the parent is made in the host tier, by sending its child to disk, and is not enough."""
    bench = Bench(device=2, host=4, disk=16, policy=Policy(clean_most=0.5))
    parent = bench.store("a")
    bench.store("h")
    for name in "pqr":
        bench.put(name, HOST)
    bench.put("b", HOST, under="a")
    bench.land()
    bench.reserve(HOST, 3, BOB)
    bench.reserve(HOST, 1, BOB)
    bench.release(parent)
    going = [("r", HOST, Cause.CAPACITY), ("a", DEVICE, Cause.WRITE_THROUGH), ("b", HOST, Cause.CAPACITY)]
    assert bench.in_flight() == [(name, tier, DISK, cause) for name, tier, cause in going]
    bench.land()
    assert (bench.where("a"), bench.where("b")) == ({DEVICE, DISK}, {DISK})


def test_who_waits_for_room_is_counted_once_where_copies_go_ahead() -> None:
    bench = Bench(device=8, host=8, disk=16, policy=Policy(clean_most=0.125))
    parent = bench.store("a")
    bench.store("hijklmn")
    for name in "pqrstuvw":
        bench.put(name, HOST)
    bench.land()
    waiting = bench.reserve(HOST, 4, BOB)
    bench.release(parent)
    assert [name for name, tier, *_ in bench.in_flight() if tier is HOST] == [*"qrst"]
    bench.land()
    assert waiting in bench.grants
    assert bench.where("a") == {DEVICE, HOST}
