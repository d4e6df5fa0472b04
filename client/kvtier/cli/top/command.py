"""``kvtier top``, as it is called."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

import click

from kvtier.cli.common import DaemonAt, Seconds, address_option, run
from kvtier.cli.top.feed import Answer, Feed
from kvtier.cli.top.once import frame_of, text_of

PLAIN_COLUMNS: Final = 100
"""Of a frame where there is no terminal."""


@click.command()
@address_option
@click.option(
    "--interval",
    type=Seconds(0.1, 60.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one look at the daemon to the next.",
)
@click.option("--cache", metavar="NAME", help="Show this cache alone.")
@click.option("--once", is_flag=True, help="Print one frame in plain text, and end. So it does without a terminal.")
def top(daemon: DaemonAt, interval: float, cache: str | None, once: bool) -> None:
    """Watch tiers, moves, hits, caches, leases and watchers, live on the whole screen.

    Press ? for the keys. Goes on over restarts of the daemon. You see the caches that you may administer.
    """
    status = run(_top(daemon, interval, cache, once=once or not _on_a_terminal()))
    sys.exit(status)


async def _top(daemon: DaemonAt, interval: float, cache: str | None, *, once: bool) -> int:
    async with Feed(daemon, interval) as feed:
        first = await feed.ask()
        if cache is not None and cache not in {one.name for one in first.stats.caches}:
            raise click.ClickException(f"cache = {cache}: no such cache is open, or you may not administer it")
        if once:
            click.echo(text_of(await frame_of(feed, interval, first, cache), _columns()))
            return 0
        return await _on_screen(feed, interval, first, cache)


async def _on_screen(feed: Feed, interval: float, first: Answer, cache: str | None) -> int:
    try:
        from kvtier.cli.top.app import TopApp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "textual":
            raise
        message = "kvtier top needs textual: pip install 'kvtier[top]'. One frame without it: kvtier top --once"
        raise click.ClickException(message) from error
    app = TopApp(feed, interval, first, cache)
    await app.run_async(mouse=False)
    return app.return_code or 0


def _on_a_terminal() -> bool:
    """One to be drawn on and to read keys from."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    return shutil.get_terminal_size((PLAIN_COLUMNS, 0)).columns if sys.stdout.isatty() else PLAIN_COLUMNS
