"""What a call does to a chain or a fan of any size: a slice of it, and the rest between other calls."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import pytest

from kvtierd.core.block import Block
from kvtierd.core.ids import TOKEN_BYTES, Key, Label, SlotId
from kvtierd.core.outcome import Outcome, SlotChanges
from kvtierd.core.policy import Policy, RemotePolicy, RemoteWrites
from kvtierd.core.removal import Drop
from kvtierd.core.transfers import BlockResult, ChainRequest, CommitItem
from tests.slot_rows import restated
from tests.unit.core.bench import ALICE, BOB, DEVICE, DISK, GROUP, HOST, Bench, key, keys, name_of

SLICE = 16
NAMES = "".join(chr(0x4E00 + number) for number in range(300))
ROOT, LEAF = NAMES[0], NAMES[-1]
SHAPES = {"chain": [None, *NAMES[:-1]], "fan": [None, *[ROOT] * 299]}


@pytest.fixture(params=SHAPES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return build(request.param)


def build(shape: str, host: int = 310, disk: int = 0) -> Bench:
    """A tree of 300 blocks in memory, under a policy of small slices."""
    bench = Bench(host=host, disk=disk, policy=Policy(blocks_a_call=SLICE))
    grant = bench.blank(HOST, len(NAMES))
    bench.commit(grant, [(name, parent, 35) for name, parent in zip(NAMES, SHAPES[shape], strict=True)])
    bench.end()
    bench.rest()
    return bench


def most_touched(bench: Bench, *calls: Callable[[], Outcome]) -> int:
    """Of how many blocks at most one of these calls, or a slice of what they leave, changes rank or existence."""
    return max(touched_by(bench, call) for call in chain(calls, rest(bench)))


def rest(bench: Bench) -> Iterator[Callable[[], Outcome]]:
    while bench.core.behind:
        yield lambda: bench.core.go_on(bench.now)


def touched_by(bench: Bench, call: Callable[[], Outcome]) -> int:
    before = ranks(bench)
    bench.apply(call())
    after = ranks(bench)
    return sum(before.get(block) != after.get(block) for block in before | after)


def ranks(bench: Bench) -> dict[Block, int]:
    return {block: block.rank for block in bench.core.windows[GROUP].state.index}


def test_a_touch_of_the_last_block(bench: Bench) -> None:
    assert most_touched(bench, lambda: bench.core.touch(GROUP, [key(LEAF)], bench.now)) <= SLICE


def test_a_commit_under_the_last_block(bench: Bench) -> None:
    grant = bench.blank(HOST, 1)
    before = ranks(bench)
    bench.commit(grant, [("new", LEAF, 90)])
    after = ranks(bench)
    assert sum(before.get(block) != rank for block, rank in after.items()) <= SLICE + 1
    assert most_touched(bench, lambda: bench.core.tick(bench.now)) <= SLICE
    assert bench.priority(ROOT) == bench.priority(LEAF) == 90


@pytest.mark.parametrize("priority", [90, 10])
def test_a_priority_of_the_last_block(bench: Bench, priority: int) -> None:
    bench.retain(LEAF, 60)
    bench.rest()
    given = [key(LEAF)], [priority], [0]
    assert most_touched(bench, lambda: bench.core.set_retention(GROUP, *given, bench.now)[1]) <= SLICE + 1
    assert bench.priority(ROOT) == max(priority, 35)


def test_priorities_along_a_whole_chain_are_passed_on_once() -> None:
    """Each given from the root down, higher than the one before."""
    bench = build("chain")
    told = len(bench.events)
    given = keys(NAMES[:60]), list(range(36, 96)), [0] * 60
    bench.apply(bench.core.set_retention(GROUP, *given, bench.now)[1])
    bench.rest()
    assert [bench.priority(name) for name in NAMES[:60]] == [95] * 60
    changes = sum(len(names) for _, _, names in bench.said(told))
    assert changes <= 3 * 60, "each block is told of its own, and of what climbs a slice at a time"


def test_the_priority_of_a_fan_is_that_of_its_highest_child() -> None:
    bench = build("fan")
    for number, name in enumerate(NAMES[1:60]):
        bench.retain(name, 41 + number)
    for name, highest in zip(NAMES[59:0:-1], [*range(98, 40, -1), 35], strict=True):
        bench.retain(name, 0)
        bench.rest()
        assert bench.priority(ROOT) == highest


def test_a_drop_of_the_root(bench: Bench) -> None:
    before, report = 300, None
    for drop in dropping(bench):
        left = len(bench.core.windows[GROUP].state.index)
        assert before - left <= SLICE
        before, report = left, drop.report
    assert report is not None and (report.dropped, bench.stored()) == (300, "")


def test_a_dry_run_counts_what_is_under_two_keys_once(bench: Bench) -> None:
    drop: Drop | None = None
    while drop is None or drop.report is None:
        drop, outcome = bench.core.drop(GROUP, keys(LEAF + ROOT), bench.now, dry_run=True, following=drop)
        bench.apply(outcome)
    assert drop.report.dropped == len(bench.stored()) == 300


def test_a_move_to_disk_takes_no_more_ancestors_along_than_a_call_may() -> None:
    bench = build("chain", disk=310)
    bench.move(NAMES[SLICE], DISK)
    bench.land()
    assert bench.where(NAMES[SLICE]) == {HOST}, "it and its ancestors are one too many"
    bench.move(NAMES[SLICE - 1], DISK)
    bench.land()
    bench.move(NAMES[SLICE], DISK)
    bench.land()
    assert bench.where(NAMES[SLICE]) == {DISK}


def dropping(bench: Bench) -> Iterator[Drop]:
    """A drop of the root, slice by slice."""
    drop: Drop | None = None
    while drop is None or drop.report is None:
        drop, outcome = bench.core.drop(GROUP, [key(ROOT)], bench.now, following=drop)
        bench.apply(outcome)
        yield drop


def until_it_goes(bench: Bench, slices: Iterator[Drop]) -> None:
    while len(bench.stored()) == 300:
        next(slices)


def test_who_gets_hold_of_a_part_while_it_goes_keeps_it_with_all_that_it_stands_on() -> None:
    bench = build("chain")
    until_it_goes(bench, slices := dropping(bench))
    _, outcome = bench.core.acquire(BOB, [GROUP], HOST, [ChainRequest(keys(NAMES[:200]))], bench.now)
    bench.apply(outcome)
    report = [*slices][-1].report
    assert report is not None and report.results == (BlockResult.HELD,)
    assert (report.dropped, bench.stored()) == (100, NAMES[:200])


def test_what_is_stored_below_while_it_goes_goes_too() -> None:
    bench = build("chain")
    until_it_goes(bench, slices := dropping(bench))
    bench.put("x", HOST, under=NAMES[100])
    report = [*slices][-1].report
    assert report is not None and report.results == (BlockResult.OK,)
    assert bench.stored() == ""


def test_bytes_lost_at_the_root_of_a_large_tree(bench: Bench) -> None:
    slot = bench.slot(ROOT, HOST)
    assert slot is not None
    assert most_touched(bench, lambda: bench.core.lose_bytes(GROUP, key(ROOT), HOST, slot, bench.now)) <= SLICE
    assert bench.stored() == ""


def loss(bench: Bench, name: str) -> tuple[SlotId, Sequence[SlotChanges]]:
    """Loses a block's bytes, whose descendants are left to go. Returns its slot, and what readers are told of slots."""
    slot = bench.slot(name, HOST)
    assert slot is not None
    outcome = bench.apply(bench.core.lose_bytes(GROUP, key(name), HOST, slot, bench.now))
    assert bench.core.behind
    return slot, outcome.slots


def test_nobody_gets_bytes_that_are_lost_while_what_needs_them_goes(bench: Bench) -> None:
    slot, told = loss(bench, ROOT)
    assert any(slot in changes.begun for changes in told), "nor does who reads without a call"
    (ticket,) = bench.acquire(ROOT, tier=HOST, min_blocks=1)
    assert ticket in bench.refusals


def test_nor_does_who_reads_without_a_call_while_they_are_being_copied() -> None:
    bench = Bench(host=4, disk=4, policy=Policy(blocks_a_call=2))
    bench.put("abcd", HOST)
    bench.rest()
    bench.move("a", DISK)
    assert bench.moves
    slot, told = loss(bench, "a")
    assert any(slot in changes.begun for changes in told)


def test_nor_does_who_joins_a_lease_over_them() -> None:
    bench = Bench(host=4, policy=Policy(blocks_a_call=2))
    lease = bench.store("abcd", HOST)
    bench.rest()
    bench.lose_bytes("a", HOST)
    assert bench.core.behind
    joined, outcome = bench.core.join(BOB, lease, bench.now)
    bench.apply(outcome)
    assert "a" not in [name_of(block.key) for block in joined.held]


def test_a_move_that_waits_for_room_gives_up_a_block_without_bytes() -> None:
    bench = Bench(device=1, host=4, policy=Policy(blocks_a_call=1))
    bench.put("abcd", HOST)
    bench.rest()
    lease = bench.blank(DEVICE, 1).lease
    assert lease is not None
    ticket = bench.move("a", DEVICE)
    bench.lose_bytes("a", HOST)
    assert bench.core.behind
    bench.release(lease)
    bench.rest()
    assert bench.grants[ticket].results == (False,)


def test_a_block_without_bytes_continues_no_chain() -> None:
    bench = Bench(host=3, policy=Policy(blocks_a_call=1))
    grant, tokens = bench.blank(HOST, 2), bytes(range(TOKEN_BYTES))
    assert grant.lease is not None
    root = CommitItem(grant.slots[0], key("a"), None, 35, label=Label(tokens=tokens))
    child = CommitItem(grant.slots[1], key("b"), key("a"), 35)
    bench.apply(bench.core.commit(ALICE, grant.lease, [root], bench.now)[1])
    bench.apply(bench.core.commit(ALICE, grant.lease, [child], bench.now)[1])
    assert bench.core.match([GROUP], [], tokens).partial is not None
    bench.lose_bytes("a", HOST)
    assert bench.core.behind
    assert bench.core.match([GROUP], [], tokens).partial is None


def test_a_restart_does_not_find_lost_bytes_that_somebody_holds() -> None:
    bench = Bench(host=4, policy=Policy(blocks_a_call=2))
    bench.store("abcd", HOST)
    bench.rest()
    slot, told = loss(bench, "a")
    assert any(slot in changes.disowned for changes in told)


@pytest.mark.parametrize("policy", RemotePolicy)
def test_lost_bytes_are_not_offered_to_a_store_while_what_needs_them_goes(policy: RemotePolicy) -> None:
    """Its generation is odd before and after it is read, so nobody would see that they are not the block's."""
    bench = Bench(host=4, policy=Policy(blocks_a_call=1, remote=RemoteWrites(policy, ahead=1.0)))
    bench.put("abcd", HOST)
    bench.rest()
    bench.touch("abcd", HOST)
    bench.rest()
    bench.lose_bytes("a", HOST)
    assert bench.core.behind
    assert key("a") not in [offer.key for offer in bench.core.remote.offers(GROUP, 4)]


def test_lost_bytes_are_not_restated_while_what_needs_them_goes(bench: Bench) -> None:
    """Else a restart would find the block there."""
    slot = bench.lose_bytes(ROOT, HOST)
    _, outcome = bench.core.set_retention(GROUP, [key(ROOT)], [80], [1_000], bench.now)
    bench.apply(outcome)
    assert not any(content.ref.slot == slot for content in restated(outcome))


def test_nothing_goes_down_on_top_of_bytes_that_are_lost() -> None:
    bench = build("chain", host=300, disk=310)
    bench.lose_bytes(ROOT, HOST)
    waiting = bench.reserve(HOST, 100)
    assert not bench.moves
    bench.rest()
    assert waiting in bench.grants


def test_nor_is_anything_moved_there() -> None:
    """A restart would find the record of the parent, and believe it."""
    bench = Bench(host=4, disk=4, policy=Policy(blocks_a_call=2))
    bench.put("abcd", HOST)
    bench.rest()
    bench.lose_bytes("a", HOST)
    assert "b" in bench.stored()
    ticket = bench.move("b", DISK)
    assert not bench.moves
    bench.rest()
    assert bench.grants[ticket].results == (False,)


def test_who_wants_the_slots_of_lost_bytes_waits_for_them() -> None:
    """Nobody else holds or wants anything."""
    bench = Bench(host=3, disk=8, policy=Policy(blocks_a_call=1))
    bench.put("ab", HOST)
    bench.put("c", HOST)
    bench.rest()
    bench.lose_bytes("a", HOST)
    waiting = bench.reserve(HOST, 3)
    assert not bench.answered(waiting)
    bench.rest()
    bench.land()
    assert waiting in bench.grants


def test_a_listing_is_whole_while_the_departed_are_swept() -> None:
    bench = build("fan")
    for number, name in enumerate(NAMES[299:0:-1]):
        bench.drop(name)
        rows = bench.core.listing(GROUP, 0, 1_000).rows
        assert [name_of(row.key) for row in rows] == list(NAMES[: 299 - number])
        page = bench.core.listing(GROUP, 0, 7)
        paged: list[Key] = [row.key for row in page.rows]
        while page.next_page:
            page = bench.core.listing(GROUP, page.next_page, 7)
            paged += [row.key for row in page.rows]
        assert paged == [row.key for row in rows]
