"""Starts that are to fail, and what they must not touch."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import devices
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import PATIENCE_S

_END_S = 3 * PATIENCE_S

Tree = Mapping[str, tuple[int, int, int, bytes]]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without any configuration of a daemon but ``extra``."""
    rest = devices.of_daemon(os.environ)
    return rest | dict(extra or {})


def kvtierd(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``kvtierd`` to its end, which must come by itself."""
    return _run([sys.executable, "-m", "kvtierd.main", *map(str, arguments)], env)


def cut_short(daemon: DaemonProcess, seconds: float, end: signal.Signals) -> int:
    """Starts a daemon, signals it after so long, and returns its exit status."""
    process = subprocess.Popen(
        daemon.command(), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(end)
    return process.wait(PATIENCE_S)


def refused(daemon: DaemonProcess, *flags: str | Path, status: int = 1) -> str:
    """What a daemon that must not start says, one line a fault."""
    ended = _run([*daemon.command(), *map(str, flags)], daemon.variables)
    assert ended.returncode == status, ended
    return message(ended)


def message(ended: subprocess.CompletedProcess[str]) -> str:
    """What a failed start says to people: the log, if there is any, set aside."""
    assert ended.stdout == "", ended.stdout
    assert "Traceback" not in ended.stderr, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("time=")]
    assert lines and all(line.startswith("kvtierd: ") for line in lines), ended.stderr
    return "\n".join(lines)


def tree(root: Path) -> Tree:
    """All that a directory holds: of each path its mode, size, time of change and content."""
    paths = [root, *sorted(root.rglob("*"))]
    return {str(path.relative_to(root)): _state(path) for path in paths}


def _state(path: Path) -> tuple[int, int, int, bytes]:
    status = path.lstat()
    return status.st_mode, status.st_size, status.st_mtime_ns, path.read_bytes() if path.is_file() else b""


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_END_S,
    )
