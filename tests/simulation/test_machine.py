"""The simulated world under Hypothesis, which searches the shortest way to break a promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvtierd.core.ids import Tier
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


def store(world: World, choose: Chooser) -> None:
    actions.reserve(world, choose)
    world.progress(choose)
    actions.commit(world, choose)


def report_more(world: World, choose: Chooser) -> None:
    actions.report(world, choose)
    world.progress(choose)
    actions.report(world, choose)


def answer_early(world: World, choose: Chooser) -> None:
    choose.pick((actions.cancel, actions.expire))(world, choose)


def lose_or_restore(world: World, choose: Chooser) -> None:
    (actions.restore if Tier.DISK in world.lost else actions.lose)(world, choose)


def restart(world: World, choose: Chooser) -> None:
    choose.pick((actions.stop_and_start, actions.crash))(world, choose)


def take(action: Action) -> Callable[..., None]:
    """Returns a rule with the action's name: some moves begin or end, then the action is taken."""

    def act(machine: CoreMachine, data: st.DataObject) -> None:
        choose = chooser(data)
        machine.world.progress(choose)
        action(machine.world, choose)

    act.__name__ = action.__name__
    return rule(data=st.data())(act)


class CoreMachine(RuleBasedStateMachine):
    world: World

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.world = World(Setup.draw(chooser(data)))

    reserve = take(actions.reserve)
    commit = take(actions.commit)
    store = take(store)
    scribble = take(actions.scribble)
    acquire = take(actions.acquire)
    acquire_across = take(actions.acquire_across)
    join = take(actions.join)
    release = take(actions.release)
    move = take(actions.move)
    drop = take(actions.drop)
    touch = take(actions.touch)
    retain = take(actions.retain)
    pin = take(actions.pin)
    reset = take(actions.reset)
    report = take(actions.report)
    report_more = take(report_more)
    answer_early = take(answer_early)
    orphan = take(actions.orphan)
    disown = take(actions.disown)
    reattach = take(actions.reattach)
    end = take(actions.end)
    end_remnant = take(actions.end_remnant)
    pass_time = take(actions.tick)
    rot = take(actions.rot)
    lose_or_restore = take(lose_or_restore)
    settle = take(actions.settle)
    restart = take(restart)


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
