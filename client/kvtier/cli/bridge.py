"""``kvtier bridge``: events of caches in the form that vLLM's routers read."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import click

from kvtier.bridge import Encoding, Options
from kvtier.cli.common import DaemonAt, address_option, run
from kvtier.cli.options import command
from kvtier.cli.watch import warn_of_silence
from kvtier.errors import InvalidArgument
from kvtier.events import Gap


@command()
@address_option
@click.option(
    "--cache",
    "caches",
    required=True,
    multiple=True,
    metavar="NAME",
    help="The cache whose events to publish. Repeatable: each further one has the next port and rank, as vLLM's have.",
)
@click.option("--group", type=click.IntRange(min=0), metavar="N", help="Only this window group. Default: all.")
@click.option(
    "--endpoint",
    metavar="PLACE",
    default="tcp://127.0.0.1:5557",
    show_default=True,
    help="Where to publish: tcp://ADDRESS:PORT, * for any free port, or ipc://PATH.",
)
@click.option(
    "--replay-endpoint", metavar="PLACE", help="Where readers ask for batches that they missed. Default: nowhere."
)
@click.option("--insecure-any", is_flag=True, help="Allow addresses that others can reach. Events go out unencrypted.")
@click.option(
    "--topic", default="", metavar="TEXT", help='First frame of each batch, such as llm-d\'s "kv@POD@{cache}".'
)
@click.option("--tokens", is_flag=True, help="Publish token ids, which routers need; takes the right to see them.")
@click.option(
    "--encoding",
    type=click.Choice([str(each) for each in Encoding]),
    default=str(Encoding.MAP),
    show_default=True,
    help="Events as vLLM publishes them since June 2026, or as it did before.",
)
@click.option(
    "--replay-topic/--no-replay-topic",
    default=True,
    show_default=True,
    help="Answers to readers that missed batches have the topic, as vLLM's since 0.26, or not.",
)
@click.option(
    "--lora-name", "loras", multiple=True, type=(int, str), metavar="ID NAME", help="An adapter's name. Repeatable."
)
@click.option("--data-parallel-rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="N")
def bridge(
    daemon: DaemonAt, caches: Sequence[str], encoding: str, loras: Sequence[tuple[int, str]], **others: Any
) -> None:
    """Publish the events of caches over ZeroMQ, as vLLM does.

    For the routers of Dynamo, llm-d and AIBrix. Begins with the present blocks, goes on over restarts of the daemon,
    and publishes the changes after a gap. Readers that missed batches get them from the last 64 MiB, or else the
    present blocks. Prints its endpoints on standard output, and gaps on standard error.
    """
    try:
        options = Options(encoding=Encoding(encoding), lora_names=dict(loras), **others)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    with suppress(KeyboardInterrupt, asyncio.CancelledError):  # the ordinary ends of a bridge
        run(_publish(daemon, {name: options.of_rank(place, name) for place, name in enumerate(caches)}))


async def _publish(daemon: DaemonAt, published: Mapping[str, Options]) -> None:
    try:
        from kvtier.bridge import publisher
    except ModuleNotFoundError as error:
        if error.name not in ("msgspec", "zmq"):
            raise
        raise click.ClickException(f"{error.name} is missing: pip install '.[zmq]' in a clone of kvtier") from error
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with await daemon.connect() as client:
        for cache, options in published.items():
            groups = [] if options.group is None else [options.group]
            await warn_of_silence(client, [cache], groups, tokens=options.tokens)
            if not options.tokens:
                click.echo(f"warning: cache {cache}: no token ids without --tokens: most routers need them", err=True)
        works = (
            publisher.run(client, cache, options, partial(_say_bound, cache), _say_gap)
            for cache, options in published.items()
        )
        await asyncio.gather(*works)


def _say_bound(cache: str, endpoint: str, replay: str | None) -> None:
    where = f"endpoint={endpoint}" + (f" replay={replay}" if replay is not None else "")
    click.echo(f"kvtier bridge ready {where} cache={cache}")


def _say_gap(gap: Gap) -> None:
    click.echo(f"gap {gap.epoch}:{gap.first_id} to {gap.last_id}: {gap.reason}; comparing with a snapshot", err=True)
