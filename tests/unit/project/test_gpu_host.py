"""`make gpu-hour` on a host without a GPU, what it carries to a host with one, and how it runs its steps."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest

ROOT = Path(__file__).parents[3]
TELLS = """
def test_it(record_property):
    record_property("it", "ran")
"""
HANGS = """
import pathlib, subprocess, sys, threading
def test_that_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    threading.Event().wait()
"""


@pytest.fixture
def step(tmp_path):
    def make(name, code=TELLS):
        (tmp_path / f"test_{name}.py").write_text(code)
        return gpu.Step(name, 60, f"what {name} shows", f"{tmp_path}/test_{name}.py --rootdir={tmp_path}")

    return make


@pytest.fixture
def hour(tmp_path, step):
    """Runs steps; its status and what its report says."""

    def run(*steps, budget_s=600.0):
        status = gpu.hour(steps, budget_s, tmp_path, time.monotonic())
        assert f"| {steps[0].name} |" in (tmp_path / "gpu-hour.md").read_text()
        return status, json.loads((tmp_path / "gpu-hour.json").read_text())

    return run


@pytest.mark.skipif(not gpu.why_not(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_so():
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "gpu.py", "hour"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    assert line.startswith("gpu: skipped: ")


def test_figures_of_many_blocks_of_one_pool_have_goals():
    def goal(pools, piece_bytes, blocks, ratio):
        params = {"pools": pools, "piece_bytes": piece_bytes, "blocks": blocks}
        return gpu.judged({"params": params, "ratio": ratio}).get("goal")

    assert goal(1, 65536, 1024, 0.84) == "0.85 MISSED"
    assert goal(1, 1 << 20, 256, 0.96) == "0.95 met"
    assert goal(1, 1 << 20, 1, 0.1) is goal(16, 65536, 64, 0.9) is goal(1, 4 << 20, 64, 0.9) is None


def test_a_step_that_hangs_is_killed_with_all_it_started_and_the_next_one_runs(hour, step, tmp_path, capfd):
    """It has shown nothing, so it is to run again."""
    status, report = hour(step("tells"), step("hangs", HANGS), step("later"), budget_s=45)
    verdicts = {name: found["verdict"] for name, found in report["steps"].items()}
    assert re.fullmatch("killed after [0-9]+ s", verdicts.pop("hangs"))
    assert "::test_that_hangs" in report["steps"]["hangs"]["output"]
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}/exe").exists()
    assert verdicts == {"tells": "passed", "later": "passed"}
    assert report["steps"]["tells"]["facts"] == {"it": "ran"}
    assert (status, report["left_out"]) == (1, ["hangs"])
    said = capfd.readouterr().out
    assert "gpu: hangs: killed after" in said and said.endswith("; go on with KVTIER_GPU_STEPS='hangs'\n")


def test_the_first_step_is_part_of_every_call_and_an_unknown_step_is_refused(step):
    assert [each.name for each in gpu.chosen([step(name) for name in "abc"], ["c"])] == ["a", "c"]
    with pytest.raises(SystemExit, match="there is no step d: they are a, b, c"):
        gpu.chosen([step(name) for name in "abc"], ["d"])


@pytest.mark.parametrize("code", ["", "def test_it(): assert 0", "import os; os._exit(0)"])
def test_a_step_that_shows_nothing_has_failed(hour, step, code):
    status, report = hour(step("broken", code))
    assert (status, report["steps"]["broken"]["verdict"].partition(":")[0]) == (1, "failed")


def test_every_test_that_a_step_names_is_there():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    fake = re.findall(r"ON_THE_FAKE := .*addsuffix \.py,([\w\s]+)", makefile)
    named = [f"tests/integration/test_{word}.py" for words in fake for word in words.split()]
    named += [word for step in gpu.STEPS for word in step.tests.split() if word.endswith(".py")]
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / name).is_file()]
