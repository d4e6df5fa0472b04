"""What the commands share: the address, running a coroutine, and errors as a person wants to read them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier.abi import attach
from kvtier.aio import AsyncClient
from kvtier.cache import Cache
from kvtier.errors import KvtierError, NotFound, TierFull
from kvtier.types import Tier

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


def dry_run_option(command: Command) -> Command:
    return click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")(command)


def yes_option(command: Command) -> Command:
    return click.option("--yes", is_flag=True, help="Do not ask. Nobody is asked where standard input is no terminal.")(
        command
    )


def tier_choice() -> click.Choice[str]:
    return click.Choice([str(tier) for tier in Tier], case_sensitive=False)


def confirmed(question: str, yes: bool) -> None:
    """Asks, on a terminal; ends the command where the answer is no."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


async def existing_cache(client: AsyncClient, name: str) -> Cache:
    """The cache of this name, opened to look and to move, not to write. Raises :class:`NotFound`."""
    info = next((info for info in await client.caches() if info.name == name), None)
    if info is None:
        raise NotFound(f"cache {name}: there is no such cache", reason="UNKNOWN_CACHE")
    return await client.open_cache(name, info.spec, write=False)


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


def slim_table(columns: Sequence[str], *, left: Collection[str] = ()) -> Table:
    """For many columns, none of which is cut: numbers to the right, the columns of ``left`` to the left."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table
