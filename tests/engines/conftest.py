"""The engines' environment, which ``make test-engines`` builds, and tiny models for them."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.engines import ROOT, environment

VARIABLE = "KVTIER_ENGINES"
VLLMS = {"vllm": "0.32.", "vllm-0.33": "0.33."}
"""The versions of vLLM, by their names in the environment."""


@pytest.fixture(scope="session")
def engines():
    """The environment's directory."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"no engines: `make test-engines` builds their environment and names it in {VARIABLE}")
    return Path(named)


def require(engines: Path, engine: str) -> Path:
    """The Python of an environment that has the engine; else the test skips with the reason."""
    missing = engines / f"missing-{engine}"
    if missing.exists():
        pytest.skip(f"no {engine} on this machine: {missing.read_text().strip()}")
    return engines / "bin/python"


def folders(engines: Path, engine: str) -> list[Path]:
    """The folder of an engine that does not lie among the environment's own packages."""
    return [] if engine == "vllm" else [(engines / engine).resolve(strict=True)]


@pytest.fixture(scope="session")
def make_model(engines, tmp_path_factory):
    """Makes a model of a kind once for each seed; see :mod:`tests.engines.models`."""
    home = tmp_path_factory.mktemp("models")

    def make(kind: str, seed: int = 0) -> Path:
        directory = home / f"{kind}-{seed}"
        if not directory.exists():
            command = [engines / "bin/python", ROOT / "tests/engines/models.py", kind, directory, str(seed)]
            subprocess.run(command, env=environment(), check=True, capture_output=True)
        return directory

    return make
