"""The end of ``make demo``: vLLM, where its environment is."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/vllm_two_engines.py"


def environment(directory, *names):
    """Makes programs that say how they are called."""
    (directory / "bin").mkdir(parents=True)
    (directory / ".stamp").touch()
    for name in names:
        (directory / "bin" / name).write_text('#!/bin/sh\necho "ran $@"\n')
        (directory / "bin" / name).chmod(0o755)
    return directory


def demo(tmp_path, engines):
    """Returns the lines of the output. The tests may run under make themselves."""
    command = ["make", "demo", f"DEMO={environment(tmp_path / 'demo', 'python')}", f"ENGINES={engines}"]
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=True)
    return [line for line in done.stdout.splitlines() if line]


def test_the_demo_ends_with_vllm_where_its_environment_is(tmp_path):
    engines = environment(tmp_path / "engines", "python", "vllm", "kvtierd")
    assert demo(tmp_path, engines) == ["ran examples/demo.py", f"ran {EXAMPLE}"]


def test_the_demo_names_the_command_for_vllm_where_there_is_none(tmp_path):
    replay, line = demo(tmp_path, tmp_path / "engines")
    assert replay == "ran examples/demo.py"
    assert line.endswith(f"pip install '.[daemon]' && python {EXAMPLE}")
