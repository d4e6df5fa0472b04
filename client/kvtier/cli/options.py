"""Options and value types of several commands, and their place in the help. Imports no gRPC."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from kvtier.abi import attach
from kvtier.types import parsed_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

KEPT: Final = "kvtier.connection"
"""Key in ``context.meta``, shared by a command and its groups. Maps an option to its value and whether it was typed."""

FORMS: Final = ("table", "json", "yaml")

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NANOSECONDS: Final = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}


class ConnectionOption(click.Option):
    """An option of the connection, before or after the verb; the value after the verb wins. The help shows it last."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        others |= {"show_envvar": True, "expose_value": False, "callback": _keep}
        super().__init__(*arguments, **others)

    def get_help_record(self, ctx: click.Context) -> None:
        """Keeps the option out of the list of options: :class:`ClientCommand` shows it at the end."""

    def help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx)


class ClientCommand(click.Command):
    """A command whose help ends with the options of the connection."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, ConnectionOption)]
        if options:
            with formatter.section("Connection"):
                formatter.write_dl([record for option in options if (record := option.help_record(ctx)) is not None])
        super().format_epilog(ctx, formatter)


class CommandGroup(ClientCommand, click.Group):
    """A group whose help, and whose commands, are like :class:`ClientCommand`."""

    command_class = ClientCommand


command: Final = partial(click.command, cls=ClientCommand)


def _keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    name = option.name
    typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    kept: dict[str, tuple[Any, bool]] = context.meta.setdefault(KEPT, {})
    if typed or not kept.get(name, (None, False))[1]:
        kept[name] = value, typed


def connection_options(command: Decorated) -> Decorated:
    """Adds ``--address`` and the options of TLS."""
    option = partial(click.option, cls=ConnectionOption)
    file = partial(option, metavar="FILE", type=click.Path(path_type=Path))
    place: dict[str, Any] = {"envvar": attach.ADDRESS_VARIABLE, "default": attach.DEFAULT_ADDRESS, "show_default": True}
    options = (
        option("--address", metavar="PLACE", help="The daemon's runtime directory, or tcp://host:port.", **place),
        file("--tls-ca", envvar="KVTIER_TLS_CA", help="Over TCP: the authorities that vouch for the daemon, PEM."),
        file("--tls-cert", envvar="KVTIER_TLS_CERT", help="Over TCP: this client's certificate chain, PEM."),
        file("--tls-key", envvar="KVTIER_TLS_KEY", help="Over TCP: its private key, PEM."),
        option("--insecure", is_flag=True, envvar="KVTIER_INSECURE", help="Over TCP, to this host only: no TLS."),
    )
    for decorate in reversed(options):
        command = decorate(command)
    return command


def output_option(*more: str) -> Callable[[Decorated], Decorated]:
    """Adds ``-o``, which the command gets as ``form``: one of :data:`FORMS` or ``more``."""
    kind = click.Choice([*FORMS, *more], case_sensitive=False)
    return click.option(
        "-o", "--output", "form", type=kind, default="table", show_default=True, help="What the answer is printed as."
    )


trace_argument: Final = click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
requests_option: Final = click.option(
    "--requests", type=click.IntRange(min=1), metavar="N", help="Only the first N requests of the trace."
)
dry_run_option: Final = click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
yes_option: Final = click.option(
    "--yes", is_flag=True, help="Do not ask. Nobody is asked where standard input is no terminal."
)


def ago_ns(text: str) -> int | None:
    """Converts ``30s``, ``5m``, ``2h`` or ``1.5d`` to nanoseconds; None for anything else."""
    found = _AGO.fullmatch(text)
    return None if found is None else int(float(found[1]) * _NANOSECONDS[found[2]])


def size_of(text: str) -> int:
    """Converts ``500GiB`` to a number of bytes. A type of options."""
    if (found := parsed_size(text)) is None:
        raise click.BadParameter(f"{text!r} is no size, such as 500GiB or 2TB")
    return found


def seconds_of(text: str) -> float:
    """Converts ``7d`` to seconds. A type of options."""
    if not (nanoseconds := ago_ns(text)):
        raise click.BadParameter(f"{text!r} is no time above 0, such as 90m, 12h or 7d")
    return nanoseconds / 1e9
