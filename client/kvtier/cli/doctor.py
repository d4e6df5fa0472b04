"""``kvtier doctor``."""

from __future__ import annotations

import dataclasses
import json
from typing import Final

import click
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import console, json_option
from kvtier.doctor import Finding, Level, examine

_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command(context_settings={"ignore_unknown_options": True})
@json_option("One JSON list with all findings.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[KVTIERD OPTIONS]")
def doctor(flags: tuple[str, ...], as_json: bool) -> None:
    """Check whether this machine gives the daemon what its configuration needs, and say what to do where it does not.

    All other options are those of kvtierd: --config FILE, or single keys, such as --device cuda. Without --config the
    file is /etc/kvtier/kvtierd.toml, where there is one. Run it as root or as the daemon's user.

    Exit status 1 where any check fails.
    """
    findings = examine(flags)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        console().print(_report(findings))
    if any(finding.level is Level.FAIL for finding in findings):
        raise SystemExit(1)


def _report(findings: list[Finding]) -> Table:
    rows = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        level = Text(str(finding.level), style=_COLOURS[finding.level])
        rows.add_row(level, Text(finding.check, no_wrap=True), Text(f"{finding.found}{advice}"))
    return rows
