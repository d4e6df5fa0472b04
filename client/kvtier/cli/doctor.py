"""``kvtier doctor``: checks this machine against the daemon's configuration, and gives advice.

The checks have the rights of the user who runs the command. A check without permission is a warning, never a guess.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import DaemonAt, address_option
from kvtier.cli.options import command, output_option
from kvtier.cli.output import show
from kvtier.errors import KvtierError, PermissionDenied
from kvtier.transport import is_tcp
from kvtier.types import DaemonStats, RemoteStats, size

USUAL_FILE: Final = Path("/etc/kvtier/kvtierd.toml")
"""The configuration file of the systemd unit."""

FLOOR_BYTES: Final = 1 << 30
"""Bytes that the daemon leaves free on the file system, or a twentieth of its size if that is less."""

_STAND_IN: Final = "stand-in"
_PAGE: Final = 4096
TIMEOUT_S: Final = 60.0
_ASK_GPU: Final = """
import json, sys
from kvtier.abi.cuda.driver import Driver
driver = Driver.open(sys.argv[1])
print(json.dumps([driver.name, *driver.memory()]))
"""


class Level(StrEnum):
    """The verdict of a check. ``WARN``: works worse than it could, or was not checked. ``FAIL``: does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    """The result of a check. ``advice``: a remedy, or empty."""

    check: str
    level: Level
    found: str
    advice: str = ""


@dataclass(slots=True, frozen=True)
class MachineNeeds:
    """The configuration's demands on the machine. ``devices``: bytes by name, 0 for a share of the free memory."""

    runtime_dir: Path
    disk_dir: Path
    devices: Mapping[str, int]
    host_bytes: int
    disk_bytes: int
    remote: bool = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tiers in main memory."""
        return self.host_bytes + self.devices.get(_STAND_IN, 0)


class ProgramFailed(Exception):
    """A program that doctor ran has failed. The text is its error output, or the reason why it did not run."""


def examine(place: DaemonAt, flags: Sequence[str]) -> list[Finding]:
    """Checks the machine against the configuration of the daemon at ``place``, changed by ``flags``. If these name a
    file or another daemon, or no daemon answers, against the configuration that ``kvtierd`` has with them."""
    answers, stats = ask_daemon(place)
    named = {flag.partition("=")[0] for flag in flags}
    others = not named.isdisjoint(("--config", "--runtime-dir"))
    running = None if others or stats is None or is_tcp(place.address) else started_with(stats.pid)
    own, variables = running or ([], None)
    if running is None and "--config" not in named and "KVTIERD_CONFIG" not in os.environ and is_there(USUAL_FILE):
        own = ["--config", str(USUAL_FILE)]
    try:
        needs = read_needs([*own, *flags], variables)
    except ProgramFailed as refused:
        advice = "correct it; or name the file with --config, or the sizes, such as --host-bytes 8GiB"
        # A running daemon has a configuration, but this user may not be allowed to read it.
        return [Finding("configuration", Level.WARN if answers else Level.FAIL, str(refused), advice)]
    if "--runtime-dir" in named or not answers:
        place = DaemonAt(str(needs.runtime_dir))
        answers, stats = ask_daemon(place)
    pid = 0 if stats is None or is_tcp(place.address) else stats.pid
    runs = f"a daemon, pid {pid}," if pid else "a daemon" if answers else "no daemon"
    whose = f"that of the daemon{' with these options' if flags else ''}" if running else "accepted"
    findings = [Finding("configuration", Level.OK, f"{whose}; {runs} serves at {place.address}")]
    checks: dict[str, Callable[[], Finding]] = {
        "locked memory": lambda: check_locked_memory(Path(f"/proc/{pid or 'self'}/limits").read_text(), needs),
        "shared memory": check_shared_memory,
    }
    if needs.disk_bytes:
        checks["disk space"] = lambda: check_disk_space(needs.disk_dir, needs.disk_bytes)
        checks["O_DIRECT"] = lambda: check_direct(needs.disk_dir)
    for device, nbytes in needs.devices.items():
        if device != _STAND_IN:
            checks[f"driver {device}"] = partial(check_driver, device, nbytes, running=pid != 0)
    if needs.remote:
        checks["remote store"] = lambda: check_remote(None if stats is None else stats.remote)
    for name, check in checks.items():
        try:
            findings.append(check())
        except OSError as error:
            advice = "run kvtier doctor as root or as the daemon's user"
            findings.append(Finding(name, Level.WARN, f"could not be looked at: {error}", advice))
    return findings


def started_with(pid: int) -> tuple[list[str], dict[str, str]] | None:
    """Reads a daemon's options, and its variables that configure it. None: this user may not, or it is no daemon."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        variables = Path(f"/proc/{pid}/environ").read_text(errors="surrogateescape").split("\0")
    except OSError:
        return None
    programs = [place for place, word in enumerate(words) if Path(word).name in ("kvtierd", "kvtierd.main")]
    named = dict(each.split("=", 1) for each in variables if each.startswith("KVTIERD_"))
    return (words[programs[0] + 1 :], named) if programs else None


def read_needs(flags: Sequence[str], variables: Mapping[str, str] | None = None) -> MachineNeeds:
    """Asks ``kvtierd`` for its configuration with all defaults applied. ``variables``: replace the own ones that
    configure a daemon. Raises :class:`ProgramFailed`."""
    kept = {name: value for name, value in os.environ.items() if variables is None or not name.startswith("KVTIERD_")}
    answer = _asked("-m", "kvtierd.main", "--print-config", *flags, env={**kept, **(variables or {})})
    keys: dict[str, Any] = {name: entry["value"] for name, entry in json.loads(answer).items()}
    return MachineNeeds(
        runtime_dir=Path(keys["runtime_dir"]),
        disk_dir=Path(keys["disk_dir"] or Path(keys["state_dir"]) / "disk"),
        devices={each["name"]: each["bytes"] if isinstance(each["bytes"], int) else 0 for each in keys["device"]},
        host_bytes=keys["host_bytes"],
        disk_bytes=keys["disk_bytes"],
        remote=keys["remote"] is not None,
    )


def _asked(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Runs Python in a child process, and returns its standard output. Raises :class:`ProgramFailed`."""
    try:
        command_line = [sys.executable, *arguments]
        answer = subprocess.run(command_line, env=env, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProgramFailed(str(error)) from error
    if answer.returncode != 0:
        raise ProgramFailed(answer.stderr.strip() or f"exit status {answer.returncode}")
    return answer.stdout


def ask_daemon(place: DaemonAt) -> tuple[bool, DaemonStats | None]:
    """Returns whether a daemon answers, even if it refuses this user, and its statistics if it gives them."""

    async def ask() -> DaemonStats:
        async with await place.connect(wait=0) as client:
            return await client.stats()

    try:
        return True, asyncio.run(ask())
    except PermissionDenied:
        return True, None
    except KvtierError:
        return False, None


def check_locked_memory(limits: str, needs: MachineNeeds) -> Finding:
    """Checks the hard limit. ``limits``: ``/proc/<pid>/limits`` of the daemon, or of this process if none runs."""
    limit = next(line for line in limits.splitlines() if line.startswith("Max locked memory")).split()[-2]
    wanted = size(needs.memory_bytes)
    if limit == "unlimited" or int(limit) >= needs.memory_bytes:
        shown = limit if limit == "unlimited" else size(int(limit))
        return Finding("locked memory", Level.OK, f"the limit is {shown}; the tiers in memory have {wanted}")
    found = f"the limit is {size(int(limit))}, the tiers in memory have {wanted}: they may be swapped out"
    advice = "systemctl edit kvtierd, [Service]: LimitMEMLOCK=infinity; or /etc/security/limits.d, memlock unlimited"
    return Finding("locked memory", Level.WARN, found, advice)


def check_shared_memory() -> Finding:
    """Makes a sealed memfd, as the daemon does for each cache. The size of /dev/shm does not matter."""
    try:
        fd = os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(fd, "wb"):
            os.posix_fallocate(fd, 0, _PAGE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    except OSError as error:
        advice = "allow memfd_create and F_ADD_SEALS in the sandbox's seccomp profile, and mount /proc"
        return Finding("shared memory", Level.FAIL, f"no sealed memfd: {error}", advice)
    return Finding("shared memory", Level.OK, "sealed memfds can be made")


def check_disk_space(directory: Path, needed: int) -> Finding:
    """Counts free bytes and the bytes that the directory has already as room for the tier."""
    status = os.statvfs(_nearest(directory))
    free, floor = status.f_bavail * status.f_frsize, min(FLOOR_BYTES, status.f_blocks * status.f_frsize // 20)
    taken = sum(
        os.stat(os.path.join(path, name)).st_blocks * 512
        for path, _, files in os.walk(directory, onerror=_raise_unless_missing)
        for name in files
    )
    found = f"{directory}: {size(needed)} configured, {size(taken)} of it taken, {size(free)} free"
    short = needed + floor - free - taken
    if short <= 0:
        return Finding("disk space", Level.OK, found)
    advice = f"free {size(short)} there, make disk_bytes so much smaller, or set disk_dir to another file system"
    return Finding("disk space", Level.FAIL, f"{found}; {size(floor)} must stay free", advice)


def check_direct(directory: Path) -> Finding:
    """Writes one page past the page cache to a temporary file."""
    place = _nearest(directory)
    with tempfile.NamedTemporaryFile(prefix=".kvtier-doctor-", dir=place) as file, mmap.mmap(-1, _PAGE) as page:
        try:
            fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            with os.fdopen(fd, "rb+", buffering=0):
                os.pwritev(fd, [page], 0)
                os.fdatasync(fd)
        except OSError as error:
            advice = "set disk_dir to a directory on a local ext4 or xfs; overlay and network file systems may refuse"
            return Finding("O_DIRECT", Level.FAIL, f"{place} refuses it: {error.strerror}", advice)
    return Finding("O_DIRECT", Level.OK, f"{place} takes aligned writes past the page cache")


def check_driver(device: str, nbytes: int, *, running: bool) -> Finding:
    """Opens the device in a child process, since a broken driver may crash or hang. A ``running`` daemon may have the
    device's memory already."""
    check = f"driver {device}"
    advice = "nvidia-smi says whether the driver works; of a service see also systemd/kvtierd.service.d/gpu.conf"
    try:
        name, free, total = json.loads(_asked("-c", _ASK_GPU, device).splitlines()[-1])
    except ProgramFailed as refused:
        return Finding(check, Level.FAIL, str(refused).splitlines()[-1], advice)
    found = f"{name}, {size(free)} of {size(total)} free"
    if nbytes > (total if running else free):
        advice = "make its bytes smaller, or end what uses the memory: nvidia-smi lists it"
        return Finding(check, Level.FAIL, f"{found}; {size(nbytes)} configured", advice)
    return Finding(check, Level.OK, found)


def check_remote(stats: RemoteStats | None) -> Finding:
    """Judges by the daemon's statistics: only the daemon has the credentials. ``stats``: None without a daemon."""
    if stats is None or not stats.url:
        advice = "start the daemon with this configuration, and run kvtier doctor again"
        return Finding("remote store", Level.WARN, "no daemon runs that uses it", advice)
    if stats.problem:
        advice = "see to the store, its address and the credentials in the daemon's environment; kvtier heals by itself"
        return Finding("remote store", Level.FAIL, stats.problem, advice)
    if any(each.calls > each.failures for each in stats.operations):
        return Finding("remote store", Level.OK, f"{stats.url} answers")
    advice = "look for a block that is not here, and run kvtier doctor again"
    return Finding("remote store", Level.WARN, f"{stats.url} has not answered a call yet", advice)


def is_there(file: Path) -> bool:
    """Returns whether a file exists. An inaccessible file counts: kvtierd then reports that it cannot be read."""
    try:
        return file.is_file()
    except PermissionError:
        return True


def _nearest(directory: Path) -> Path:
    """Returns the directory, or its nearest ancestor that exists."""
    return next(each for each in (directory.absolute(), *directory.absolute().parents) if os.path.isdir(each))


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@command(context_settings={"ignore_unknown_options": True})
@address_option
@output_option()
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[KVTIERD OPTIONS]")
def doctor(daemon: DaemonAt, flags: tuple[str, ...], form: str) -> None:
    """Check this machine against the daemon's configuration.

    Gives advice if the machine does not meet the configuration, by default that of the daemon at the address. Options
    of kvtierd change single keys of it, for example --device cuda=80%. With --config FILE or --runtime-dir, or if no
    daemon answers there, the file is FILE, or /etc/kvtier/kvtierd.toml if it exists. Run it as root or as the daemon's
    user.

    Exit status 1 if any check fails.
    """
    findings = examine(daemon, flags)
    show(form, [dataclasses.asdict(finding) for finding in findings], _report(findings))
    if any(finding.level is Level.FAIL for finding in findings):
        raise SystemExit(1)


def _report(findings: list[Finding]) -> Table:
    rows = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        level = Text(str(finding.level), style=_COLOURS[finding.level])
        rows.add_row(level, Text(finding.check, no_wrap=True), Text(f"{finding.found}{advice}"))
    return rows
