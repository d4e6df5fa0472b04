"""Writes manual pages of kvtier's commands (section 1) and of kvtierd (8): manpages.py DIRECTORY VERSION. Needs
click-man."""

import sys
from pathlib import Path

import click
from click_man.core import generate_man_page

from kvtier.cli import main
from kvtierd.main import main as daemon


def write(
    directory: Path, version: str, section: int, command: click.Command, name: str, parent: click.Context | None = None
) -> None:
    context = click.Context(command, info_name=name, parent=parent)
    # click-man does not expect an option that help leaves out.
    command.params = [
        each for each in command.params if isinstance(each, click.Argument) or each.get_help_record(context)
    ]
    # click-man knows section 1 alone, and cuts a help that is not short by itself.
    command.short_help = command.get_short_help_str(limit=1000)
    text = generate_man_page(context, version)
    title = f'.TH "{context.command_path.upper()}" "1"'
    assert text.startswith(title)
    page = directory / f"man{section}" / f"{context.command_path.replace(' ', '-')}.{section}"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text.replace(title, f'{title[:-3]}"{section}"', 1))
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            if (child := command.get_command(context, each)) is not None:
                write(directory, version, section, child, each, context)


for section, command, name in ((1, main, "kvtier"), (8, daemon, "kvtierd")):
    write(Path(sys.argv[1]), sys.argv[2], section, command, name)
