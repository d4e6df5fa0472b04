"""The end of ``make demo``: vLLM, where its environment is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/vllm_two_engines.py"


def demo(engines):
    """Returns the output without the replay. ``-o``: the environment of the tests is not made again. The tests may run
    under make themselves."""
    command = ["make", "-o", ".venv/.stamp", "demo", "PYTHON=true", f"ENGINES={engines}"]
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_demo_ends_with_vllm_where_its_environment_is(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("python", "vllm", "kvtierd"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "ran $@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    assert demo(tmp_path).split() == ["ran", EXAMPLE]


def test_the_demo_names_the_command_for_vllm_where_there_is_none(tmp_path):
    (line,) = demo(tmp_path).splitlines()
    assert line.endswith(f"pip install '.[daemon]' && python {EXAMPLE}")
