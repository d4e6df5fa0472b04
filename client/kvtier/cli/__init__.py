"""The ``kvtier`` command.

Exit status of every command: 0 = done; 1 = refused, failed, only partly done, or no daemon answers; 2 = usage error;
130 = Ctrl-C.
`explain` and `watch` have more codes: see their help.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import click

from kvtier.cli.options import CommandGroup, connection_options

_COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "bench": ["bench"],
    "blocks": ["blocks", "drop", "hint", "move", "pin", "unpin"],
    "bridge": ["bridge"],
    "caches": ["cache", "reset"],
    "doctor": ["doctor"],
    "explain": ["explain"],
    "locate": ["locate"],
    "payload": ["get", "put"],
    "remote": ["remote"],
    "replay": ["replay"],
    "service": ["install-service", "ping"],
    "simulate": ["simulate"],
    "status": ["kick", "leases", "status"],
    "top": ["top"],
    "watch": ["watch"],
}
"""The commands of each module."""
_MODULES: Final = {name: module for module, names in _COMMANDS.items() for name in names}


class _Commands(CommandGroup):
    """Imports a command on first use: `kvtier status` does not wait for the imports of `kvtier bench`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would exit with 1
            raise SystemExit(128 + signal.SIGINT) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        # gRPC logs dozens of lines on standard error for a refused connection. Our message says the same.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        command: click.Command = getattr(import_module(f"kvtier.cli.{_MODULES[cmd_name]}"), cmd_name.replace("-", "_"))
        return command


@click.group(
    cls=_Commands,
    commands={name: click.Command(name) for name in _MODULES},  # their names, for click's suggestions
    context_settings={"help_option_names": ["-h", "--help"]},
)
@connection_options
@click.version_option(package_name="kvtier")
def main() -> None:
    """Look at a kvtier daemon, follow its events, step in by hand, and put it under real load.

    Exit status: 0 done; 1 refused, failed, partly done, or no daemon answers; 2 usage error; 130 Ctrl-C. `kvtier
    watch` and `kvtier explain` have more codes: see their help.
    """
