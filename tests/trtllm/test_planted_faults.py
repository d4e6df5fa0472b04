"""The stand-in sees every fault that a connector is known to have had, and none in a right one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trtllm import planted
from tests.trtllm.executor import Answer, Executor, WrongBytes
from tests.trtllm.interface import Ranks
from tests.trtllm.model import Model
from tests.trtllm.planted import Scheduler, Shelf, Worker
from tests.trtllm.traffic import ask, outputs

FLAT = Model()
SLIDING = Model(windows=(0, 20, 20, 0), index=True)


def lives(shelf: Shelf, connector: Any, *, reuse: bool = False, answers: tuple[Answer, ...] = ()) -> list[Executor]:
    """Two engines, one after the other, that are asked the same. The first also serves one tenant alone."""
    executors = []
    for seed in (1, 2):
        executor = Executor(
            shelf.model, connector, shelf, ranks=shelf.ranks, grouped=shelf.model.index, reuse=reuse, seed=seed
        )
        executors.append(executor)
        try:
            first = ask(executor, salts=(None,))
            executor.answers = {request.request_id: each for request, each in zip(first, answers, strict=False)}
            executor.run()
            both = ask(executor)
            executor.run()
            assert outputs(first) == outputs(both[: len(first)])
        finally:
            executor.close()
    return executors


@pytest.mark.parametrize("reuse", [False, True], ids=["no-reuse", "reuse"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", [FLAT, SLIDING], ids=["v1", "v2"])
def test_right_connectors_pass(model, ranks, asynchronous, reuse):
    answers = (Answer(), Answer(short=8), Answer(short=999), Answer(reset=True)) if model.index else ()
    shelf = Shelf(model, Ranks(ranks), asynchronous)
    cold, warm = lives(shelf, (Scheduler, Worker), reuse=reuse, answers=answers)
    assert 0 < warm.computed < cold.computed / (1 if reuse else 2)
    assert cold.checked > 1000 < warm.checked


@pytest.mark.parametrize(
    ("connector", "asynchronous", "model"),
    [
        ((Scheduler, planted.LoadsLate), False, FLAT),
        ((Scheduler, planted.LoadsElsewhere), False, FLAT),
        ((Scheduler, planted.LoadsElsewhere), True, SLIDING),
        ((Scheduler, planted.LoadsTooFew), False, FLAT),
        ((Scheduler, planted.LoadsTooFew), True, SLIDING),
        ((Scheduler, planted.SaysLoadedTooSoon), True, FLAT),
        ((planted.FreesWhatItSaves, Worker), True, FLAT),
        ((Scheduler, planted.SavesTooSoon), False, FLAT),
        ((planted.LeavesSaltOut, Worker), False, FLAT),
        ((planted.LeavesSaltOut, Worker), True, SLIDING),
        ((Scheduler, planted.LosesWindow), True, SLIDING),
        ((Scheduler, planted.LeavesReplicatedOut), False, SLIDING),
        ((planted.ForgetsReset, Worker), False, SLIDING),
    ],
    ids=lambda value: "-".join(each.__name__ for each in value) if isinstance(value, tuple) else "",
)
def test_faults_are_caught(connector, asynchronous, model):
    shelf = Shelf(model, Ranks(1), asynchronous)
    answers = (Answer(reset=True), Answer(reset=True)) if connector[0] is planted.ForgetsReset else ()
    with pytest.raises(WrongBytes):
        lives(shelf, connector, answers=answers)
