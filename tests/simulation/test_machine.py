"""The same world under Hypothesis, which looks for the shortest way to break a promise."""

from __future__ import annotations

from typing import Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.limits import LONG
from tests.simulation import actions
from tests.simulation.actions import Action
from tests.simulation.chooser import Chooser
from tests.simulation.faults import FAULTS
from tests.simulation.setup import Setup
from tests.simulation.world import World

EXAMPLES: Final = 2_000 if LONG else 150
STEPS: Final = 60


def chooser(data: st.DataObject) -> Chooser:
    return Chooser(lambda bound: int(data.draw(st.integers(0, bound - 1))))


class CoreMachine(RuleBasedStateMachine):
    """Every rule lets moves begin and end as they like, then takes one action."""

    world: World

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.world = World(Setup.draw(chooser(data)))

    def take(self, action: Action, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.progress(choose)
        action(self.world, choose)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        self.take(actions.reserve, data)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.take(actions.commit, data)

    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        self.take(actions.reserve, data)
        self.take(actions.commit, data)

    @rule(data=st.data())
    def scribble(self, data: st.DataObject) -> None:
        self.take(actions.scribble, data)

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        self.take(actions.acquire, data)

    @rule(data=st.data())
    def acquire_across(self, data: st.DataObject) -> None:
        self.take(actions.acquire_across, data)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.take(actions.release, data)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self.take(actions.move, data)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.take(actions.drop, data)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.take(actions.touch, data)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        self.take(actions.retain, data)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.take(actions.pin, data)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        self.take(actions.reset, data)

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        self.take(actions.report, data)

    @rule(data=st.data())
    def report_more(self, data: st.DataObject) -> None:
        self.take(actions.report, data)
        self.take(actions.report, data)

    @rule(data=st.data())
    def answer_early(self, data: st.DataObject) -> None:
        self.take(actions.expire if data.draw(st.booleans()) else actions.cancel, data)

    @rule(data=st.data())
    def orphan(self, data: st.DataObject) -> None:
        self.take(actions.orphan, data)

    @rule(data=st.data())
    def reattach(self, data: st.DataObject) -> None:
        self.take(actions.reattach, data)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.take(actions.end, data)

    @rule(data=st.data())
    def end_remnant(self, data: st.DataObject) -> None:
        self.take(actions.end_remnant, data)

    @rule(data=st.data())
    def pass_time(self, data: st.DataObject) -> None:
        self.take(actions.tick, data)

    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        self.take(actions.rot, data)

    @rule(data=st.data())
    def lose_or_restore(self, data: st.DataObject) -> None:
        self.take(actions.restore if self.world.disk_lost else actions.lose, data)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.take(actions.settle, data)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.take(actions.crash if data.draw(st.booleans()) else actions.stop_and_start, data)


SETTINGS: Final = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = SETTINGS


@pytest.mark.parametrize("name", ["event_omitted", "leased_slot_reused", "generation_not_bumped"])
def test_the_machine_finds_planted_faults(name: str) -> None:
    unshrunk = settings(SETTINGS, phases=[Phase.generate], database=None)
    with FAULTS[name].planted(), pytest.raises(AssertionError):
        run_state_machine_as_test(CoreMachine, settings=unshrunk)
