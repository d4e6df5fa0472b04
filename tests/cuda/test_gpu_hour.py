"""``make gpu-hour`` on the fake, as on a host with a GPU: it is what runs ``tests/gpu`` in ``make test``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests import devices

ROOT: Final = Path(__file__).parents[2]
STEPS: Final = {
    "host": "device",
    "bench-short": "fake gpu.host>device",
    "bytes": "test_a_working_set_larger_than_device_and_host",
    "pool": "test_blocks_on_the_device_outlive_the_daemon[kill]",
    "races": "test_copies_race_kernels",
    "bench": "fake gpu.host>device",
}
"""With a word of each step's result."""
_BUDGET_S: Final = 90
_CALLS: Final = 3

pytestmark = pytest.mark.limit((_CALLS + 1) * (_BUDGET_S + 10))

Call = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def call(out: Path) -> Call:
    """Exit status, and what it prints."""

    def hour(**variables: str) -> tuple[int, str]:
        settings = {devices.VARIABLE: devices.FAKE, "KVTIER_GPU_SECONDS": str(_BUDGET_S), "OUT": str(out)}
        settings |= {f"KVTIER_GPU_{name.upper()}": value for name, value in variables.items()}
        command = ["make", "gpu-hour", f"GPU_PYTHON={sys.executable}"]
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, check=False, stdout=subprocess.PIPE, text=True
        )
        return ended.returncode, ended.stdout

    return hour


@pytest.fixture(scope="module")
def report(call: Call, out: Path) -> dict[str, Any]:
    """Of as many calls as a busy machine takes: each but the first goes on where the one before had no time left."""
    call()
    for _ in range(_CALLS - 1):
        if first := read(out)["go_on"]:
            call(**{"from": first})
    return read(out)


def read(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "gpu-hour.json").read_text())
    return report


@pytest.mark.parametrize("step", STEPS)
def test_a_step_passes(report: dict[str, Any], step: str) -> None:
    found = report["steps"][step]
    wrong = {name: end for name, end in found.get("tests", {}).items() if not end.startswith(("passed", "skipped"))}
    assert found["verdict"] == "passed", f"{wrong}\n{found['output']}"
    assert STEPS[step] in str(found)


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")))
def test_every_module_is_in_a_step(report: dict[str, Any], module: str) -> None:
    assert [test for step in report["steps"].values() for test in step.get("tests", {}) if test.startswith(module)]


def test_the_host_is_told(report: dict[str, Any]) -> None:
    facts = report["steps"]["host"]["facts"]
    assert facts["device"] == "Fake GPU 0"
    refused = {fact for fact, answer in facts.items() if answer.startswith("no")}
    assert refused <= {"driver", "pidfd of a socket's peer"}, facts  # there is no driver; the pidfd takes Linux 6.5


def test_the_page_says_that_it_is_about_the_fake(report: dict[str, Any], out: Path) -> None:
    page = (out / "gpu-hour.md").read_text()
    assert page.startswith("Last run on the fake driver (no figure here is a GPU's): 20")
    assert all(f"| {step} |" in page for step in STEPS)
    figures = [line for line in page.splitlines() if "device>host |" in line or "host>device |" in line]
    assert figures and all(line.startswith("| fake ") for line in figures)
    assert "met" not in page and "MISSED" not in page
    assert len(list(out.iterdir())) == 3


def test_a_call_for_one_step_keeps_what_is_known_of_the_others(report: dict[str, Any], call: Call, out: Path) -> None:
    status, said = call(only="host")
    assert (status, [line.split()[1] for line in said.splitlines()]) == (0, ["host:", "host:", "all"])
    again = read(out)
    assert again["steps"].keys() == STEPS.keys()
    assert again["steps"]["races"] == report["steps"]["races"]
    assert again["steps"]["host"]["when"] >= report["steps"]["host"]["when"]
