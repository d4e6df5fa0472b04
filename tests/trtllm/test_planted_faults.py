"""The stand-in sees faults: each is planted into kvtier's own."""

from dataclasses import replace
from typing import Any

import pytest

from kvtier.abi.keys import Scope
from kvtier.connectors import trtllm
from kvtier.connectors.trtllm import _Worker
from kvtier.engine import Mover, Work
from tests.trtllm.executor import WrongBytes
from tests.trtllm.test_connector import ASYNC, SYNC, V1, V2, engine
from tests.trtllm.traffic import ask


def loads_late(patch: pytest.MonkeyPatch) -> None:
    """Loads while the forward pass runs."""
    load, save = _Worker.start_load_kv, _Worker.wait_for_save
    patch.setattr(_Worker, "start_load_kv", lambda self, stream: None)
    patch.setattr(_Worker, "wait_for_save", lambda self, stream: (load(self, stream), save(self, stream)))


def loads_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Loads each block to the page of the next."""
    start = Mover.start

    def changed(self: Any, work: Work, **more: Any) -> None:
        loads = (replace(load, pages={g: p[1:] + p[:1] for g, p in load.pages.items()}) for load in work.loads)
        start(self, replace(work, loads=tuple(loads)), **more)

    patch.setattr(Mover, "start", changed)


def leaves_salt_out(patch: pytest.MonkeyPatch) -> None:
    """Names blocks by their tokens alone."""
    patch.setattr(trtllm, "_scope", lambda request: Scope())


@pytest.mark.parametrize(
    ("plant", "way", "model"),
    [
        (loads_late, SYNC, V1),
        (loads_elsewhere, SYNC, V1),
        (loads_elsewhere, ASYNC, V2),
        (leaves_salt_out, ASYNC, V2),
    ],
)
def test_a_planted_fault_is_caught(daemon, monkeypatch, plant, way, model):
    plant(monkeypatch)
    with pytest.raises(WrongBytes):
        for seed in (1, 2):
            with engine(daemon, model, way, reuse=False, seed=seed) as executor:
                ask(executor)
                executor.run()
