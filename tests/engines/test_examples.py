"""Examples that make a model themselves: another engine loads what the first engine has computed."""

import subprocess

import pytest

from tests.engines.conftest import folders, require
from tests.engines.engines import ROOT, START_S, environment

pytestmark = [pytest.mark.engines, pytest.mark.limit(400)]


@pytest.mark.parametrize(
    ("example", "version"),
    [
        ("vllm_two_engines", "vllm"),
        ("transformers_two_processes", "vllm"),
        ("transformers_two_processes", "transformers"),
    ],
    ids=["vllm", "pinned-by-vllm", "oldest-transformers"],
)
def test_the_answers_are_equal(engines, example, version):
    command = [require(engines, version), ROOT / f"examples/{example}.py"]
    variables = environment(*folders(engines, version))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2 * START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert " are equal: " in done.stdout
