"""What the doctor says of a machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from kvtier.cli import doctor
from kvtier.cli.doctor import Finding, Level, MachineNeeds
from tests.fake_cuda import fake_environment

GIB = 1 << 30


def needs(**changed: Any) -> MachineNeeds:
    values: dict[str, Any] = {"devices": {}, "host_bytes": 8 * GIB, "disk_bytes": 0}
    return MachineNeeds(runtime_dir=Path("/r"), disk_dir=Path("/d"), **{**values, **changed})


def judged(finding: Finding, level: Level, *says: str) -> None:
    """The verdict, what it says, and that whatever is not well comes with what to do."""
    assert finding.level is level, finding
    for part in says:
        assert part in f"{finding.found} {finding.advice}", finding
    assert bool(finding.advice) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("hard", "level", "says"),
    [
        ("unlimited", Level.OK, "unlimited"),
        (str(8 * GIB), Level.OK, "8.0 GiB"),
        (str(8 * GIB - 1), Level.WARN, "LimitMEMLOCK=infinity"),
    ],
)
def test_the_hard_limit_of_locked_memory_holds_the_tiers(hard: str, level: Level, says: str) -> None:
    limits = (
        f"Limit  Soft Limit  Hard Limit  Units\nMax open files  1  2  files\nMax locked memory  65536  {hard}  bytes\n"
    )
    judged(doctor.check_locked_memory(limits, needs()), level, says)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_configuration_in_a_directory_of_others_is_left_to_kvtierd(tmp_path: Path) -> None:
    assert not doctor.is_there(tmp_path / "kvtierd.toml")
    os.seteuid(65534)
    try:
        assert doctor.is_there(tmp_path / "kvtierd.toml")
    finally:
        os.seteuid(0)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    judged(doctor.check_shared_memory(), Level.OK)

    def forbidden(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    judged(doctor.check_shared_memory(), Level.FAIL, "not implemented", "seccomp")


def test_disk_space_counts_what_is_there(tmp_path: Path) -> None:
    judged(doctor.check_disk_space(tmp_path / "not" / "yet", 4096), Level.OK, "0 B of it taken")
    (tmp_path / "slab").write_bytes(bytes(8192))
    judged(doctor.check_disk_space(tmp_path, 4096), Level.OK, "8.0 KiB of it taken")
    judged(doctor.check_disk_space(tmp_path, 1 << 60), Level.FAIL, "must stay free")


def test_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(doctor.check_direct(tmp_path / "not" / "yet"), Level.OK, str(tmp_path))

    def refused(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refused)
    judged(doctor.check_direct(tmp_path), Level.FAIL, "refuses it: Invalid argument")
    assert list(tmp_path.iterdir()) == []


def test_the_driver_s_device_has_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_environment().items():
        monkeypatch.setenv(name, value)
    judged(doctor.check_driver("cuda", GIB, running=False), Level.OK, "Fake GPU 0, 1.0 GiB of 1.0 GiB free")
    judged(doctor.check_driver("cuda", 2 * GIB, running=True), Level.FAIL, "2.0 GiB configured")
    judged(doctor.check_driver("cuda:7", 0, running=False), Level.FAIL, "not among those")


@pytest.mark.parametrize(
    ("driver", "says"),
    [("import os; os.abort()", "exit status -6"), ("import time; time.sleep(60)", "timed out"), ("1 / 0", "division")],
)
def test_a_driver_that_crashes_or_hangs_takes_nobody_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, says: str
) -> None:
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    for package in (bindings, bindings.parent):
        (package / "__init__.py").write_text('__version__ = "13.0.3"')
    (bindings / "driver.py").write_text(driver)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    if says == "timed out":  # the others end by themselves
        monkeypatch.setattr(doctor, "TIMEOUT_S", 2.0)
    judged(doctor.check_driver("cuda", 0, running=False), Level.FAIL, says)


def examined(*flags: str, status: int = 0) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "kvtier.cli", "doctor", "-o", "json", *flags]
    asked = subprocess.run(command, env=fake_environment(), capture_output=True, text=True, check=False)
    assert asked.returncode == status, asked
    return {finding["check"]: finding for finding in cast("list[dict[str, str]]", json.loads(asked.stdout))}


def test_a_machine_is_examined_without_a_daemon(tmp_path: Path, short_dir: Path) -> None:
    flags = ("--runtime-dir", str(short_dir), "--disk-dir", str(tmp_path), "--host-bytes", "1MiB")
    found = examined(*flags, "--disk-bytes", "1MiB", "--device", "cuda=50%", "--device", "stand-in=1MiB")
    assert "no daemon serves" in found["configuration"]["found"]
    assert [name for name, finding in found.items() if finding["level"] == "ok"] == [
        "configuration",
        *(["locked memory"] if found["locked memory"]["level"] == "ok" else []),
        "shared memory",
        "disk space",
        "O_DIRECT",
        "driver cuda",
    ]
    assert examined(*flags, "--disk-bytes", "900TiB", status=1)["disk space"]["level"] == "fail"


def test_a_configuration_that_the_daemon_refuses_is_the_only_finding(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text("host_bytes = 'plenty'\n")
    (found,) = examined("--config", str(file), status=1).values()
    assert found["level"] == "fail" and "host_bytes = 'plenty'" in found["found"]
