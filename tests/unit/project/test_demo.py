"""The end of ``make demo``: a real model, where an environment has vLLM or transformers."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
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


def make(*arguments, path=()):
    # The tests may run under make themselves.
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    own["PATH"] = os.pathsep.join([*path, own["PATH"]])
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=True
    )
    return list(filter(None, done.stdout.splitlines()))


def test_the_demo_runs_the_clone_without_building_it(tmp_path):
    """``uv`` stands for any installer, and is told of all that the daemon needs."""
    demo, uv = tmp_path / "demo", tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@"\n')
    uv.chmod(0o755)
    *_, installed, last = make(f"DEMO={demo}", f"{demo}/.stamp", path=[str(tmp_path)])
    assert installed.endswith(f"-r {demo}/requirements.txt") and last == "kvtier: running the demo"
    needed = (demo / "requirements.txt").read_text().splitlines()
    assert {re.split(r"\W", line)[0] for line in needed} >= {"click", "grpcio", "lmdb", "numpy", "pydantic"}
    ask = "import pip, kvtier, kvtierd, importlib.metadata as m; print(kvtier.__file__, m.version('kvtier'))"
    said = subprocess.run([demo / "bin/python", "-Ic", ask], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(ROOT / "client/kvtier/__init__.py"), version("kvtier")]


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
    first, *rest = make("demo", *map("=".join, zip(("DEMO", "ENGINES"), map(str, named), strict=True)))
    assert first == "ran examples/demo.py"
    assert [line.partition(",")[0] for line in rest] == ends
