"""The prefix that is worth a load, by what loads and steps have cost."""

import numpy as np
import pytest

from kvtier.engine import EngineOptions
from kvtier.engine.prices import PAUSE_S, Prices

TOKENS = 32
DECODING_S = 0.02


class Rig:
    """An engine on a clock of its own, with prices in seconds per token and per block."""

    def __init__(self, **settings: object) -> None:
        self.now = 100.0
        self.prices = Prices(TOKENS, EngineOptions.of({"load_timeout": 60.0, **settings}), lambda: self.now)
        self._tickets = 0

    def compute(self, tokens: int, token_s: float = 0.001, *, first: int = 0, context_s: float = 0.0) -> None:
        self.prices.plan(first, tokens)
        number = self.prices.begin_step(waits=False)
        self.now += DECODING_S + tokens * (token_s + context_s * (first + tokens / 2))
        self.prices.end_step(number)

    def load(self, memory: int, disk: int = 0, *, memory_s: float = 0.001, disk_s: float = 0.0) -> None:
        self._tickets += 1
        self.prices.begin_load(self._tickets, memory + disk, disk, sync=False)
        self.now += (seconds := (memory + disk) * memory_s + disk * disk_s)
        self.prices.end_load(self._tickets, seconds)

    def worth(self, memory: int, disk: int = 0, first: int = 0) -> int:
        return self.prices.worth(np.array([False] * memory + [True] * disk), first)


@pytest.fixture
def rig() -> Rig:
    """Computes a block in 32 ms, and loads it from memory in one."""
    rig = Rig()
    rig.compute(1)
    rig.compute(1000)
    rig.load(100)
    return rig


def test_the_first_load_and_the_first_prompt_teach() -> None:
    rig = Rig()
    assert rig.worth(10, 10) == 20
    rig.load(0, 100, disk_s=5.0)
    assert rig.worth(10, 10) == 20, "computing may cost more"
    rig.compute(1000)
    assert rig.worth(10, 10) == 10


@pytest.mark.parametrize(("disk_s", "disk_blocks"), [(0.002, 100), (0.025, 100), (0.035, 0), (0.3, 0)])
def test_a_slow_disk_is_left_where_its_blocks_begin(rig: Rig, disk_s: float, disk_blocks: int) -> None:
    rig.load(0, 50, disk_s=disk_s)
    assert rig.worth(20, 100) == 20 + disk_blocks
    assert rig.worth(0, 100) == disk_blocks
    assert rig.prices.worth(np.array([True] * 10 + [False] * 1000), 0) == 1010, "memory behind the disk"


def test_a_load_that_would_not_end_in_time_is_made_shorter(rig: Rig) -> None:
    rig = Rig(load_timeout=2.0)
    rig.compute(1000)
    rig.load(0, 50, memory_s=0.0, disk_s=0.02)
    assert rig.worth(0, 1000) == pytest.approx(50, abs=2), "half of the limit"


def test_loads_under_way_delay_the_next(rig: Rig) -> None:
    rig.load(0, 50, disk_s=0.02)
    rig.prices.begin_load(77, 200, 200, sync=False)
    assert rig.worth(0, 50) == 0
    assert rig.worth(0, 1000) == 1000
    rig.now += 4.0
    assert rig.worth(0, 50) == 50, "the load is almost over"


def test_later_tokens_cost_more(rig: Rig) -> None:
    for tokens in 3 * (100, 4000, 1000, 2000):
        rig.compute(tokens, context_s=2e-6)
    rig.load(0, 100, disk_s=0.05)
    assert rig.worth(0, 10) == 0
    assert rig.worth(0, 10, first=4000) == 10


def test_a_warm_up_and_a_busy_machine_do_not_count() -> None:
    rig = Rig()
    rig.load(0, 50, disk_s=0.1)
    rig.compute(64, token_s=1.0)
    assert rig.worth(0, 50) == 50
    rig.compute(64)
    assert rig.worth(0, 50) == 0, "the first step was 1,000 times too long"
    for tokens in (100, 1000, 500, 1000, 1000):
        rig.compute(tokens)
    rig.compute(1000, token_s=1.0)
    assert rig.worth(0, 50) == 0


def test_steps_that_decode_or_wait_for_loads_teach_no_price(rig: Rig) -> None:
    rig.load(0, 50, disk_s=0.035)
    for _ in range(100):
        rig.compute(1)
    rig.prices.plan(0, 1000)
    number = rig.prices.begin_step(waits=True)
    rig.now += 1000.0
    rig.prices.end_step(number)
    assert rig.worth(0, 50) == 0
    assert rig.prices.block_s == pytest.approx(0.032, rel=0.01)


def test_a_disk_that_has_recovered_is_found_by_trials(rig: Rig) -> None:
    rig.load(0, 50, disk_s=1.0)
    trials = 0
    while rig.worth(0, 50) == 0:
        assert rig.prices.trial_is_due(50)
        assert not rig.prices.trial_is_due(50), "the next is due later"
        rig.prices.tried(8, 8 * 0.0005)
        rig.now += PAUSE_S
        trials += 1
    assert 1 < trials < 10


def test_memory_is_tried_again(rig: Rig) -> None:
    rig.load(100, memory_s=1.0)
    assert rig.worth(50) == 0
    assert not rig.prices.trial_is_due(0)
    assert rig.worth(50) == 50


def test_a_load_has_a_fixed_part(rig: Rig) -> None:
    for blocks in (64, 8, 32):
        rig.load(0, blocks, memory_s=0.001 + 0.1 / blocks)
    assert (rig.worth(0, 3), rig.worth(0, 4)) == (0, 4)
