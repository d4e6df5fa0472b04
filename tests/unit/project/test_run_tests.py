"""`make test` runs each failed test once more, alone, and tells flaky tests from broken ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

RUN_TESTS: Final = Path(__file__).parents[3] / ".ci" / "run_tests.py"

HELPERS: Final = """
import os, pathlib, pytest

def first_time(name):
    seen = pathlib.Path(name)
    return not seen.exists() and seen.write_text("") == 0
"""
FLAKY: Final = """
def test_fails_once():
    assert not first_time("test")

@pytest.fixture
def setup():
    assert not first_time("setup")

def test_setup_fails_once(setup):
    pass

def test_ends_its_process_once():
    first_time("end") and os._exit(0)
"""
BROKEN: Final = """
def test_fails():
    assert False

@pytest.fixture
def teardown():
    yield
    assert False

def test_teardown_fails(teardown):
    pass

def test_ends_its_process():
    os._exit(0)
"""
PASSES: Final = """
def test_passes():
    pass
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs test files; returns the exit status and the lines of the output."""
    for variable in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*contents):
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        for number, content in enumerate(contents):
            (tmp_path / f"test_{number}.py").write_text(HELPERS + content)
        command = [sys.executable, str(RUN_TESTS), "-p", "xdist", "-n", "1", "--junitxml=report.xml"]
        ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
        return ended.returncode, ended.stdout.splitlines()

    return run


def test_what_passes_alone_is_flaky(run, tmp_path):
    status, lines = run(FLAKY, PASSES)
    tests = {f"test_0.py::test_{it}_once" for it in ("fails", "setup_fails", "ends_its_process")}
    assert lines[-1].startswith("flaky: 3 of 4: ")
    assert {*lines[-1].split()[4:]} == tests
    assert {line for line in lines if line.startswith("once more")} == {f"once more, alone: {test}" for test in tests}
    assert status == 0
    assert 'tests="4"' in (tmp_path / "report.xml").read_text(), "the report is the first run's"


def test_what_fails_twice_fails_the_run(run):
    status, lines = run(BROKEN, PASSES)
    assert lines[-1].startswith("failed twice: 3 of 4: ")
    assert {*lines[-1].split()[5:]} == {
        f"test_0.py::test_{it}" for it in ("fails", "teardown_fails", "ends_its_process")
    }
    assert status == 1


def test_four_flaky_tests_fail_the_run(run):
    tests = "@pytest.mark.parametrize('n', range(4))\ndef test(n):\n    assert not first_time(str(n))"
    status, lines = run(tests)
    assert lines[-1] == "flaky: 4 of 4: " + " ".join(f"test_0.py::test[{n}]" for n in range(4))
    assert status == 1


@pytest.mark.parametrize(
    ("contents", "last"),
    [
        ([PASSES], "1 passed in"),
        (["import absent", PASSES], "1 error in"),
        (["@pytest.mark.parametrize('n', range(21))\ndef test(n):\n    assert False"], "too many to run once more"),
    ],
    ids=["passed", "not collected", "too many"],
)
def test_nothing_else_runs_again(run, contents, last):
    status, lines = run(*contents)
    assert last in lines[-1], lines
    assert (status == 0) == ("passed" in last)
    assert not [line for line in lines if line.startswith("once more")]
