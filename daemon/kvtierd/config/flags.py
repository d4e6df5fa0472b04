"""The command line's part of the configuration: one flag a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_origin

import click

from kvtierd.config.describe import help_text
from kvtierd.config.keys import KEYS


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Adds them to a click command. Values are checked with those of all other sources, not here."""
    for name, field in reversed(KEYS.items()):
        flag = f"--{name.replace('_', '-')}"
        options: dict[str, Any] = {"default": None, "help": help_text(field)}
        if field.annotation is bool:
            flag = f"{flag}/--no-{name.replace('_', '-')}"
        elif get_origin(field.annotation) is tuple:
            options["multiple"] = True
        command = click.option(flag, name, **options)(command)
    return command


def given(flags: Mapping[str, Any]) -> dict[str, object]:
    """Those that stood on the command line, by key."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}
