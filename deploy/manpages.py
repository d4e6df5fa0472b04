"""Writes a manual page for each command of kvtier, and for kvtierd: manpages.py DIRECTORY VERSION. Needs click-man."""

import sys
from pathlib import Path

import click
from click_man.core import generate_man_page

from kvtier.cli import main
from kvtierd.main import main as daemon


def write(
    directory: Path, version: str, command: click.Command, name: str, parent: click.Context | None = None
) -> None:
    context = click.Context(command, info_name=name, parent=parent)
    # click-man does not expect an option that help leaves out.
    command.params = [
        each for each in command.params if isinstance(each, click.Argument) or each.get_help_record(context)
    ]
    page = directory / f"{context.command_path.replace(' ', '-')}.1"
    page.write_text(generate_man_page(context, version))
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            if (child := command.get_command(context, each)) is not None:
                write(directory, version, child, each, context)


directory = Path(sys.argv[1])
directory.mkdir(parents=True)
for command, name in ((main, "kvtier"), (daemon, "kvtierd")):
    write(directory, sys.argv[2], command, name)
