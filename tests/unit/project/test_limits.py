"""A test that hangs fails by its name, and the others run."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

from tests.limits import limited

ROOT: Final = Path(__file__).parents[3]


def test_a_limit_inside_another_leaves_it_as_it_was():
    with limited(600), limited(60):
        pass
    remaining, _ = signal.getitimer(signal.ITIMER_REAL)
    assert remaining > 0, "that of this test"
    with pytest.raises(pytest.fail.Exception, match=r"after 0\.05 s"), limited(0.05):
        with limited(600):
            pass
        threading.Event().wait(600)


HANGS: Final = """
import asyncio, threading
import pytest

@pytest.mark.limit(0.2)
async def test_in_the_loop():
    await asyncio.Event().wait()

@pytest.mark.limit(0.2)
def test_in_a_lock():
    threading.Lock().acquire() and threading.Event().wait()

@pytest.fixture
def left():
    yield
    threading.Event().wait()

@pytest.mark.limit(0.2)
def test_at_its_end(left):
    pass

def test_after_them():
    pass
"""

SLOW: Final = """
import time
from hypothesis import given, strategies
from hypothesis.internal.conjecture import engine
from tests.limits import LIMIT_S
import pytest

engine.MAX_SHRINKING_SECONDS /= 20  # as much less as the limit

@pytest.mark.limit(LIMIT_S / 20)
@given(strategies.lists(strategies.integers(0, 10**9), min_size=40))
def test_a_property(numbers):
    time.sleep(0.2)
    assert sum(numbers) < 10**6 or len(set(numbers)) < 20
"""


def test_each_test_that_hangs_is_named_and_the_next_one_runs(tmp_path):
    tests = tmp_path / "test_hangs.py"
    ended = _run(tests, HANGS)
    assert "2 failed, 2 passed, 1 error" in ended.stdout, ended.stdout + ended.stderr
    for told in ("FAILED TESTS::test_in_the_loop", "FAILED TESTS::test_in_a_lock", "ERROR TESTS::test_at_its_end"):
        line = told.replace("TESTS", os.path.relpath(tests, ROOT)) + " - Failed: it has not ended after 0.2 s"
        assert line in ended.stdout.splitlines(), ended.stdout


def test_a_property_with_slow_examples_fails_with_one_of_them(tmp_path):
    ended = _run(tmp_path / "test_slow.py", SLOW)
    assert "numbers=[" in ended.stdout, ended.stdout + ended.stderr
    assert "it has not ended" not in ended.stdout


def _run(tests, content):
    """The tests in it, as the project's own are run."""
    tests.write_text(content)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--rootdir={tests.parent}",
        str(tests),
    ]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "-q"]
    wide = os.environ | {"COLUMNS": "500", "CI": "true"}  # with the same examples each time
    return subprocess.run(command, cwd=ROOT, env=wide, check=False, capture_output=True, text=True, timeout=100)
