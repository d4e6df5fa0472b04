"""`make gpu-hour` on a host without a GPU, what it carries to a host with one, and how it runs its steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest

ROOT = Path(__file__).parents[3]
HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(json.dumps(["child", child.pid]), flush=True)
time.sleep(1000)
"""
TELLS = """print('["it", "ran"]')"""


def step(name, code, limit_s=60.0):
    return gpu.Step(name, limit_s, f"what {name} shows", "facts", ("-c", code))


@pytest.fixture
def hour(tmp_path):
    """Runs steps; its status and what its report says."""

    def run(*steps, budget_s=600.0, kept=()):
        status = gpu.hour(steps, budget_s, dict(kept), tmp_path, time.monotonic())
        assert f"| {steps[0].name} |" in (tmp_path / "gpu-hour.md").read_text() or not steps
        return status, json.loads((tmp_path / "gpu-hour.json").read_text())

    return run


def test_all_that_the_tests_import_is_carried_but_what_the_host_has():
    wanted = {line.partition(">")[0] for line in gpu.wanted()}
    assert wanted >= {"grpcio", "lmdb", "pydantic-settings", "xxhash", "pytest", "pytest-asyncio", "hypothesis"}
    assert not wanted & gpu.HOSTS


@pytest.mark.skipif(not gpu.why_not(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_so_and_when_there_was_one():
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "gpu.py", "hour"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    assert line.startswith("gpu: skipped: ")
    assert line.endswith(f"Last run on a GPU: {gpu.last_run()}")
    assert "does not say" not in line


def test_figures_of_many_blocks_of_one_pool_have_goals():
    def judged(pools, piece_bytes, blocks, ratio):
        return gpu.goal({"params": {"pools": pools, "piece_bytes": piece_bytes, "blocks": blocks}, "ratio": ratio})

    assert judged(1, 65536, 1024, 0.84) == {"goal": 0.85, "verdict": "MISSED"}
    assert judged(1, 1 << 20, 256, 0.96) == {"goal": 0.95, "verdict": "met"}
    assert judged(1, 1 << 20, 1, 0.1) == judged(16, 65536, 64, 0.9) == judged(1, 4 << 20, 64, 0.9) == {}


def test_a_step_that_hangs_is_killed_with_all_it_started_and_the_next_one_runs(hour, capfd):
    status, report = hour(step("hangs", HANGS, limit_s=5), step("tells", TELLS))
    assert status == 1
    assert report["steps"]["hangs"]["verdict"] == "killed after 5 s"
    assert "KeyboardInterrupt" in report["steps"]["hangs"]["output"], "where it hung"
    assert not Path(f"/proc/{report['steps']['hangs']['facts']['child']}/exe").exists()
    assert (report["steps"]["tells"]["verdict"], report["steps"]["tells"]["facts"]) == ("passed", {"it": "ran"})
    assert "gpu: hangs: killed after 5 s" in capfd.readouterr().out


def test_a_step_that_had_less_than_its_time_is_where_to_go_on(hour, capfd):
    status, report = hour(step("tells", TELLS), step("hangs", HANGS), step("later", TELLS), budget_s=25)
    assert (status, report["go_on"]) == (1, "hangs")
    assert report["steps"]["later"]["verdict"] == "passed"
    assert capfd.readouterr().out.endswith("; go on with KVTIER_GPU_FROM=hangs\n")


def test_without_time_no_step_is_started(hour):
    status, report = hour(step("tells", TELLS), budget_s=5, kept={"tells": report_of("kept")})
    assert (status, report["go_on"]) == (0, "tells")
    assert report["steps"] == {"tells": report_of("kept")}


def report_of(verdict):
    return {"verdict": verdict, "seconds": 1.0, "shows": "", "on": ""}


@pytest.mark.parametrize(
    ("first", "only", "names"),
    [("", "", "abc"), ("a", "", "abc"), ("c", "", "ac"), ("", "b", "ab"), ("", "a", "a"), ("b", "", "abc")],
)
def test_the_first_step_goes_before_those_that_are_chosen(first, only, names):
    steps = [step(name, TELLS) for name in "abc"]
    assert "".join(each.name for each in gpu.chosen(steps, first, only)) == names


def test_a_step_that_is_not_there_is_refused_by_name():
    with pytest.raises(SystemExit, match="there is no step d: they are a, b, c"):
        gpu.chosen([step(name, TELLS) for name in "abc"], "d", "")


@pytest.mark.parametrize(("kind", "code"), [("figures", "print('[{')"), ("tests", "0"), ("facts", "1 / 0")])
def test_a_step_without_a_result_has_failed(hour, kind, code):
    status, report = hour(gpu.Step("broken", 60, "nothing", kind, ("-c", code)))
    assert (status, report["steps"]["broken"]["verdict"].partition(":")[0]) == (1, "failed")
