"""What lets the GPU tests run in one call where there is no network: wheels, and one line where there is no GPU."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
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
@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_where_there_is_no_gpu_one_line_says_so_and_what_is_known_of_one(arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / ".ci" / "gpu_test.py"), *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    assert line.startswith("gpu-test: skipped: ")
    assert line.endswith(f"Last run on a GPU: {gpu_test.last_run()}")


def test_the_benchmarks_say_what_a_gpu_last_showed() -> None:
    assert "does not say" not in gpu_test.last_run()


RUNS: Final = """
import os, sys, time
import gpu_test
works = [sys.executable, "-X", "faulthandler", *sys.argv[2:]]
sys.exit(gpu_test.run(works, os.environ, time.monotonic() + 600, patience_s=float(sys.argv[1])))
"""
WORKS: Final = """
import signal, subprocess, sys, time
handler = signal.SIG_IGN if sys.argv[1] == "hangs" else signal.default_int_handler
signal.signal(signal.SIGINT, handler)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("what it has seen", flush=True)
    sys.exit(2)
"""


def test_a_run_past_its_time_is_ended_with_what_it_started() -> None:
    works = [sys.executable, "-c", WORKS, "hangs"]
    assert gpu_test.run(works, os.environ, time.monotonic(), patience_s=0.1) != 0


@pytest.mark.parametrize(
    ("how", "patience", "status", "says"),
    [("well", "60", 2, "what it has seen\n"), ("hangs", "0.1", -signal.SIGABRT % 256, "")],
)
def test_a_run_that_is_ended_says_what_it_has_seen_or_where_it_hangs(
    how: str, patience: str, status: int, says: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUNS, patience, "-c", WORKS, how],
        env=os.environ | {"PYTHONPATH": str(ROOT / ".ci")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as runs:
        assert runs.stdout is not None
        child = os.pidfd_open(int(runs.stdout.readline()))
        runs.send_signal(signal.SIGINT)
        said, told = runs.communicate(timeout=60)
        assert select.select([child], [], [], 60)[0], "what it started has ended, too"
        os.close(child)
    assert (runs.returncode, said) == (status, says)
    assert "gpu-test: interrupted" in told
    assert ("most recent call first" in told) == (how == "hangs")


def test_an_interrupt_while_a_run_is_started_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(os.pidfd_open(self.pid))
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with suppress(KeyboardInterrupt):
        works = [sys.executable, "-c", "import time; time.sleep(600)"]
        assert gpu_test.run(works, os.environ, time.monotonic() + 600, patience_s=60) != 0
    (child,) = started
    ended = select.select([child], [], [], 0)[0]
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)
    assert ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
