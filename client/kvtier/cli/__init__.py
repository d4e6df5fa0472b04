"""The ``kvtier`` command."""

from __future__ import annotations

import click

# Under other names than their modules, which would be hidden otherwise.
from kvtier.cli.replay import replay as replay_command
from kvtier.cli.status import status as status_command
from kvtier.cli.watch import watch as watch_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """Look at a kvtier daemon, follow what it does, and put it under real load."""


for command in (watch_command, status_command, replay_command):
    main.add_command(command)
