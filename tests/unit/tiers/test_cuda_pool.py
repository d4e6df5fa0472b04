"""GPU memory of a cache, on the fake of NVIDIA's bindings: an allocation that fails leaves nothing that is in use."""

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtier.abi.cuda.driver import Driver
from kvtierd.tiers.base import TierIOError
from kvtierd.tiers.cuda.pool import DaemonGpu
from tests.fake_cuda import load_fake

MIB = 1 << 20


class Rig:
    """A fake GPU, and what the fake knows of it. ``settings``: of the fake."""

    def __init__(self, **settings: Any) -> None:
        self.bindings: ModuleType = load_fake(max_delay_ms=0.1, **settings)
        self.gpu = DaemonGpu(Driver(self.bindings, "cuda"))

    @property
    def left(self) -> dict[str, int]:
        """What was not given back."""
        found: dict[str, int] = self.bindings.STATE.left()
        return {kind: count for kind, count in found.items() if kind != "contexts"}


def test_who_is_patient_gets_what_is_let_go_of_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(memory=8 * MIB)
    first = rig.gpu.create("first", 8 * MIB)
    monkeypatch.setattr("kvtierd.tiers.cuda.pool.time.sleep", lambda _: first.close())
    rig.gpu.create("second", 8 * MIB, patience_s=60.0).close()


def test_a_device_that_does_not_answer_is_silent_and_keeps_nobody_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, asked, answer = Rig(), threading.Event(), threading.Event()

    def memory() -> tuple[int, int]:
        asked.set()
        assert answer.wait(60)
        return 0, 0

    monkeypatch.setattr(rig.gpu.driver, "memory", memory)
    monkeypatch.setattr("kvtierd.tiers.cuda.pool.SILENT_S", 0.01)
    rig.gpu.watch()
    assert asked.wait(60)
    silent_s = rig.gpu.silent_s
    while rig.gpu.silent_s <= silent_s:
        pass
    rig.gpu.close()
    assert rig.bindings.STATE.left() == {"contexts": 1}, "a call may still use the context"
    answer.set()


@pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuStreamCreate"])
def test_memory_that_cannot_be_cleared_is_not_used(call: str) -> None:
    rig = Rig(fail=[{"call": call, "code": "CUDA_ERROR_INVALID_VALUE"}])
    with pytest.raises(TierIOError, match=call):
        rig.gpu.create("c", MIB)
    assert rig.left == {}
    assert rig.gpu.lost is None


def test_memory_that_may_still_be_cleared_is_nobodys_until_the_end(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    rig = Rig(hold=hold, fail=[{"call": "cuStreamQuery", "code": "CUDA_ERROR_INVALID_VALUE"}])
    before = rig.gpu.memory()[0]
    with pytest.raises(TierIOError, match="cuStreamQuery"):
        rig.gpu.create("c", 2 * MIB)
    assert before - rig.gpu.memory()[0] == 2 * MIB
    hold.unlink()
    rig.gpu.create("d", 2 * MIB).close()
    assert rig.gpu.memory()[0] == before - 2 * MIB
