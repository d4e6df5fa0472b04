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


def test_the_bench_ends_with_its_goals():
    """Of figures of many blocks of one pool; the others have no goal."""

    def result(pools, piece_bytes, blocks, ratio):
        params = {"pools": pools, "piece_bytes": piece_bytes, "blocks": blocks}
        return {"name": "gpu.device>host", "params": params, "ratio": ratio}

    lines = gpu.goals([result(1, 65536, 1024, 0.84), result(1, 1 << 20, 256, 0.96), result(1, 1 << 20, 1, 0.1)])
    assert [line.split()[-3:] for line in lines[1:]] == [["0.85", "0.84", "MISSED"], ["0.95", "0.96", "met"]]
    assert gpu.goals([result(16, 65536, 64, 0.9), result(1, 4 << 20, 64, 0.9)]) == lines[:1]
