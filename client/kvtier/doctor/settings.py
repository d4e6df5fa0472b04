"""What the daemon is told to be: asked of ``kvtierd`` itself, which alone knows its defaults and its units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.doctor.finding import Finding, fail, ok, warn

CHECK: Final = "configuration"
_PREFIX: Final = "KVTIERD_"
_MODULES: Final = ("kvtierd", "kvtierd.main")
_PROGRAM_WITHIN: Final = 6
"""Of a command line: interpreter, its options, the program."""

_TIMEOUT_S: Final = 30.0


@dataclass(slots=True, frozen=True)
class Settings:
    """Sizes in bytes, 0 = the daemon does not have that tier, or it is a share of what is free there. ``device``: what
    the device tier is on."""

    runtime_dir: Path
    state_dir: Path
    disk_dir: Path
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    max_sessions: int = 1024
    device: str = "stand-in"


@dataclass(slots=True, frozen=True)
class Started:
    """How a daemon that runs was started. ``variables``: those that configure one. ``directory``: which its relative
    paths are from."""

    flags: tuple[str, ...]
    variables: Mapping[str, str]
    directory: Path


def read_started(pid: int) -> Started | None:
    """None where it may not be seen, or the number is of something else here, as where the daemon is in a container."""
    process = Path(f"/proc/{pid}")
    try:
        arguments = process.joinpath("cmdline").read_text().split("\0")[:-1]
        environment = process.joinpath("environ").read_text(errors="surrogateescape").split("\0")
        directory = process.joinpath("cwd").readlink()
    except OSError:
        return None
    flags = flags_of(arguments)
    if flags is None:
        return None
    pairs = dict(each.split("=", 1) for each in environment if "=" in each)
    return Started(flags, {name: value for name, value in pairs.items() if name.startswith(_PREFIX)}, directory)


def flags_of(arguments: Sequence[str]) -> tuple[str, ...] | None:
    """Of a command line that runs ``kvtierd``, as a script or as a module, what follows; None for another program."""
    for place, argument in enumerate(arguments[:_PROGRAM_WITHIN]):
        if Path(argument).name == "kvtierd" or argument in _MODULES or argument.endswith("/kvtierd/main.py"):
            return tuple(each for each in arguments[place + 1 :] if each != "--supervise")
    return None


def ask_daemon(flags: Sequence[str], started: Started | None = None) -> subprocess.CompletedProcess[str]:
    """``kvtierd --print-config --json`` with more flags, as it was ``started``. Raises OSError,
    subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "kvtierd.main", "--print-config", "--json"]
    if started is None:
        command += flags
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
    return subprocess.run(
        [*command, *started.flags, *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**ours, **started.variables},
        cwd=started.directory,
    )


def settings_from(printed: str) -> Settings:
    """From ``{key: {"value": …, "source": …}}``. Raises KeyError, TypeError, ValueError."""
    keys: dict[str, Any] = {name: entry["value"] for name, entry in json.loads(printed).items()}
    state = Path(keys["state_dir"])
    return Settings(
        runtime_dir=Path(keys["runtime_dir"]),
        state_dir=state,
        disk_dir=Path(keys["disk_dir"]) if keys["disk_dir"] else state / "disk",
        device_bytes=keys["device_bytes"] if isinstance(keys["device_bytes"], int) else 0,
        host_bytes=int(keys["host_bytes"]),
        disk_bytes=int(keys["disk_bytes"]),
        max_sessions=int(keys["max_sessions"]),
        device=str(keys["device"]),
    )


def read_settings(
    flags: Sequence[str], otherwise: Settings, started: Started | None = None
) -> tuple[Settings, Finding]:
    """``otherwise``: what to go on with where the configuration is refused or there is no ``kvtierd``. ``started``: how
    a daemon was that runs, whose configuration it is then; ``flags`` replace single keys of it."""
    shown = " ".join(["kvtierd --check-config", *(started.flags if started else ()), *flags])
    try:
        answer = ask_daemon(flags, started)
    except (OSError, subprocess.TimeoutExpired) as error:
        return otherwise, fail(CHECK, f"kvtierd could not be asked: {error}", f"see what it says: {shown}")
    if answer.returncode != 0:
        says = answer.stderr.strip() or f"exit status {answer.returncode}"
        return otherwise, fail(CHECK, says, f"correct it, or name the right file with --config; then: {shown}")
    try:
        settings = settings_from(answer.stdout)
    except (KeyError, TypeError, ValueError) as error:
        return otherwise, fail(CHECK, f"kvtierd's answer is not understood: {error!r}", "use kvtier of its version")
    whose = "accepted" if started is None else "as the daemon was started"
    return settings, ok(CHECK, f"{whose}; the address is {settings.runtime_dir}")


def unseen(refused: Finding, pid: int) -> Finding:
    """``refused``: for want of a file that there is not, or that may not be read. ``pid``: of a daemon that runs,
    0 = none does."""
    whose = f"that of the daemon, pid {pid}, cannot be seen" if pid else "cannot be seen"
    advice = "run kvtier doctor as root or as the daemon's user, or name its file with --config"
    return warn(CHECK, f"{whose}: {refused.found}", advice)
