"""``kvtier bridge``: a cache's events in the forms that other projects' routers read."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.common import DaemonAt, Seconds, address_option, run
from kvtier.errors import InvalidArgument
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.bridge.run import Bound, Wire
    from kvtier.bridge.vllm_events import Naming
    from kvtier.events import Gap


@click.group()
def bridge() -> None:
    """Republish a cache's events in the forms that other projects' routers read."""


class Assignment(click.ParamType[tuple[str, str]]):
    """``NAME=VALUE``."""

    name = "assignment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value[0], value[1]
        left, equals, right = str(value).partition("=")
        if not (left and equals and right):
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return left, right


@bridge.command(name="zmq")
@address_option
@click.option("--cache", required=True, metavar="NAME", help="The cache whose events to publish.")
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
@click.option("--topic", default="", metavar="TEXT", help='First frame of each batch; llm-d wants "kv@POD@MODEL".')
@click.option("--tokens", is_flag=True, help="Publish token ids, which routers need; takes the right to see them.")
@click.option(
    "--hash",
    "hashes",
    type=click.Choice(["int", "bytes"]),
    default="int",
    show_default=True,
    help="Blocks as 64-bit numbers or as bytes.",
)
@click.option(
    "--encoding",
    type=click.Choice(["map", "array"]),
    default="map",
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
    "--medium",
    "media",
    multiple=True,
    type=Assignment(),
    metavar="TIER=NAME",
    help="Default: GPU, CPU and DISK. Repeatable.",
)
@click.option(
    "--lora-name", "loras", multiple=True, type=Assignment(), metavar="ID=NAME", help="An adapter's name. Repeatable."
)
@click.option("--data-parallel-rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="N")
@click.option(
    "--buffer-steps",
    type=click.IntRange(min=0, max=1_000_000),
    default=10_000,
    show_default=True,
    metavar="N",
    help="Batches that are kept for readers that missed them, 64 MiB at most.",
)
@click.option(
    "--hwm",
    type=click.IntRange(min=1, max=1_000_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Batches on the way to a slow reader before it misses some.",
)
@click.option(
    "--heartbeat",
    type=Seconds(min=0.01, max=3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="After so long a quiet an empty batch shows readers whether they missed the last one.",
)
def zmq_bridge(
    daemon: DaemonAt,
    cache: str,
    group: int | None,
    endpoint: str,
    replay_endpoint: str | None,
    insecure_any: bool,
    topic: str,
    tokens: bool,
    hashes: str,
    encoding: str,
    replay_topic: bool,
    media: Sequence[tuple[str, str]],
    loras: Sequence[tuple[str, str]],
    data_parallel_rank: int,
    buffer_steps: int,
    hwm: int,
    heartbeat: float,
) -> None:
    """Publish a cache's events as vLLM does, over ZeroMQ, for routers such as Dynamo's, llm-d's and AIBrix's.

    Begins with the blocks that are there now, goes on over restarts of the daemon, and tells after a gap what it made
    different. Says on standard output where it listens, on standard error what was lost.
    """
    try:
        from kvtier.bridge.run import Wire
        from kvtier.bridge.vllm_events import Naming
        from kvtier.bridge.vllm_form import Encoding
    except ModuleNotFoundError as error:
        if error.name not in ("msgspec", "zmq"):
            raise
        raise click.ClickException(f"{error.name} is not installed: pip install 'kvtier[zmq]'") from error
    naming = Naming(
        as_numbers=hashes == "int", tokens=tokens, media=_media(media), lora_names=_loras(loras), group=group
    )
    try:
        wire = Wire(
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            anywhere=insecure_any,
            topic=topic,
            encoding=Encoding(encoding),
            topic_in_answers=replay_topic,
            rank=data_parallel_rank,
            buffer_steps=buffer_steps,
            high_water_mark=hwm,
            heartbeat_s=heartbeat,
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    with suppress(KeyboardInterrupt, asyncio.CancelledError):  # the ordinary ends of a bridge
        run(_publish(daemon, cache, naming, wire))


async def _publish(daemon: DaemonAt, cache: str, naming: Naming, wire: Wire) -> None:
    from kvtier.bridge.run import Bridge

    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with await daemon.connect() as client:
        await Bridge(client, cache, naming, wire, _say_gap).run(_say_bound)


def _say_bound(place: Bound) -> None:
    replay = f" replay={place.replay_endpoint}" if place.replay_endpoint is not None else ""
    click.echo(f"kvtier bridge ready endpoint={place.endpoint}{replay}")


def _say_gap(gap: Gap) -> None:
    click.echo(f"gap {gap.epoch}:{gap.first_id} to {gap.last_id}: {gap.reason}; comparing with a snapshot", err=True)


def _media(given: Sequence[tuple[str, str]]) -> Mapping[Tier, str]:
    from kvtier.bridge.vllm_events import MEDIA

    names = {str(tier): tier for tier in Tier}
    for name, _ in given:
        if name not in names:
            raise click.BadParameter(f"{name!r} is no tier: {', '.join(names)}", param_hint="--medium")
    media = {**MEDIA, **{names[name]: medium for name, medium in given}}
    if len(set(media.values())) < len(media):
        raise click.BadParameter(
            "two tiers cannot be one medium: what leaves one of them is not gone", param_hint="--medium"
        )
    return media


def _loras(given: Sequence[tuple[str, str]]) -> Mapping[int, str]:
    for number, _ in given:
        if not number.isdecimal():
            raise click.BadParameter(f"{number!r} is no LoRA id", param_hint="--lora-name")
    return {int(number): name for number, name in given}
