"""What the doctor makes of what it reads: every verdict on facts that are given, whatever this machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtier.abi import attach
from kvtier.cli.doctor import as_object, report
from kvtier.doctor import clock, disk, gpu, kernel, limits, memory, service, sockets
from kvtier.doctor import settings as settings_module
from kvtier.doctor.finding import Finding, Level, fail, ok, warn, worst
from kvtier.doctor.settings import Settings, flags_of, read_settings, unseen
from tests.fake_cuda import fake_environment
from tests.unit.client.fake_daemon import FakeDaemon

GIB = 1 << 30
HERE = Path("/srv/kv")
OTHERWISE = Settings(Path("/run/kvtier"), Path("/s"), Path("/s/disk"))


def judged(finding: Finding, level: Level, *says: str) -> None:
    """The verdict, what it says, and that whatever is not well comes with what to do."""
    assert finding.level is level, finding
    for part in says:
        assert part in f"{finding.found} {finding.advice}", part
    assert bool(finding.advice) is (level is not Level.OK)


# -- limits ------------------------------------------------------------------------------------------------------------

PROC_LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         8388608              unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""


def test_the_limits_of_a_process_are_its_hard_ones() -> None:
    assert limits.parse(PROC_LIMITS, "pid 7") == limits.Limits("pid 7", None, 524288)


def test_our_own_limits_stand_in_for_those_of_a_daemon_that_is_gone() -> None:
    assert "pid 999999999 are hidden" in limits.read(999999999).whose
    assert limits.read(os.getpid()).whose == f"kvtierd, pid {os.getpid()}"


@pytest.mark.parametrize(
    ("memlock", "level", "says"),
    [(None, Level.OK, "unlimited"), (8 * GIB, Level.OK, "8.0 GiB"), (8 * GIB - 1, Level.WARN, "LimitMEMLOCK=infinity")],
)
def test_locked_memory(memlock: int | None, level: Level, says: str) -> None:
    judged(limits.check_memlock(limits.Limits("it", memlock, None), 8 * GIB), level, says)


@pytest.mark.parametrize(
    ("descriptors", "level", "says"),
    [
        (None, Level.OK, "unlimited"),
        (4352, Level.OK, "4352 are enough"),
        (1024, Level.WARN, "enough for 192 sessions"),
        (256, Level.FAIL, "LimitNOFILE=65536"),
    ],
)
def test_file_descriptors(descriptors: int | None, level: Level, says: str) -> None:
    judged(limits.check_descriptors(limits.Limits("it", None, descriptors), max_sessions=1024), level, says)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_cgroup_limits_of_version_2_are_found_up_to_the_root(tmp_path: Path) -> None:
    group = tmp_path / "system.slice" / "kvtierd.service"
    group.mkdir(parents=True)
    for place, limit, used in ((group, "max", "5"), (group.parent, str(8 * GIB), str(GIB))):
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
    found = list(memory.cgroup_limits("0::/system.slice/kvtierd.service\n", tmp_path))
    assert found == [memory.CgroupMemory(group.parent / "memory.max", 8 * GIB, GIB)]


def test_cgroup_limits_of_version_1_and_a_group_that_a_container_hides(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    mount.mkdir()
    (mount / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (mount / "memory.usage_in_bytes").write_text("77\n")
    found = list(memory.cgroup_limits("5:devices:/\n4:memory:/docker/abc\n0::/\n", tmp_path))
    assert found == [memory.CgroupMemory(mount / "memory.limit_in_bytes", 4 * GIB, 77)]
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert list(memory.cgroup_limits("4:memory:/\n", tmp_path)) == []


@pytest.mark.parametrize(("available", "level"), [(9 * GIB, Level.OK), (8 * GIB, Level.FAIL)])
def test_available_memory(available: int, level: Level) -> None:
    has = memory.Memory(available, 64 * GIB, None)
    judged(memory.check_available(has, 8 * GIB, None), level, "8.0 GiB")


def test_a_daemon_that_runs_has_the_memory_of_its_caches_and_no_other() -> None:
    has = memory.Memory(4 * GIB, 64 * GIB, None)
    judged(memory.check_available(has, 8 * GIB, 4 * GIB), Level.OK, "caches have 4.0 GiB")
    judged(memory.check_available(has, 8 * GIB, 4 * GIB - 1), Level.FAIL, "more caches will be refused")
    judged(memory.check_available(has, 8 * GIB, 16 * GIB), Level.OK)


def test_a_cgroup_that_cannot_hold_the_tiers_would_kill_the_daemon() -> None:
    group = memory.CgroupMemory(Path("/cg/memory.max"), 10 * GIB, 2 * GIB)
    has = memory.Memory(64 * GIB, 64 * GIB, group)
    judged(memory.check_cgroup(has, 7 * GIB, running=False), Level.OK, "/cg/memory.max")
    judged(memory.check_cgroup(has, 8 * GIB, running=False), Level.FAIL, "MemoryMax=9216M")
    # What a running daemon has is part of what is used.
    judged(memory.check_cgroup(has, 8 * GIB, running=True), Level.OK)
    # It runs, so nothing has killed it: what it would need besides is a warning.
    judged(memory.check_cgroup(has, 10 * GIB, running=True), Level.WARN, "MemoryMax=11264M")
    judged(memory.check_cgroup(memory.Memory(1, 1, None), 8 * GIB, running=False), Level.OK, "no limit")


def test_memfds() -> None:
    judged(memory.check_memfd(None), Level.OK)
    judged(memory.check_memfd(OSError(38, "Function not implemented")), Level.FAIL, "not implemented", "seccomp")


# -- disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "taken", "level", "says"),
    [
        (101 * GIB, 0, Level.OK, "100.0 GiB configured"),
        (1 * GIB, 100 * GIB, Level.OK, "100.0 GiB taken"),
        (50 * GIB, 0, Level.FAIL, "free 51.0 GiB there"),
        (101 * GIB, None, Level.WARN, "as root"),
    ],
)
def test_disk_space(free: int, taken: int | None, level: Level, says: str) -> None:
    judged(disk.check_space(disk.Space(HERE, True, free, 500 * GIB, taken), 100 * GIB), level, says)


def test_space_is_that_of_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    space = disk.read_space(tmp_path / "not" / "yet")
    assert (space.exists, space.taken) == (False, 0)
    assert 0 < space.free <= space.total
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "slab").write_bytes(bytes(8192))
    taken = disk.read_space(tmp_path).taken
    assert taken is not None and taken >= 8192


@pytest.mark.parametrize(
    ("probe", "level", "says"),
    [
        (disk.DirectIo(HERE, "ext4"), Level.OK, "ext4"),
        (disk.DirectIo(HERE, "overlay", "Invalid argument"), Level.FAIL, "refuses it: Invalid argument"),
        (disk.DirectIo(HERE, "xfs", denied=True), Level.WARN, "as root"),
        (disk.DirectIo(HERE, "tmpfs"), Level.WARN, "is memory"),
    ],
)
def test_direct_io(probe: disk.DirectIo, level: Level, says: str) -> None:
    judged(disk.check_direct(probe), level, says)


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    probe = disk.probe_direct(tmp_path / "not" / "yet")
    assert (probe.directory, probe.denied) == (tmp_path, False)
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_is_that_of_the_innermost_and_latest_mount() -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 8:2 / /srv rw shared:2 - xfs /dev/sdb1 rw\n"
        "3 1 8:3 / /srv rw - btrfs /dev/sdc1 rw\n"
        "4 1 8:4 / /srv/with\\040space rw - ext4 /dev/sdd1 rw\n"
    )
    assert disk.filesystem_of(HERE, mounts) == "btrfs"
    assert disk.filesystem_of(Path("/srv/with space/x"), mounts) == "ext4"
    assert disk.filesystem_of(Path("/var"), mounts) == "ext4"


# -- sockets, kernel, clock --------------------------------------------------------------------------------------------


def test_socket_paths_have_a_limit() -> None:
    judged(sockets.check_path(Path("/run/kvtier")), Level.OK, "24 of 107")
    judged(sockets.check_path(Path("/" + 100 * "x")), Level.FAIL, "shorter")


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        (sockets.RuntimeDir(HERE, 0o750, 0, True), Level.OK, "0750"),
        (sockets.RuntimeDir(HERE, 0o750, 0, None), Level.OK, "no daemon"),
        (sockets.RuntimeDir(HERE, 0o750, 0, False), Level.WARN, "may not connect"),
        (sockets.RuntimeDir(HERE, 0o755, 0, True), Level.WARN, "chmod 0750"),
        (sockets.RuntimeDir(HERE, makeable=True), Level.OK, "the daemon makes it"),
        (sockets.RuntimeDir(HERE), Level.WARN, "install -d -m 0750"),
        (sockets.RuntimeDir(HERE, denied=True), Level.WARN, "permission denied"),
    ],
)
def test_the_runtime_directory(found: sockets.RuntimeDir, level: Level, says: str) -> None:
    judged(sockets.check_rights(found), level, says)


def test_a_runtime_directory_as_it_is(tmp_path: Path) -> None:
    assert sockets.read(tmp_path / "run") == sockets.RuntimeDir(tmp_path / "run", makeable=True)
    tmp_path.chmod(0o750)
    assert sockets.read(tmp_path) == sockets.RuntimeDir(tmp_path, 0o750, os.getuid(), None)
    (tmp_path / "attach.sock").touch()
    assert sockets.read(tmp_path).open_to_us is True


def test_the_kernel() -> None:
    judged(kernel.check(kernel.Kernel("6.8", None, None, True)), Level.OK, "6.8")
    judged(kernel.check(kernel.Kernel("6.1", None, None, False)), Level.WARN, "6.5")
    judged(
        kernel.check(kernel.Kernel("5.2", "not implemented", None, False)), Level.FAIL, "pidfd_open: not implemented"
    )


@pytest.mark.parametrize(
    ("now", "kept", "level"),
    [(1.8e9, True, Level.OK), (1.8e9, False, Level.WARN), (1.8e9, None, Level.WARN), (3600.0, True, Level.FAIL)],
)
def test_the_clock(now: float, kept: bool | None, level: Level) -> None:
    judged(clock.check(now, kept), level, "UTC")


# -- GPU ---------------------------------------------------------------------------------------------------------------

H100 = gpu.Device("NVIDIA H100", "GPU-1", 13000, 70 * GIB, 80 * GIB, vmm=True, posix_fd=True, batch_copy=True)


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        (gpu.Gpu(None), Level.OK, "stand-in"),
        (gpu.Gpu("NVRM 580"), Level.WARN, 'device = "cuda"'),
        (gpu.Gpu(None, gpu.Device(error="pip install 'kvtier[cuda]'")), Level.FAIL, "pip install"),
        (gpu.Gpu("NVRM 580", H100), Level.OK, "70.0 GiB of 80.0 GiB free; CUDA 13.0, memory can be shared"),
        (gpu.Gpu("NVRM 580", replace(H100, batch_copy=False)), Level.OK, "one by one"),
        (gpu.Gpu("NVRM 580", replace(H100, free=50 * GIB)), Level.FAIL, "device_bytes smaller"),
        (gpu.Gpu("NVRM 580", replace(H100, posix_fd=False)), Level.WARN, "cannot export"),
        (gpu.Gpu("NVRM 580", replace(H100, posix_fd=False, vmm=False)), Level.WARN, "no virtual memory management"),
    ],
)
def test_the_gpu(found: gpu.Gpu, level: Level, says: str) -> None:
    judged(gpu.check(found, device_bytes=60 * GIB, running=False), level, says)


def test_a_daemon_that_runs_has_its_share_of_the_gpu_already() -> None:
    full = gpu.Gpu("NVRM 580", replace(H100, free=GIB))
    judged(gpu.check(full, device_bytes=60 * GIB, running=True), Level.OK, "1.0 GiB of 80.0 GiB free")
    judged(gpu.check(full, device_bytes=90 * GIB, running=True), Level.FAIL, "device_bytes smaller")


def test_a_driver_without_a_device_tier_is_no_matter() -> None:
    judged(gpu.check(gpu.Gpu("NVRM 580"), 0, running=False), Level.OK, "no device tier")


def test_the_gpu_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_environment(features_off=["batch_copy"]).items():
        monkeypatch.setenv(name, value)
    device = gpu.read("cuda").device
    assert device is not None and not device.error
    assert (device.name, device.total, device.vmm, device.posix_fd) == ("Fake GPU 0", GIB, True, True)
    assert not device.batch_copy
    device = gpu.read("cuda:7").device
    assert device is not None and "not among those" in device.error
    assert gpu.read(gpu.STAND_IN).device is None


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
        (package / "__init__.py").touch()
    (bindings / "driver.py").write_text(driver)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    if says == "timed out":  # the others end by themselves, as late as that is
        monkeypatch.setattr(gpu, "_TIMEOUT_S", 2.0)
    device = gpu.read("cuda").device
    assert device is not None and says in device.error


@pytest.mark.parametrize(
    ("flags", "level", "says"),
    [
        (["--device", "cuda", "--device-bytes", "1MiB"], "ok", "1.0 GiB of 1.0 GiB free"),
        (["--device", "cuda:0", "--device-bytes", "50%"], "ok", "memory can be shared"),
        (["--device", "cuda", "--device-bytes", "2GiB"], "fail", "device_bytes is 2.0 GiB"),
        (["--device", "cuda:3"], "fail", "not among those"),
        (["--device", "cuda", "--disk-dir", "relative"], "ok", "Fake GPU 0"),
    ],
)
def test_a_device_is_looked_at_before_it_is_configured(tmp_path: Path, flags: list[str], level: str, says: str) -> None:
    file, nobody = tmp_path / "kvtierd.toml", tmp_path / "nobody"
    file.touch()
    command = [sys.executable, "-m", "kvtier.cli", "doctor", "--json", "--config", str(file), "--address", str(nobody)]
    asked = subprocess.run([*command, *flags], env=fake_environment(), capture_output=True, text=True, check=False)
    found = {finding["check"]: finding for finding in json.loads(asked.stdout)["findings"]}["GPU"]
    assert (found["level"], says in found["found"]) == (level, True), found


# -- the service -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "level", "says"),
    [
        ("there is no systemctl", Level.OK, "no systemctl"),
        ({"LoadState": "not-found"}, Level.OK, "not installed"),
        ({"LoadState": "bad-setting"}, Level.FAIL, "bad-setting"),
        ({"LoadState": "loaded", "ActiveState": "failed", "Result": "watchdog"}, Level.FAIL, "journalctl"),
        ({"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead"}, Level.WARN, "enable --now"),
        ({"LoadState": "loaded", "ActiveState": "active", "NRestarts": "3"}, Level.WARN, "restarted 3 times"),
        (
            {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "0"},
            Level.OK,
            "running",
        ),
    ],
)
def test_the_unit(unit: dict[str, str] | str, level: Level, says: str) -> None:
    judged(service.check_unit(unit), level, says)


def test_a_unit_that_failed_is_a_warning_beside_a_daemon_that_answers() -> None:
    unit = {"LoadState": "loaded", "ActiveState": "failed", "Result": "exit-code"}
    judged(service.check_unit(unit, answering=7), Level.WARN, "the daemon that answers, pid 7, is not its")


@pytest.mark.parametrize(
    ("daemon", "level", "says"),
    [
        (service.Daemon(7, "1.0"), Level.OK, "healthy"),
        (service.Daemon(7, "0.9"), Level.WARN, "restart"),
        (service.Daemon(7, "1.0", ("the disk fails",)), Level.WARN, "the disk fails"),
        (service.Daemon(silence="no daemon answers"), Level.WARN, "no daemon answers"),
        (service.Daemon(silence="no daemon answers"), Level.WARN, "systemctl start"),
        (service.Daemon(silence="no rule names uid 7", refused=True), Level.WARN, "no rule names uid 7"),
        (service.Daemon(silence="no rule names uid 7", refused=True), Level.WARN, "[[allow]]"),
    ],
)
def test_the_daemon(daemon: service.Daemon, level: Level, says: str) -> None:
    judged(service.check_daemon(daemon, client_version="1.0"), level, says)


async def test_who_may_not_ask_is_told_apart_from_nobody_who_answers(short_dir: Path) -> None:
    assert not (await service.ask(str(short_dir))).refused
    async with FakeDaemon(short_dir) as daemon:
        daemon.attach_replies = [attach.encode(attach.Failure("PERMISSION_DENIED", "no rule names uid 7"))]
        assert await service.ask(daemon.address) == service.Daemon(silence="no rule names uid 7", refused=True)


# -- the configuration -------------------------------------------------------------------------------------------------


def answered(monkeypatch: pytest.MonkeyPatch, stdout: str = "", stderr: str = "", status: int = 0) -> None:
    done = subprocess.CompletedProcess([], status, stdout, stderr)
    monkeypatch.setattr(settings_module, "ask_daemon", lambda flags, started: done)


def test_settings_are_the_daemon_s(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {
        "runtime_dir": "/r",
        "state_dir": "/s",
        "disk_dir": None,
        "device": "cuda",
        "device_bytes": 1,
        "host_bytes": 2,
        "disk_bytes": 3,
        "max_sessions": 4,
    }
    answered(monkeypatch, json.dumps({name: {"value": value, "source": "default"} for name, value in keys.items()}))
    settings, finding = read_settings([], OTHERWISE)
    assert settings == Settings(Path("/r"), Path("/s"), Path("/s/disk"), 1, 2, 3, 4, "cuda")
    judged(finding, Level.OK, "/r")
    keys["device_bytes"] = "80%"
    answered(monkeypatch, json.dumps({name: {"value": value, "source": "default"} for name, value in keys.items()}))
    assert read_settings([], OTHERWISE)[0].device_bytes == 0


def test_a_refused_configuration_is_a_failure_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, stderr="kvtierd: a.toml:3: host_bytes: must be a size\n", status=2)
    settings, finding = read_settings(["--config", "a.toml"], OTHERWISE)
    assert settings is OTHERWISE
    judged(finding, Level.FAIL, "a.toml:3: host_bytes", "kvtierd --check-config --config a.toml")
    answered(monkeypatch, stdout="{}")
    judged(read_settings([], OTHERWISE)[1], Level.FAIL, "not understood")


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["/usr/bin/python3", "/usr/bin/kvtierd", "--config", "a.toml"], ("--config", "a.toml")),
        (["/usr/bin/kvtierd", "--supervise", "--host-bytes", "1GiB"], ("--host-bytes", "1GiB")),
        (["python", "-X", "dev", "-m", "kvtierd.main", "--host-bytes=1GiB"], ("--host-bytes=1GiB",)),
        (["python", "-m", "kvtierd"], ()),
        (["python", "-m", "http.server", "8000"], None),
        ([], None),
    ],
)
def test_the_flags_of_a_daemon_are_what_follows_its_program(
    arguments: list[str], flags: tuple[str, ...] | None
) -> None:
    assert flags_of(arguments) == flags


def test_a_configuration_that_may_not_be_seen_is_a_warning() -> None:
    refused = fail("configuration", "kvtierd: a.toml: Permission denied", "correct it")
    judged(unseen(refused, 7), Level.WARN, "pid 7, cannot be seen: kvtierd: a.toml: Permission denied")
    judged(unseen(refused, 0), Level.WARN, "cannot be seen")


# -- the report --------------------------------------------------------------------------------------------------------

FINDINGS = [ok("clock", "kept in time"), warn("kernel", "old", "upgrade"), fail("disk space", "none", "buy some")]


def test_the_worst_decides() -> None:
    assert [worst(FINDINGS[:count]) for count in (1, 2, 3)] == [Level.OK, Level.WARN, Level.FAIL]


def test_the_report_says_what_to_do() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report(FINDINGS))
        text = console.export_text()
    for part in ("ok", "kept in time", "warn", "→ upgrade", "fail", "→ buy some"):
        assert part in text
    assert as_object(FINDINGS) == {
        "level": "fail",
        "findings": [
            {"check": "clock", "level": "ok", "found": "kept in time", "advice": ""},
            {"check": "kernel", "level": "warn", "found": "old", "advice": "upgrade"},
            {"check": "disk space", "level": "fail", "found": "none", "advice": "buy some"},
        ],
    }
