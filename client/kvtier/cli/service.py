"""``kvtier ping``, and ``install-service``, which installs this environment's kvtierd as a systemd service.

``ping`` is apart from ``status``, which imports rich: a probe must start fast.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Final

import click

from kvtier.cli.common import DaemonAt, address_option
from kvtier.cli.options import command, output_option
from kvtier.cli.output import show
from kvtier.client import AsyncClient
from kvtier.types import duration

_CLONE: Final = Path(__file__).parents[3]
_HIDDEN: Final = (Path("/home"), Path("/root"), Path("/run/user"), Path("/tmp"), Path("/var/tmp"))
"""Directories that the unit's sandbox hides from the daemon."""
_CONFIGURATION: Final = Path("etc/kvtier/kvtierd.toml")
_FILES: Final = {
    "kvtierd.service": Path("etc/systemd/system/kvtierd.service"),
    "kvtierd.service.d/gpu.conf": Path("etc/systemd/system/kvtierd.service.d/gpu.conf"),
    "kvtierd.toml": _CONFIGURATION,
    "sysusers.d/kvtier.conf": Path("etc/sysusers.d/kvtier.conf"),
    "tmpfiles.d/kvtier.conf": Path("etc/tmpfiles.d/kvtier.conf"),
}
"""Maps each file of systemd/ to its target below the root."""


@command()
@address_option
@output_option()
def ping(daemon: DaemonAt, form: str) -> None:
    """Ask the daemon for an answer, and say how long it took. Needs no right. Exit status 1 if no daemon answers."""

    async def asked(client: AsyncClient) -> int:
        start = time.perf_counter_ns()
        await client.caches()
        return time.perf_counter_ns() - start

    took_ns = daemon.ask(asked)
    show(form, {"address": daemon.address, "took_ns": took_ns}, f"{daemon.address} answers in {duration(took_ns)}")


def _state(target: Path, text: str) -> str:
    """Names the action of an installation on a file. An existing configuration belongs to the operator."""
    if not target.exists():
        return "install"
    if target.read_text() == text:
        return "unchanged"
    return "kept" if target.match(str(_CONFIGURATION)) else "replace"


def _shared() -> Path:
    """Returns the systemd directory of the installed package, or of the clone."""
    installed = Path(sysconfig.get_path("data"), "share", "kvtier", "systemd")
    return installed if installed.is_dir() else _CLONE / "systemd"


def _daemon(root: Path) -> Path:
    """Returns the path of kvtierd as seen from inside ``root``. Warns if the unit's sandbox hides it."""
    program, python = Path(sys.executable).with_name("kvtierd"), Path(sys.executable).resolve()
    if not program.exists():
        raise click.ClickException(f"{program}: no such file: pip install '.[daemon]' in a clone of kvtier")
    seen = [Path("/", path.relative_to(root)) if path.is_relative_to(root) else path for path in (program, python)]
    for path in seen:
        if any(path.is_relative_to(place) for place in _HIDDEN):
            click.echo(f"warning: {path}: the unit's sandbox hides it; install kvtier into, say, /opt/kvtier", err=True)
    return seen[0]


def _adapted(text: str, program: Path) -> str:
    """Replaces the paths below /usr in a packaged file with the paths of ``program``."""
    documents = program.parents[1] / "share" / "doc" / "kvtier"
    return text.replace("/usr/bin/kvtierd", str(program)).replace("/usr/share/doc/kvtier", str(documents))


def _commands(root: Path) -> list[list[str]]:
    """Returns the commands that create the user and the directories, and reload a running systemd."""
    commands = [
        ["systemd-sysusers", f"--root={root}", "kvtier.conf"],
        ["systemd-tmpfiles", f"--root={root}", "--create", "kvtier.conf"],
    ]
    booted = root == Path("/") and Path("/run/systemd/system").is_dir()
    return [*commands, ["systemctl", "daemon-reload"]] if booted else commands


@click.command("install-service")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default="/",
    show_default=True,
    help="The root file system to install into.",
)
@click.option("--gpu", is_flag=True, help="Install the drop-in for an NVIDIA GPU too.")
@click.option("--yes", is_flag=True, help="Do it. Otherwise the command only prints what it would do.")
def install_service(root: Path, gpu: bool, yes: bool) -> None:
    """Install kvtierd as a systemd service.

    A dry run unless --yes is given. Writes the unit, the user kvtier, its directories and a sample
    configuration. An existing configuration is kept.
    """
    shared, program = _shared(), _daemon(root)
    names = [name for name in _FILES if gpu or "gpu" not in name]
    texts = {root / _FILES[name]: _adapted((shared / name).read_text(), program) for name in names}
    commands = _commands(root)
    if missing := [step[0] for step in commands if shutil.which(step[0]) is None]:
        raise click.ClickException(f"{', '.join(missing)}: no such command; install systemd")
    for target, text in texts.items():
        state = _state(target, text)
        click.echo(f"{state:<10}{target}")
        if yes and state in ("install", "replace"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    for step in commands:
        click.echo(f"{'run':<10}{' '.join(step)}")
        if yes and subprocess.run(step, check=False).returncode:
            raise click.ClickException(f"{step[0]} failed; what was written stays")
    edit = f"set the tier sizes in {root / _CONFIGURATION}, then: systemctl enable --now kvtierd"
    click.echo(edit if yes else "This was a dry run: nothing has changed. Do it with --yes.")
