"""The ranges of dependencies: bounded above, without releases that are known to be bad, and met by the constraints."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RUNTIME = [Requirement(each) for each in (*PROJECT["dependencies"], *EXTRAS["daemon"], *EXTRAS["otel"], *EXTRAS["zmq"])]


@pytest.mark.parametrize("wanted", RUNTIME, ids=lambda wanted: wanted.name)
def test_a_next_major_version_is_not_taken_and_the_constraint_is(wanted):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints-dev.txt").read_text().lower(), re.MULTILINE))
    pin = next(version for name, version in pins.items() if name.replace("_", "-") == wanted.name)
    assert wanted.specifier.contains(pin)
    assert not wanted.specifier.contains(f"{int(pin.split('.')[0]) + 1}.0")


@pytest.mark.parametrize(
    ("version", "fits"), {"5.29.4": False, "5.29.5": True, "6.31.0": False, "6.31.1": True}.items()
)
def test_protobufs_that_recurse_without_end_are_left_out(version, fits):
    """CVE-2025-4565."""
    (protobuf,) = (wanted for wanted in RUNTIME if wanted.name == "protobuf")
    assert protobuf.specifier.contains(version) is fits
