"""``kvtier doctor``: what stands between this machine and a daemon that runs well."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from kvtier.abi import attach
from kvtier.cli.common import console, json_option, run
from kvtier.doctor import gpu, service
from kvtier.doctor.examine import examine
from kvtier.doctor.finding import Finding, Level, worst
from kvtier.doctor.settings import Settings, read_settings, read_started, unseen
from kvtier.transport import is_tcp

_USUAL_FILE: Final = Path("/etc/kvtier/kvtierd.toml")
"""Of the systemd unit."""

_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="KVTIERD_CONFIG",
    help="The daemon's file.  [default: /etc/kvtier/kvtierd.toml where there is one]",
)
@click.option("--address", metavar="DIR", envvar=attach.ADDRESS_VARIABLE, help="Instead of its runtime directory.")
@click.option("--disk-dir", metavar="DIR", help="Instead of its directory of the disk tier.")
@click.option("--device", metavar="DEVICE", help="Instead of what its device tier is on: cuda, cuda:1, GPU-<uuid>.")
@click.option("--device-bytes", metavar="SIZE", help="Instead of its size of the device tier, such as 8GiB.")
@click.option("--host-bytes", metavar="SIZE", help="Instead of its size of the host tier.")
@click.option("--disk-bytes", metavar="SIZE", help="Instead of its size of the disk tier.")
@json_option("One JSON object with the level of the worst finding and all findings.")
def doctor(
    config: Path | None,
    address: str | None,
    disk_dir: str | None,
    device: str | None,
    device_bytes: str | None,
    host_bytes: str | None,
    disk_bytes: str | None,
    as_json: bool,
) -> None:
    """Check whether this machine gives the daemon what its configuration needs, and say what to do where it does not.

    The configuration is that of the daemon that runs, as it was started; of one that does not, or with --config, what
    the file and the environment make of it. The other options replace single keys. Run it as root or as the daemon's
    user; what others may not see is a warning.

    Exit status 1 where any check fails.
    """
    if address is not None and is_tcp(address):
        raise click.UsageError(
            f"--address {address}: must be a runtime directory; run kvtier doctor where the daemon is"
        )
    given = {
        "--runtime-dir": address,
        "--disk-dir": disk_dir,
        "--device": device,
        "--device-bytes": device_bytes,
        "--host-bytes": host_bytes,
        "--disk-bytes": disk_bytes,
    }
    flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    state = Path("/var/lib/kvtier")
    otherwise = Settings(
        runtime_dir=Path(address or attach.DEFAULT_ADDRESS),
        state_dir=state,
        disk_dir=Path(disk_dir) if disk_dir else state / "disk",
        device=device or gpu.STAND_IN,
    )
    settings, accepted, daemon = _look(config, flags, otherwise)
    findings = [accepted, *examine(settings, daemon)]
    if as_json:
        click.echo(json.dumps(as_object(findings), indent=2))
    else:
        console().print(report(findings))
    if worst(findings) is Level.FAIL:
        raise SystemExit(1)


def _look(config: Path | None, flags: list[str], otherwise: Settings) -> tuple[Settings, Finding, service.Daemon]:
    file = config if config is not None else _USUAL_FILE if os.path.isfile(_USUAL_FILE) else None
    named = ["--config", str(file)] if file is not None else []
    settings, accepted = read_settings([*named, *flags], otherwise)
    daemon = run(service.ask(str(settings.runtime_dir)))
    started = read_started(daemon.pid) if config is None and daemon.pid else None
    if started is not None:
        return (*read_settings(flags, otherwise, started), daemon)
    hidden = bool(daemon.pid) if file is None else not os.access(file, os.R_OK)
    if config is None and hidden and accepted.level is Level.FAIL:
        accepted = unseen(accepted, daemon.pid)
    return settings, accepted, daemon


def as_object(findings: list[Finding]) -> dict[str, Any]:
    return {"level": str(worst(findings)), "findings": [dataclasses.asdict(finding) for finding in findings]}


def report(findings: list[Finding]) -> Table:
    rows = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        level = Text(str(finding.level), style=_COLOURS[finding.level])
        rows.add_row(level, Text(finding.check, no_wrap=True), Text(f"{finding.found}{advice}"))
    return rows
