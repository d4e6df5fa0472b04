"""``kvtierd`` as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.abi import attach
from kvtierd.core.ids import GroupId
from kvtierd.tiers.disk.root import DiskRoot
from tests.unit.service.rig import SPEC

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(short_dir: Path) -> Iterator[Spawn]:
    """Starts a daemon on directories below ``short_dir`` unless told otherwise; ends it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(
        *flags: str, run: str = "run", state: str = "state", env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvtierd.main", "--runtime-dir", str(short_dir / run)]
        command += ["--state-dir", str(short_dir / state), *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (env or {})
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("kvtierd ready"), process.communicate()
    return line


def attach_to(directory: Path) -> attach.Welcome:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(attach.socket_path(directory / "run", attach.ATTACH_SOCKET))
        sock.send(attach.encode(attach.Hello()))
        welcome = attach.decode_welcome(sock.recv(attach.MAX_MESSAGE + 1))
    assert isinstance(welcome, attach.Welcome)
    return welcome


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_stops_cleanly(short_dir: Path, spawn: Spawn, number: signal.Signals) -> None:
    process = spawn("--host-bytes", "1MiB")
    assert ready_line(process) == f"kvtierd ready pid={process.pid} address={short_dir / 'run'}\n"
    sockets = [short_dir / "run" / name for name in (attach.ATTACH_SOCKET, attach.RPC_SOCKET)]
    assert [path.stat().st_mode & 0o777 for path in sockets] == [0o660, 0o660]
    assert (short_dir / "run").stat().st_mode & 0o777 == 0o750
    process.send_signal(number)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "level=info where=kvtierd.serve stopped clean=True" in log
    assert not any(path.exists() for path in sockets)


@pytest.mark.parametrize("full", [False, True])
def test_a_daemon_runs_on_where_nobody_takes_its_line(short_dir: Path, full: bool) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    out = os.open("/dev/full", os.O_WRONLY) if full else writes
    command = [sys.executable, "-m", "kvtierd.main", "--runtime-dir", str(short_dir / "run")]
    command += ["--state-dir", str(short_dir / "state"), "--host-bytes", "1MiB"]
    with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if "standard output takes nothing" in line)
        assert ("No space left" if full else "Broken pipe") in told
        assert attach_to(short_dir).pid == process.pid
        process.terminate()
        _, log = process.communicate(timeout=20)
    for fd in {out, writes}:
        os.close(fd)
    assert (process.returncode, "BrokenPipeError" in log) == (0, False)


def test_a_killed_daemon_is_followed_by_one_in_a_new_epoch_on_the_same_sockets(short_dir: Path, spawn: Spawn) -> None:
    first = spawn("--host-bytes", "1MiB")
    ready_line(first)
    before = attach_to(short_dir)
    first.kill()
    first.wait()
    assert (short_dir / "run" / attach.RPC_SOCKET).exists(), "a crash leaves the sockets behind"
    ready_line(spawn("--host-bytes", "1MiB"))
    after = attach_to(short_dir)
    assert (after.epoch, after.boot) == (before.epoch + 1, before.boot + 1)


def test_a_cleanly_stopped_daemon_is_followed_by_one_in_the_same_epoch(short_dir: Path, spawn: Spawn) -> None:
    for boot in (1, 2):
        process = spawn("--host-bytes", "1MiB")
        ready_line(process)
        welcome = attach_to(short_dir)
        assert (welcome.epoch, welcome.boot) == (1, boot)
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("shared", ["run", "state", "disk"])
def test_a_second_daemon_on_any_of_its_directories_is_refused(short_dir: Path, spawn: Spawn, shared: str) -> None:
    first = spawn("--disk-bytes", "1MiB", "--disk-dir", str(short_dir / "disk"))
    ready_line(first)
    names = {name: name if name == shared else f"{name}2" for name in ("run", "state", "disk")}
    disk = str(short_dir / names["disk"])
    second = spawn("--disk-bytes", "1MiB", "--disk-dir", disk, run=names["run"], state=names["state"])
    out, log = second.communicate(timeout=20)
    assert second.returncode == 1
    assert out == ""
    assert log == f"kvtierd: {short_dir / shared}: in use by process {first.pid}\n"
    assert attach_to(short_dir).pid == first.pid, "the first one has its sockets still"


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        ((), {}, "kvtierd: no tier is configured: set device_bytes, host_bytes or disk_bytes above 0\n"),
        (
            ("--host-bytes", "lots"),
            {},
            "kvtierd: command line: --host-bytes = 'lots': must be bytes",
        ),
        (("--host-bytes", "1MiB"), {"KVTIERD_HOSTS": "1"}, "kvtierd: environment: KVTIERD_HOSTS: there is no such key"),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_is_touched(
    short_dir: Path, spawn: Spawn, flags: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    process = spawn(*flags, env=env)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert log.startswith(says)
    assert not (short_dir / "state").exists()
    assert not (short_dir / "run").exists()


def test_a_runtime_directory_too_deep_for_a_socket_is_refused(short_dir: Path, spawn: Spawn) -> None:
    process = spawn("--host-bytes", "1MiB", run="x" * 100)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "the limit is 107" in log


def test_a_foreign_disk_directory_is_refused_and_untouched(short_dir: Path, spawn: Spawn) -> None:
    foreign = short_dir / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"meow")
    process = spawn("--disk-bytes", "1MiB", "--disk-dir", str(foreign))
    _, log = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"kvtierd: {foreign}: " in log
    assert [path.name for path in foreign.iterdir()] == ["cat.jpg"]


def test_a_disk_tier_smaller_than_what_it_holds_is_refused(short_dir: Path, spawn: Spawn) -> None:
    root = DiskRoot.open(short_dir / "disk")
    root.create("big", SPEC, {GroupId(0): 512})
    root.close()
    process = spawn("--disk-bytes", "1MiB", "--disk-dir", str(short_dir / "disk"))
    _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "command line: --disk-bytes = 1048576: " in log
    assert "big" in log


def test_flags_are_explained(spawn: Spawn) -> None:
    out, _ = spawn("--help").communicate(timeout=20)
    assert "--device-bytes" in out
    assert "--no-debug-checks" in out
