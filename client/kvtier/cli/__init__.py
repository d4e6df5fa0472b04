"""The ``kvtier`` command."""

from __future__ import annotations

import click

from kvtier.cli.replay import replay
from kvtier.cli.status import status
from kvtier.cli.watch import watch


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """Look at a kvtier daemon, follow what it does, and put it under real load."""


for command in (watch, status, replay):
    main.add_command(command)
