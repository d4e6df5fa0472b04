"""The end of ``make demo``: a real model, where an environment has vLLM or transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VLLM, TRANSFORMERS = (f"ran examples/{name}.py" for name in ("vllm_two_engines", "transformers_two_processes"))


def environment(directory, *modules):
    """Makes a Python that finds these modules and says which file it was to run."""
    for module in modules:
        (directory / module).mkdir(parents=True)
    (directory / "bin").mkdir(parents=True)
    (directory / ".stamp").touch()
    python = directory / "bin/python"
    python.write_text(
        f'#!/bin/sh\n[ $1 = -c ] || exec echo "ran $1"\ncd {directory} && exec {sys.executable} -ES "$@"\n'
    )
    python.chmod(0o755)
    return directory


@pytest.mark.parametrize(
    ("of_demo", "of_engines", "ends"),
    [
        ((), ("kvtierd", "vllm", "transformers"), [VLLM]),
        (("kvtierd", "transformers"), ("vllm",), [TRANSFORMERS]),
        ((), ("kvtierd", "transformers"), [TRANSFORMERS]),
        (("kvtierd",), ("transformers",), ["With vLLM", "With transformers"]),
    ],
)
def test_the_demo_goes_on_with_a_model_where_an_engine_is(tmp_path, of_demo, of_engines, ends):
    named = environment(tmp_path / "demo", *of_demo), environment(tmp_path / "engines", *of_engines)
    # The tests may run under make themselves.
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "demo", *map("=".join, zip(("DEMO", "ENGINES"), map(str, named), strict=True))]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=True)
    first, *rest = filter(None, done.stdout.splitlines())
    assert first == "ran examples/demo.py"
    assert [line.partition(",")[0] for line in rest] == ends
