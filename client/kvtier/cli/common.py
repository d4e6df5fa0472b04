"""What the commands share: the address, running a coroutine, and errors as a person wants to read them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click
from rich.console import Console

from kvtier.abi import attach
from kvtier.errors import KvtierError, TierFull

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

CONNECT_WAIT_S = 2.0
"""A daemon that is just starting is waited for."""


def address_option(command: Command) -> Command:
    return click.option(
        "--address",
        metavar="DIR",
        envvar=attach.ADDRESS_VARIABLE,
        default=attach.DEFAULT_ADDRESS,
        show_default=True,
        show_envvar=True,
        help="The daemon's runtime directory.",
    )(command)


def json_option(what: str) -> Callable[[Command], Command]:
    return click.option("--json", "as_json", is_flag=True, help=what)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; what kvtier refuses becomes a message and exit status 1."""
    try:
        return asyncio.run(work)
    except KvtierError as error:
        raise click.ClickException(explained(error)) from error


def explained(error: KvtierError) -> str:
    if not isinstance(error, TierFull) or not error.holders:
        return str(error)
    holders = [f"  {h.slots} slots: pid {h.pid} {h.command}" for h in error.holders]
    return "\n".join([str(error), "held by:", *holders])


def console() -> Console:
    """Standard output; wide enough for a table where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def size(nbytes: float) -> str:
    """Bytes as a person reads them: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(ns: float) -> str:
    """Nanoseconds as a person reads them: ``1.2ms``."""
    for unit in ("ns", "µs", "ms"):
        if abs(ns) < 1000:
            return f"{ns:.0f}{unit}" if unit == "ns" else f"{ns:.1f}{unit}"
        ns /= 1000
    return f"{ns:.1f}s"
