"""What the daemon is told to be: asked of ``kvtierd`` itself, which alone knows its defaults and its units."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.doctor.finding import Finding, fail, ok

CHECK: Final = "configuration"
_TIMEOUT_S: Final = 30.0


@dataclass(slots=True, frozen=True)
class Settings:
    """Sizes in bytes, 0 = the daemon does not have that tier."""

    runtime_dir: Path
    state_dir: Path
    disk_dir: Path
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    max_sessions: int = 1024


def ask_daemon(flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """``kvtierd --print-config --json`` with more flags. Raises OSError, subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "kvtierd.main", "--print-config", "--json", *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)


def settings_from(printed: str) -> Settings:
    """From ``{key: {"value": …, "source": …}}``. Raises KeyError, TypeError, ValueError."""
    keys: dict[str, Any] = {name: entry["value"] for name, entry in json.loads(printed).items()}
    state = Path(keys["state_dir"])
    return Settings(
        runtime_dir=Path(keys["runtime_dir"]),
        state_dir=state,
        disk_dir=Path(keys["disk_dir"]) if keys["disk_dir"] else state / "disk",
        device_bytes=int(keys["device_bytes"]),
        host_bytes=int(keys["host_bytes"]),
        disk_bytes=int(keys["disk_bytes"]),
        max_sessions=int(keys["max_sessions"]),
    )


def read_settings(flags: Sequence[str], otherwise: Settings) -> tuple[Settings, Finding]:
    """``otherwise``: what to go on with where the configuration is refused or there is no ``kvtierd``."""
    shown = " ".join(["kvtierd --check-config", *flags])
    try:
        answer = ask_daemon(flags)
    except (OSError, subprocess.TimeoutExpired) as error:
        return otherwise, fail(CHECK, f"kvtierd could not be asked: {error}", f"see what it says: {shown}")
    if answer.returncode != 0:
        says = answer.stderr.strip() or f"exit status {answer.returncode}"
        return otherwise, fail(CHECK, says, f"correct it, or name the right file with --config; then: {shown}")
    try:
        settings = settings_from(answer.stdout)
    except (KeyError, TypeError, ValueError) as error:
        return otherwise, fail(CHECK, f"kvtierd's answer is not understood: {error!r}", "use kvtier of its version")
    return settings, ok(CHECK, f"accepted; the address is {settings.runtime_dir}")
