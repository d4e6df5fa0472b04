"""``kvtier simulate policy``, and what the policies find on generated traffic."""

import asyncio
import json
from collections.abc import Sequence
from functools import cache

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.replay.trace import key_of, read
from kvtierd.core.ids import Key, Tier
from kvtierd.core.policy import Policy
from kvtierd.service.hints import SHARE, SHARE_ALONE
from kvtierd.simulate.host import GROUP, Host
from kvtierd.simulate.policy import BELADY, POLICIES, blocks_found
from tests.unit.core.test_trace_ratio import EXTRACT
from tests.unit.simulate import traffic


def keyed(chains: Sequence[Sequence[int]]) -> list[list[bytes]]:
    return [[key_of(block) for block in chain] for chain in chains]


def simulated(tmp_path, requests, *options):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    return CliRunner().invoke(main, ["simulate", "policy", str(path), *options])


@pytest.mark.parametrize(
    ("requests", "found"),
    [
        ([[1], [2], [3], [1], [2], [3]], {"lru": 0, "learned": 0, "belady": 2}),  # belady keeps 1, then 3
        ([[1], [1], [2], [3], [1]], {"lru": 1, "learned": 1, "belady": 2}),  # nothing is learnt yet
        ([[1, 2], [3], [1, 2]], {"lru": 1, "learned": 1, "belady": 1}),  # 2 makes room, not 1, which it stands on
        ([[1, 2, 3], [1, 2]], {"lru": 2, "learned": 2, "belady": 2}),  # the first is cut to two
    ],
)
def test_what_each_policy_finds_with_two_slots(tmp_path, requests, found):
    outcome = simulated(tmp_path, requests, "--slots", "2", "-o", "json")
    assert {row["policy"]: row["found"] for row in json.loads(outcome.stdout)} == found


def test_the_table_as_a_person_reads_it(tmp_path):
    outcome = simulated(tmp_path, [[1], [1], [2], [3], [1], [9, 9]], "--slots", "1,2", "--requests", "5")
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert ["1", "lru", "0.200", "+0.0%"] in lines
    assert ["2", "belady", "0.400", "+100.0%"] in lines


def test_a_size_that_makes_no_sense_is_refused(tmp_path):
    outcome = simulated(tmp_path, [[1]], "--slots", "5,0")
    assert outcome.exit_code == 2 and "0 is not in the range x>=1" in outcome.output


@pytest.mark.parametrize(
    ("hints", "found"),
    [
        ("ends=0,returns=0", 1),  # 4 takes the slot of 1
        ("ends=1", 2),  # 4 takes the slot of 3, which has ended
        ("returns=1", 2),  # 3 is not expected
    ],
)
def test_an_oracle_tells_hints(tmp_path, hints, found):
    outcome = simulated(tmp_path, [[1], [2], [3], [4], [2], [1]], "--slots", "3", "--hints", hints, "-o", "json")
    assert next(row["found"] for row in json.loads(outcome.stdout) if row["policy"] == "lru") == found


@pytest.mark.parametrize(
    ("hints", "says"), [("end=1", "'end' is no kind of hint"), ("ends=2", "2.0 is not in the range")]
)
def test_hints_that_make_no_sense_are_refused(tmp_path, hints, says):
    outcome = simulated(tmp_path, [[1]], "--hints", hints)
    assert (outcome.exit_code, says in outcome.output) == (2, True), outcome.output


TREE = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=40)


@given(TREE, st.integers(4, 9))
def test_none_finds_more_than_belady(paths, slots):
    """A block is the path that leads to it."""
    chains = [[bytes(path[: depth + 1]).ljust(32, b"\xff") for depth in range(len(path))] for path in paths]
    best = blocks_found(BELADY, {Tier.HOST: slots}, chains)
    assert all(blocks_found(policy, {Tier.HOST: slots}, chains) <= best for policy in POLICIES)


@pytest.mark.parametrize(("slots", "seconds"), [(500, 300), pytest.param(2_000, 900, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kinds", [*((kind,) for kind in traffic.KINDS), ("chat", "agents", "documents"), ("chat", "scan")], ids=" and ".join
)
def test_the_learned_policy_finds_hardly_less_than_lru_whatever_the_traffic(kinds, slots, seconds):
    times, chains = zip(*traffic.requests(*kinds, seconds=seconds), strict=True)
    lru, learned = (blocks_found(policy, {Tier.HOST: slots}, keyed(chains), times) for policy in ("lru", "learned"))
    assert learned >= 0.98 * lru


@cache
def extract() -> list[list[bytes]]:
    return keyed(asyncio.run(read(EXTRACT)))


@pytest.mark.parametrize("slots", [1_000, 2_000, 6_000])
def test_a_shadow_misses_what_a_tier_under_its_policy_does(slots):
    """Within 0.03 of the blocks asked for, whatever policy the tier has."""
    asked = sum(min(len(chain), slots) for chain in extract())
    misses = asked - blocks_found("lru", {Tier.HOST: slots}, extract())
    host = Host({Tier.HOST: slots}, Policy(eviction="learned"))
    for chain in extract():
        host.request([Key(key) for key in chain[:slots]])
    estimate = host.core.stats().groups[GROUP].shadow_misses["lru"]
    assert abs(estimate - misses) < 0.03 * asked


@cache
def found_of_other(policy: str, share: int, seed: int) -> int:
    """Blocks that a tenant finds beside a tenant whose hints keep one in ``share`` blocks all the time, if not 0."""
    slots = 1_300
    sources = {name: traffic.KINDS["long chat"](traffic.Source(f"{name}{seed}", 250)) for name in ("hints", "other")}
    requests = sorted((now, name, chain) for name, timed in sources.items() for now, chain in timed)
    host, found, kept = Host({Tier.HOST: slots}, Policy(eviction=policy)), 0, 0
    for now, name, chain in requests:
        host.now = int(now * 1e9)
        keys = [Key(key_of(2 * block + (name == "other"))) for block in chain]
        found += host.request(keys).found * (name == "other")
        if name == "hints" and share and kept < slots // share:
            kept += (more := min(len(keys), slots // share - kept))
            host._retain(keys[:more], 100, 3_600_000)
    return found


@pytest.mark.parametrize(("policy", "seeds"), [("lru", 1), ("learned", 4)])
def test_hints_cost_another_tenant_at_most_one_percent(policy: str, seeds: int) -> None:
    """After any change of one traffic, the learned policy finds a few percent more or less."""
    found = {share: sum(found_of_other(policy, share, seed) for seed in range(seeds)) for share in (0, SHARE)}
    assert found[SHARE] >= 0.99 * found[0] > 0


def test_more_hints_would_cost_another_tenant_more() -> None:
    assert found_of_other("lru", SHARE_ALONE, 0) < 0.99 * found_of_other("lru", 0, 0)
