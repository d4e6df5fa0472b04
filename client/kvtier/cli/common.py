"""What the commands share: the address, running a coroutine, and errors as a person wants to read them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar, cast

import click
from click.core import ParameterSource
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from kvtier import client as aio
from kvtier.abi import attach
from kvtier.client import AsyncClient
from kvtier.errors import DaemonUnavailable, KvtierError, TierFull
from kvtier.transport import TlsFiles, is_tcp
from kvtier.types import Tier

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NANOSECONDS: Final = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}

CONNECT_WAIT_S = 2.0
"""A daemon that is just starting is waited for."""


@dataclass(slots=True, frozen=True)
class DaemonAt:
    """Where the daemon is, and what it takes to get in."""

    address: str
    tls: TlsFiles | None = None
    insecure: bool = False

    async def connect(self) -> AsyncClient:
        """See :func:`kvtier.client.connect`."""
        return await aio.connect(self.address, tls=self.tls, insecure=self.insecure, wait=CONNECT_WAIT_S)

    def ask(self, question: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """The answer to one question, asked on a connection of its own; errors as of :func:`run`."""

        async def asked() -> T:
            async with await self.connect() as client:
                return await question(client)

        return run(asked())


def address_option(command: Command) -> Command:
    """The options that say where the daemon is. The command gets a :class:`DaemonAt` as ``daemon``."""

    @wraps(command)
    def with_place(
        address: str, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, insecure: bool, **others: Any
    ) -> Any:
        if is_tcp(address):
            daemon = DaemonAt(address, _tls(tls_ca, tls_cert, tls_key, insecure=insecure), insecure)
        elif _said("tls_ca", "tls_cert", "tls_key", "insecure"):
            raise click.UsageError(f"{address} is a runtime directory: the options of TLS are for tcp://host:port")
        else:
            daemon = DaemonAt(address)  # the environment speaks of another daemon
        return command(daemon=daemon, **others)

    options = (
        click.option(
            "--address",
            metavar="PLACE",
            envvar=attach.ADDRESS_VARIABLE,
            default=attach.DEFAULT_ADDRESS,
            show_default=True,
            show_envvar=True,
            help="The daemon's runtime directory, or tcp://host:port.",
        ),
        _file_option("--tls-ca", "Over TCP: the authorities that vouch for the daemon, PEM."),
        _file_option("--tls-cert", "Over TCP: this client's certificate chain, PEM."),
        _file_option("--tls-key", "Over TCP: its private key, PEM."),
        click.option(
            "--insecure",
            is_flag=True,
            envvar="KVTIER_INSECURE",
            show_envvar=True,
            help="Over TCP, to this host only: no TLS.",
        ),
    )
    for option in reversed(options):
        with_place = option(with_place)
    return cast(Command, with_place)


def _said(*options: str) -> bool:
    """Whether any of them is on the command line."""
    context = click.get_current_context()
    return any(context.get_parameter_source(option) is ParameterSource.COMMANDLINE for option in options)


def _file_option(flag: str, says: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    variable = f"KVTIER_{flag.removeprefix('--').replace('-', '_').upper()}"
    kind = click.Path(path_type=Path)
    return click.option(flag, metavar="FILE", type=kind, envvar=variable, show_envvar=True, help=says)


def _tls(ca: Path | None, cert: Path | None, key: Path | None, *, insecure: bool) -> TlsFiles | None:
    """All three files, or None with ``insecure``. Raises :class:`click.UsageError` for anything else."""
    files = {"--tls-ca": ca, "--tls-cert": cert, "--tls-key": key}
    given = [flag for flag, path in files.items() if path is not None]
    if insecure and given:
        raise click.UsageError(f"--insecure is without TLS: take it away, or {', '.join(given)}")
    if insecure:
        return None
    if ca is not None and cert is not None and key is not None:
        return TlsFiles(cert, key, ca)
    missing = ", ".join(flag for flag in files if flag not in given)
    raise click.UsageError(f"TLS takes three files: {missing} missing; or --insecure, if the daemon is on this host")


def json_option(what: str) -> Callable[[Command], Command]:
    return click.option("--json", "as_json", is_flag=True, help=what)


def dry_run_option(command: Command) -> Command:
    return click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")(command)


def yes_option(command: Command) -> Command:
    return click.option("--yes", is_flag=True, help="Do not ask. Nobody is asked where standard input is no terminal.")(
        command
    )


def confirmed(question: str, yes: bool) -> None:
    """Asks, on a terminal; ends the command where the answer is no."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


def run(work: Coroutine[Any, Any, T], *, no_daemon: int = 1) -> T:
    """Runs a command's coroutine. What kvtier refuses becomes a message and exit status 1, or ``no_daemon``."""
    try:
        return asyncio.run(work)
    except KvtierError as error:
        click.echo(f"Error: {explained(error)}", err=True)
        raise SystemExit(no_daemon if isinstance(error, DaemonUnavailable) else 1) from error


class Interrupts:
    """In a ``with`` block, SIGINT and SIGTERM cancel the task that entered it. ``caught``: the signal, 0 = none came.

    A signal in the middle of a write that nobody reads ends the process at once, and so does a second signal. A signal
    that the shell made this process ignore, as of a background job, is ignored.
    """

    def __init__(self) -> None:
        self.caught = 0
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._before: list[tuple[int, Any]] = []

    @property
    def status(self) -> int:
        """The exit status that tells which signal it was."""
        return 128 + self.caught if self.caught else 0

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before.append((number, signal.signal(number, self._handle)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a write that may wait for a reader."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def end_task(self) -> None:
        """As a signal does, with exit status 0."""
        if self._task is not None:
            self._task.cancel()

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.caught = bool(self.caught), self.caught or number
        if again or self._writing:
            raise SystemExit(self.status)
        self._loop.call_soon_threadsafe(self.end_task)


def explained(error: KvtierError) -> str:
    if not isinstance(error, TierFull) or not error.holders:
        return str(error)
    holders = [f"  {h.slots} slots: pid {h.pid} {h.command}" for h in error.holders]
    return "\n".join([str(error), "held by:", *holders])


def show(as_json: bool, value: Any, text: RenderableType) -> None:
    """Prints an answer: ``value`` as JSON, or ``text``."""
    if as_json:
        click.echo(json.dumps(value, indent=2))
    else:
        console().print(text, soft_wrap=isinstance(text, str), markup=False)


def plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them; tiers by name."""
    named = dataclasses.asdict(
        value, dict_factory=lambda pairs: {name: str(each) if isinstance(each, Tier) else each for name, each in pairs}
    )
    return cast(dict[str, Any], named)


def ago_ns(text: str) -> int | None:
    """Nanoseconds of ``30s``, ``5m``, ``2h`` or ``1.5d``; None for anything else."""
    found = _AGO.fullmatch(text)
    return None if found is None else int(float(found[1]) * _NANOSECONDS[found[2]])


def console() -> Console:
    """Standard output; wide enough for a table where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def slim_table(columns: Sequence[str], *, left: Collection[str] = ()) -> Table:
    """For many columns, none of which is cut: numbers to the right, the columns of ``left`` to the left."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table
