"""`make gpu-test` on a host without a GPU, and what it carries to a host with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu
import pytest

ROOT = Path(__file__).parents[3]


def test_all_that_the_tests_import_is_carried_but_what_the_host_has():
    wanted = {line.partition(">")[0] for line in gpu.wanted()}
    assert wanted >= {"grpcio", "lmdb", "pydantic-settings", "xxhash", "pytest", "pytest-asyncio", "hypothesis"}
    assert not wanted & gpu.HOSTS


@pytest.mark.skipif(not gpu.why_not(), reason="there is a GPU here")
@pytest.mark.parametrize("command", ["test", "bench"])
def test_without_a_gpu_one_line_says_so_and_when_there_was_one(command):
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "gpu.py", command], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    assert line.startswith("gpu: skipped: ")
    assert line.endswith(f"Last run on a GPU: {gpu.last_run()}")
    assert "does not say" not in line
