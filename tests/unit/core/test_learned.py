"""The policy ``learned``: blocks whose like come back soon stay, as long as that beats plain LRU."""

from collections.abc import Sequence

import pytest

from kvtierd.core.block import Block
from kvtierd.core.check import check
from kvtierd.core.ids import DEVICE, HOST, Key, Tier, Traits
from kvtierd.core.policy import Policy
from kvtierd.core.returns import ReturnTimes
from kvtierd.simulate.host import GROUP, Host

SECOND = 10**9


def key(name: object) -> Key:
    return Key(str(name).encode().ljust(32))


def scanned(policy: str, slots: dict[Tier, int], *, rounds: int = 1_200) -> tuple[int, Host]:
    """Four blocks come back again and again. Between two of them come new blocks, more than the tiers have slots."""
    host, found = Host(slots, Policy(eviction=policy)), 0
    for moment in range(rounds):
        host.now += SECOND
        found += host.request([key(f"again {moment // 2 % 4}" if moment % 2 else moment)]).found
    check(host.core)
    return found, host


def test_blocks_that_come_back_outlive_blocks_that_do_not() -> None:
    slots = {DEVICE: 6}
    assert scanned("lru", slots)[0] == 0
    assert scanned("learned", slots)[0] > 100


def test_it_is_the_lowest_tier_that_learns() -> None:
    """The device goes by last use: only the block of the last request is there."""
    found, host = scanned("learned", {DEVICE: 1, HOST: 5})
    assert found > 100
    (location,) = host.core.locate(GROUP, [key("again 3")])
    assert location.residency & DEVICE.bit


def test_lfuda_is_an_older_name() -> None:
    assert scanned("lfuda", {DEVICE: 6})[0] == scanned("learned", {DEVICE: 6})[0]


def test_an_ended_block_goes_first() -> None:
    _, host = scanned("learned", {DEVICE: 6})
    kept = next(key(f"again {number}") for number in range(4) if host.prefix([key(f"again {number}")]))
    host.end([kept])
    assert host.request([key("new")]).removed == [kept]


def test_plain_lru_decides_where_it_finds_more() -> None:
    """Blocks come back once, soon, and never again; then only blocks that are asked for at once come back."""
    lru, learned = (Host({DEVICE: 4}, Policy(eviction=policy)) for policy in ("lru", "learned"))
    found = {lru: 0, learned: 0}
    for moment in range(600):
        asked = moment // 2 if moment < 300 else moment // 8 * 3 + moment % 3
        for host in found:
            host.now += SECOND
            found[host] += host.request([key(asked)]).found
    assert found[learned] >= 0.97 * found[lru]


def blocks(names: Sequence[str]) -> list[Block]:
    return [Block(key(name), None, None, Traits(35)) for name in names]


@pytest.mark.parametrize("pause", [2, 100])
def test_the_value_rises_until_the_blocks_return_and_falls_after(pause: int) -> None:
    times = ReturnTimes()
    for start in range(0, 100 * pause, 1 + pause):
        (block,) = blocks([str(start)])
        times.request([block], start * SECOND, 1)
        times.request([block], (start + pause) * SECOND, 1)
    (block,) = blocks(["last"])
    now = 10**6 * SECOND
    times.request([block], now, 1)
    values = []
    for age in (0, pause / 2, 4 * pause):
        times.now = now + int(age * SECOND)
        values.append(times.value(block.use))
    assert values[2] < values[0] < values[1]


def test_the_length_of_the_last_request_tells_blocks_apart() -> None:
    """Blocks of short requests return after two seconds; blocks of long requests do not."""
    times = ReturnTimes()
    for start in range(0, 9_000, 3):
        short, long = blocks([f"short {start}", f"long {start}"])
        times.request([short], start * SECOND, 10)
        times.request([long], start * SECOND, 300)
        times.request([short], (start + 2) * SECOND, 10)
    short, long = blocks(["short", "long"])
    times.request([short], 9_000 * SECOND, 10)
    times.request([long], 9_000 * SECOND, 300)
    assert times.value(short.use) > 2 * times.value(long.use) > 0
