"""The simulated fleet on traces small enough to count by hand: a word is a request, each of its letters a block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.core.check import check
from kvtierd.core.errors import BadArgument
from kvtierd.core.ids import Key, Tier
from kvtierd.core.policy import RemotePolicy
from kvtierd.simulate.fleet import ROUTERS, FleetShape, SimulatedFleet, simulate
from kvtierd.simulate.host import GROUP, Host

HOST, DISK = Tier.HOST, Tier.DISK


def chain(word):
    """Each block is named by all letters up to its own."""
    return [Key(word[:end].encode().ljust(32)) for end in range(1, len(word) + 1)]


def run(words, *, hosts=1, host=4, disk=0, **more):
    slots = {HOST: host} | ({DISK: disk} if disk else {})
    return simulate(FleetShape(hosts, slots, **more), [chain(word) for word in words.split()])


def found(report):
    return report.local, report.peers, report.remote


# -- one host --------------------------------------------------------------------------------------------------------


def test_a_host_finds_what_it_stored_until_that_left():
    report = run("abc abd xyz abc")
    # abd finds ab and makes four blocks. xyz takes three slots: d, and with it nothing needs b any more than c.
    assert (report.asked, report.local, report.evicted) == (12, 2 + 0 + 1, 3 + 2)


def test_the_disk_keeps_what_leaves_memory():
    assert found(run("abc xyz abc", host=3)) == (0, 0, 0)
    report = run("abc xyz abc", host=3, disk=6)
    assert (found(report), report.evicted) == ((3, 0, 0), 0)


def test_a_prompt_is_cut_to_the_memory_of_a_host():
    report = run("abcd abcd", host=2, disk=8)
    assert (report.asked, report.local) == (4, 2)
    with pytest.raises(BadArgument, match="chain = 3: at most 2 blocks"):
        Host({HOST: 2}).request(chain("abc"))


# -- routers ---------------------------------------------------------------------------------------------------------


def test_round_robin_sends_each_request_to_the_next_host():
    report = run("abc abc abc abd", hosts=2, router="round-robin")
    assert (found(report), report.requests) == ((3 + 2, 0, 0), [2, 2])


def test_a_prefix_is_followed_to_its_host():
    words = "abc xyz xyzw abcd"
    assert found(run(words, hosts=2, router="round-robin")) == (0, 0, 0)
    report = run(words, hosts=2, router="prefix")
    assert (found(report), report.requests, report.busiest) == ((3 + 3, 0, 0), [2, 2], 1.0)


def test_a_host_that_has_much_more_load_is_passed_over():
    """Nine requests for one prefix go to its host, the tenth to the other, which has it from then on."""
    report = run("ab " * 9, hosts=2)
    assert (report.requests, report.local, report.busiest) == ([9, 0], 16, 2.0)
    report = run("ab " * 20, hosts=2)
    assert (report.requests, report.local) == ([10, 10], 36)


def test_load_is_forgotten():
    """Of the 32 latest requests each host has 16 in the end, so eight more follow their prefix."""
    report = run("ab " * 9 + "xy ab " * 16 + "ab " * 8, hosts=2)
    assert (report.requests, report.local) == ([9 + 16 + 8, 16], 2 * (49 - 2))


# -- beside the host -------------------------------------------------------------------------------------------------


def test_peers_give_what_the_host_does_not_have():
    report = run("abc abcd abc abd", hosts=2, router="round-robin", peers=True)
    # abcd on the second host: abc from the first. abd there finds ab; nobody has d after ab.
    assert found(report) == (3 + 2, 3, 0)


def test_a_store_of_all_that_is_written_serves_every_host():
    report = run("abc abc abc abd", hosts=2, router="round-robin", remote=RemotePolicy.THROUGH)
    assert (found(report), report.put) == ((3 + 2, 0, 3), 4)


def test_what_a_peer_has_is_not_read_from_the_store():
    report = run("abc abc", hosts=2, router="round-robin", remote=RemotePolicy.THROUGH, peers=True)
    assert (found(report), report.put) == ((0, 3, 0), 3)


def test_a_store_of_what_leaves_gives_it_back():
    report = run("abc xyz abc", host=3, remote=RemotePolicy.EVICT)
    assert (found(report), report.put, report.evicted) == ((0, 0, 3), 6, 6)


def test_what_leaves_goes_to_the_store_with_all_that_it_stands_on():
    """The first host keeps a; the second one could not use bcd without it."""
    words = "abcd wxyz efg abcd"
    evicted = run(words, hosts=2, router="round-robin", remote=RemotePolicy.EVICT)
    assert (found(evicted), evicted.evicted, evicted.put) == ((0, 0, 4), 3 + 4, 4 + 4)
    both = run(words, hosts=2, router="round-robin", remote=RemotePolicy.EVICT, peers=True)
    assert found(both) == (0, 1, 3)
    through = run(words, hosts=2, router="round-robin", remote=RemotePolicy.THROUGH)
    assert found(through) == (0, 0, 4)


def test_a_store_of_second_uses_has_only_those():
    report = run("abc abc xyz abc xyz", host=3, remote=RemotePolicy.SECOND_USE)
    assert (found(report), report.put) == ((3, 0, 3), 3)


# -- against one host ------------------------------------------------------------------------------------------------


def test_one_host_with_all_the_memory_has_neither_copies_nor_strangers():
    words = "abc xyz abc xyz abcd"
    shape = FleetShape(2, {HOST: 3}, "round-robin", RemotePolicy.THROUGH, peers=True)
    pooled = simulate(shape.pooled(), map(chain, words.split()))
    assert (found(pooled), pooled.put, pooled.requests) == ((3 + 3 + 3, 0, 0), 0, [5])
    assert pooled.asked == simulate(shape, map(chain, words.split())).asked == 15, "cut as for one of the hosts"


WORDS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=40)


@settings(max_examples=150)
@given(WORDS, st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.sampled_from(sorted(ROUTERS)), st.booleans(),
       st.sampled_from([None, *RemotePolicy]))  # fmt: skip
def test_whatever_the_fleet_nothing_is_found_twice_or_invented(words, hosts, host, disk, router, peers, remote):
    slots = {HOST: host} | ({DISK: disk} if disk else {})
    fleet = SimulatedFleet(FleetShape(hosts, slots, router, remote, peers))
    seen: set[Key] = set()
    ever = 0
    for word in words:
        blocks = chain(word)[:host]
        ever += sum(block in seen for block in blocks)
        seen.update(blocks)
        fleet.request(chain(word))
    report = fleet.report
    assert sum(report.requests) == len(words)
    assert min(found(report)) >= 0
    assert sum(found(report)) <= ever
    everywhere = remote is RemotePolicy.THROUGH or (remote is RemotePolicy.EVICT and peers)
    assert sum(found(report)) == ever or not everywhere, "no block is lost where one is always somewhere"
    stored = 0
    for each in fleet.hosts:
        check(each.core)
        stored += len(each.core.listing(GROUP, 0, 1000).rows)
    assert stored == report.asked - report.local - report.evicted
