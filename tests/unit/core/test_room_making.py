"""Making room: where it is found, and that what is promised exists."""

from kvtierd.core.ids import Tier
from kvtierd.core.policy import Policy
from tests.unit.core.bench import DEVICE, DISK, HOST, Bench


def test_a_block_on_its_way_up_to_host_is_not_sent_down_there_besides() -> None:
    bench = Bench(device=1, host=2, disk=1, recovered=[("a", None, 35)])
    bench.acquire("a", tier=DEVICE)
    bench.acquire("a", tier=HOST)
    bench.land_one()
    assert bench.where("a") == {DEVICE, DISK}
    bench.end()
    assert bench.make_room(DEVICE, 1) in bench.grants


def test_an_ancestor_promised_room_on_disk_is_not_thought_to_have_some_on_host() -> None:
    """The child may go to disk only, with its parent; the parent by itself to host, where there is no room."""
    policy = Policy(thresholds={(Tier.DEVICE, Tier.HOST): 50})
    bench = Bench(device=2, host=1, disk=2, policy=policy, recovered=[("x", None, 35), ("y", None, 35)])
    bench.store("h", HOST)
    bench.put("p", priority=60)
    bench.put("c", under="p")
    assert bench.make_room(DEVICE, 2) in bench.grants
    assert (bench.where("p"), bench.where("c")) == ({DISK}, {DISK})


def test_more_slots_than_victims_may_wait_for_room_below_are_reserved_all_the_same() -> None:
    bench = Bench(device=8, host=4, disk=16, policy=Policy(waiting_victims=2, reserve_max=0))
    bench.put("abcd", HOST)
    bench.put("efghijkl")
    assert bench.make_room(DEVICE, 8) in bench.grants
    assert bench.stored() == "abcdefghijkl"


def test_room_for_new_blocks_is_not_made_by_dropping_the_chain_that_they_follow() -> None:
    bench = Bench(host=4)
    bench.put("abc", HOST)
    bench.put("x", HOST)
    assert bench.reserve(HOST, 1, after="c") in bench.grants
    assert bench.reserve(HOST, 1, after="c") in bench.refusals
    assert bench.stored() == "abc"


def test_the_chain_that_new_blocks_follow_may_go_down() -> None:
    bench = Bench(host=1, disk=2)
    bench.put("a", HOST)
    assert bench.make_room(HOST, 1, after="a") in bench.grants
    assert bench.where("a") == {DISK}
