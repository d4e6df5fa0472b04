"""The service: what systemd knows of it, and what the daemon says itself."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from kvtier import aio
from kvtier.doctor.finding import Finding, fail, ok, warn
from kvtier.errors import KvtierError, PermissionDenied
from kvtier.stats import CacheInfo
from kvtier.types import Tier

UNIT: Final = "kvtierd.service"
SYSTEMD: Final = "systemd unit"
DAEMON: Final = "daemon"
_TIMEOUT_S: Final = 10.0
_PROPERTIES: Final = ("LoadState", "ActiveState", "SubState", "Result", "NRestarts", "UnitFileState")


def read_unit() -> Mapping[str, str] | str:
    """Its properties; or why there are none."""
    if shutil.which("systemctl") is None:
        return "there is no systemctl"
    try:
        asked = subprocess.run(
            ["systemctl", "show", UNIT, f"--property={','.join(_PROPERTIES)}"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if asked.returncode != 0:
        return (asked.stderr.strip().splitlines() or [f"systemctl ended with status {asked.returncode}"])[0]
    return dict(line.split("=", 1) for line in asked.stdout.splitlines() if "=" in line)


def check_unit(unit: Mapping[str, str] | str, answering: int = 0) -> Finding:
    """``answering``: the pid of a daemon that answers, 0 = none does."""
    if isinstance(unit, str):
        return ok(SYSTEMD, f"not asked: {unit}")
    state = f"{unit.get('ActiveState', '?')} ({unit.get('SubState', '?')})"
    if unit.get("LoadState") == "not-found":
        return ok(SYSTEMD, f"{UNIT} is not installed")
    if unit.get("LoadState") != "loaded":
        return fail(SYSTEMD, f"{UNIT} is {unit.get('LoadState', '?')}", f"systemctl status {UNIT}")
    if unit.get("ActiveState") == "failed":
        found = f"{UNIT} failed: {unit.get('Result', '?')}"
        if answering:
            return warn(
                SYSTEMD, f"{found}; the daemon that answers, pid {answering}, is not its", f"journalctl -u {UNIT}"
            )
        return fail(SYSTEMD, found, f"journalctl -b -u {UNIT}; then: systemctl restart {UNIT}")
    if unit.get("ActiveState") != "active":
        return warn(SYSTEMD, f"{UNIT} is {state}", f"systemctl enable --now {UNIT}")
    if (restarts := int(unit.get("NRestarts") or 0)) > 0:
        return warn(SYSTEMD, f"{UNIT} is {state}, restarted {restarts} times", f"journalctl -b -u {UNIT} says why")
    return ok(SYSTEMD, f"{UNIT} is {state}, {unit.get('UnitFileState', '?')}")


@dataclass(slots=True, frozen=True)
class Daemon:
    """What a daemon that answers says. ``pid`` 0: none does, for the reason ``silence``. ``refused``: because whoever
    asks may not. ``given``: bytes of each tier that caches have, those that whoever asks may read."""

    pid: int = 0
    version: str = ""
    problems: tuple[str, ...] = ()
    silence: str = ""
    refused: bool = False
    given: Mapping[Tier, int] = field(default_factory=dict)


async def ask(address: str) -> Daemon:
    try:
        async with await aio.connect(address) as client:
            stats = await client.stats()
            given = _given(await _caches(client))
    except KvtierError as error:
        return Daemon(silence=str(error), refused=isinstance(error, PermissionDenied))
    return Daemon(stats.pid, stats.version, stats.problems, given=given)


async def _caches(client: aio.AsyncClient) -> list[CacheInfo]:
    """Those that may be seen: who administers caches need not read any."""
    try:
        return await client.caches()
    except PermissionDenied:
        return []


def _given(caches: Iterable[CacheInfo]) -> Mapping[Tier, int]:
    given: Counter[Tier] = Counter()
    for cache in caches:
        for group in cache.groups:
            given.update({part.tier: part.bytes for part in group.tiers})
    return given


def check_daemon(daemon: Daemon, client_version: str | None = None) -> Finding:
    if daemon.refused:
        advice = f"run kvtier doctor as root or as the daemon's user, or add an [[allow]] rule and reload {UNIT}"
        return warn(DAEMON, daemon.silence, advice)
    if not daemon.pid:
        return warn(DAEMON, daemon.silence, f"systemctl start {UNIT}, or run kvtierd by hand and read what it says")
    ours = client_version or version("kvtier")
    if daemon.problems:
        return warn(DAEMON, "; ".join(daemon.problems), "kvtier status, and the daemon's log")
    if daemon.version != ours:
        found = f"pid {daemon.pid} is version {daemon.version}, this client is {ours}"
        return warn(DAEMON, found, "restart the daemon after an upgrade")
    return ok(DAEMON, f"pid {daemon.pid}, version {daemon.version}, healthy")
