"""What lets the GPU tests run in one call where there is no network: wheels, and one line where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import gpu_test
import gpu_wheels
import pytest

ROOT = Path(__file__).parents[3]


def wheel(directory: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> Path:
    path = directory / f"{name}-{version}-{tag}.whl"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def test_wheels_that_meet_all_requirements_have_no_fault(tmp_path: Path) -> None:
    wheels = [
        wheel(tmp_path, "one", "1.0", "two>=2", "absent; python_version < '3.12'", "absent; extra == 'more'", "numpy"),
        wheel(tmp_path, "two", "2.1", tag="cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64"),
        wheel(tmp_path, "three", "3", tag="cp310-abi3-manylinux2014_x86_64"),
    ]
    assert list(gpu_wheels.faults(wheels, ["one<2", "torch"])) == []


@pytest.mark.parametrize(
    ("requires", "tag", "told"),
    [
        ("absent>=1", "py3-none-any", "which nothing here is"),
        ("two>=2", "py3-none-any", "and 1.0 is here"),
        ("two", "cp311-cp311-manylinux_2_17_x86_64", "not for Python 3.12"),
        ("two", "cp312-cp312-manylinux_2_39_x86_64", "not for Python 3.12"),
        ("two", "cp312-cp312-manylinux_2_17_aarch64", "not for Python 3.12"),
    ],
)
def test_what_would_fail_on_the_host_is_told_before(tmp_path: Path, requires: str, tag: str, told: str) -> None:
    wheels = [wheel(tmp_path, "one", "1.0", requires), wheel(tmp_path, "two", "1.0", tag=tag)]
    (fault,) = gpu_wheels.faults(wheels, ["one"])
    assert told in fault


def test_two_versions_of_one_package_are_a_fault(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path, "one", version) for version in ("1.0", "1.1")]
    assert [*gpu_wheels.faults(wheels, [])] == ["one: two versions, 1.0 and 1.1"]


def test_all_that_the_tests_import_is_wanted() -> None:
    wanted = {line.partition(">")[0] for line in gpu_wheels.wanted()}
    assert wanted >= {"grpcio", "lmdb", "pydantic-settings", "xxhash", "pytest", "pytest-asyncio", "hypothesis"}
    assert not wanted & gpu_wheels.HOSTS


@pytest.mark.skipif(not gpu_test.no_gpu(), reason="there is a GPU here")
def test_where_there_is_no_gpu_one_line_says_so_and_what_is_known_of_one() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "gpu_test.py"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    assert line.startswith("gpu-test: skipped: ")
    assert line.endswith(f"Last run on a GPU: {gpu_test.last_run()}")


def test_the_benchmarks_say_what_a_gpu_last_showed() -> None:
    assert "does not say" not in gpu_test.last_run()
