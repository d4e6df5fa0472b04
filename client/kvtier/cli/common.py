"""Helpers of all commands: the connection to the daemon, running a coroutine, and readable errors."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar, cast

import click

from kvtier import client as aio
from kvtier.cli.options import KEPT, Decorated, connection_options
from kvtier.client import AsyncClient
from kvtier.errors import DaemonUnavailable, KvtierError
from kvtier.transport import TlsFiles, is_tcp

T = TypeVar("T")

CONNECT_WAIT_S = 2.0
"""Seconds to wait for a daemon that is just starting."""
_CANCEL_AGAIN_S = 2.0
_COMPLETION_S = 1.0


@dataclass(slots=True, frozen=True)
class DaemonAt:
    """The daemon's address, and the TLS options of a connection to it."""

    address: str
    tls: TlsFiles | None = None
    insecure: bool = False

    async def connect(self, wait: float = CONNECT_WAIT_S) -> AsyncClient:
        return await aio.connect(self.address, tls=self.tls, insecure=self.insecure, wait=wait)

    def ask(self, question: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Asks one question on a new connection, and returns the answer. Handles errors like :func:`run`."""

        async def asked() -> T:
            async with await self.connect() as client:
                return await question(client)

        return run(asked())


def address_option(command: Decorated) -> Decorated:
    """Adds :func:`connection_options`, and passes the command a :class:`DaemonAt` as ``daemon``."""

    @wraps(command)
    def with_place(**others: Any) -> Any:
        return command(daemon=_place(click.get_current_context()), **others)

    return connection_options(cast(Decorated, with_place))


def cache_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Completes the name of a cache in a shell. Returns nothing if the daemon does not answer at once."""

    async def asked() -> list[str]:
        async with asyncio.timeout(_COMPLETION_S), await _place(context).connect(wait=0) as client:
            return [info.name for info in await client.caches() if info.name.startswith(incomplete)]

    try:
        return asyncio.run(asked())
    except (KvtierError, TimeoutError, click.UsageError):
        return []


cache_argument: Final = click.argument("cache", shell_complete=cache_names)
cache_option: Final = partial(click.option, "--cache", metavar="NAME", shell_complete=cache_names)


def _place(context: click.Context) -> DaemonAt:
    """Reads the daemon's address from the kept options. Raises :class:`click.UsageError`."""
    kept: dict[str, tuple[Any, bool]] = dict(context.meta[KEPT])
    address, _ = kept.pop("address")
    files = {name: value for name, (value, _) in kept.items()}
    if is_tcp(address):
        return DaemonAt(address, _tls(**files), files["insecure"])
    if any(typed for _, typed in kept.values()):
        raise click.UsageError(f"{address} is a runtime directory: the options of TLS are for tcp://host:port")
    return DaemonAt(address)  # TLS options from the environment belong to another daemon


def _tls(*, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, insecure: bool) -> TlsFiles | None:
    """Returns all three files, or None with ``insecure``. Raises :class:`click.UsageError` for anything else."""
    files = {"--tls-ca": tls_ca, "--tls-cert": tls_cert, "--tls-key": tls_key}
    given = [flag for flag, path in files.items() if path is not None]
    if insecure and given:
        raise click.UsageError(f"--insecure is without TLS: take it away, or {', '.join(given)}")
    if insecure:
        return None
    if tls_ca is not None and tls_cert is not None and tls_key is not None:
        return TlsFiles(tls_cert, tls_key, tls_ca)
    missing = ", ".join(flag for flag in files if flag not in given)
    raise click.UsageError(f"TLS takes three files: {missing} missing; or --insecure, if the daemon is on this host")


def confirmed(question: str, yes: bool) -> None:
    """Asks the question if standard input is a terminal. Ends the command if the answer is no."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


def run(work: Coroutine[Any, Any, T], *, no_daemon: int = 1) -> T:
    """Runs a coroutine. A kvtier error becomes a message and exit status 1, or ``no_daemon`` if no daemon answers."""
    try:
        return asyncio.run(work)
    except KvtierError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(no_daemon if isinstance(error, DaemonUnavailable) else 1) from error


class Interrupts:
    """In a ``with`` block, SIGINT and SIGTERM cancel the task that entered it. ``caught``: the signal's number, or 0.

    A signal during :meth:`writing` ends the process at once, since the write may block; so does a second signal. A
    signal that the shell set to be ignored, for example for a background job, stays ignored.
    """

    def __init__(self) -> None:
        self.caught = 0
        self._writing = self._ended = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._before: list[tuple[int, Any]] = []

    @property
    def status(self) -> int:
        """The exit status for the caught signal: 128 + its number, or 0."""
        return 128 + self.caught if self.caught else 0

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before.append((number, signal.signal(number, self._handle)))
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for number, handler in self._before:
            signal.signal(number, handler)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Marks a write that may wait for a reader."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def end_task(self) -> None:
        """Cancels the task like a signal, but with exit status 0. Cancels again until the task ends, because a step
        that is being cancelled itself may swallow a cancellation."""
        if self._task is not None and not self._ended:
            self._task.cancel()
            self._loop.call_later(_CANCEL_AGAIN_S, self.end_task)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.caught = bool(self.caught), self.caught or number
        if again or self._writing:
            raise SystemExit(self.status)
        self._loop.call_soon_threadsafe(self.end_task)
