"""``make gpu-hour`` on the fake, as on a host with a GPU: it is what runs ``tests/gpu`` in ``make test``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests import devices

ROOT: Final = Path(__file__).parents[2]
STEPS: Final = ("host", "bench-short", "bytes", "pool", "races", "bench")
MODULES: Final = sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
_BUDGET_S: Final = 90
_CALLS: Final = 4

pytestmark = pytest.mark.limit(_CALLS * (_BUDGET_S + 20))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def report(out):
    """Of as many calls as a busy machine takes: each runs the steps for which the one before had no time."""
    gpu_hour(out)
    found = read(out)
    for _ in range(_CALLS - 1):
        if left := read(out)["left_out"]:
            gpu_hour(out, KVTIER_GPU_STEPS=" ".join(left))
            found["steps"] |= read(out)["steps"]
    return found


def gpu_hour(out, **variables):
    """What it prints."""
    settings = {devices.VARIABLE: devices.FAKE, "KVTIER_GPU_SECONDS": str(_BUDGET_S), "OUT": str(out)} | variables
    command = ["make", "--no-print-directory", "gpu-hour", f"GPU_PYTHON={sys.executable}"]
    environment = os.environ | settings
    return subprocess.run(command, check=False, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True).stdout


def read(out):
    return json.loads((out / "gpu-hour.json").read_text())


@pytest.mark.parametrize("step", STEPS)
def test_a_step_passes(report, step):
    found = report["steps"][step]
    wrong = {name: end for name, end in found["tests"].items() if not end.startswith(("passed", "skipped"))}
    assert found["verdict"] == "passed", f"{wrong}\n{found['output']}"


@pytest.mark.parametrize("module", MODULES)
def test_a_step_runs_the_module(report, module):
    assert [test for step in report["steps"].values() for test in step["tests"] if test.startswith(module)]


def test_the_page_says_that_it_is_about_the_fake(report, out):
    page = (out / "gpu-hour.md").read_text()
    assert page.startswith("Last run on the fake driver (no figure here is a GPU's): 20")
    assert all(f"| {step} |" in page for step in read(out)["steps"])
    figures = [line for line in page.splitlines() if "device>host |" in line or "host>device |" in line]
    assert figures and all(line.startswith("| fake ") for line in figures)
    assert "met" not in page and "MISSED" not in page
    assert "| compute mode | default |" in page
    assert len(list(out.iterdir())) == 3


def test_a_call_for_one_step_runs_no_other(report, out):
    said = gpu_hour(out, KVTIER_GPU_STEPS="host")
    assert {line.split()[1] for line in said.splitlines()} == {"host:", "all"}
    assert list(read(out)["steps"]) == ["host"]
