"""Blocks by hand: ``kvtier move``, ``drop``, ``pin`` and ``unpin``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar

import click

from kvtier.cache import Cache
from kvtier.cli.common import (
    DaemonAt,
    address_option,
    confirmed,
    console,
    dry_run_option,
    json_option,
    run,
    tier_choice,
    yes_option,
)
from kvtier.cli.keys import Selection, keys_arguments, selection
from kvtier.types import BlockResult, Tier

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(slots=True)
class Outcome:
    """What became of blocks that were asked for. ``besides``: what else the verb says, such as subtrees dropped."""

    verb: str
    cache: str
    dry_run: bool = False
    results: list[tuple[bytes, BlockResult]] = field(default_factory=list)
    besides: dict[str, int] = field(default_factory=dict)

    def add(self, keys: Iterable[bytes], results: Iterable[BlockResult]) -> None:
        self.results += zip(keys, results, strict=True)

    @property
    def not_done(self) -> list[tuple[bytes, BlockResult]]:
        return [(key, result) for key, result in self.results if result is not BlockResult.OK]

    def to_json(self) -> dict[str, Any]:
        return {
            "verb": self.verb,
            "cache": self.cache,
            "dry_run": self.dry_run,
            "blocks": len(self.results),
            "done": len(self.results) - len(self.not_done),
            **self.besides,
            "not_done": [{"key": key.hex(), "result": str(result)} for key, result in self.not_done],
        }

    def in_words(self) -> str:
        counts = Counter(str(result) for _, result in self.results)
        extra = [f"{count} {name}" for name, count in self.besides.items()]
        numbers = ", ".join([*(f"{count} {name}" for name, count in counts.items()), *extra]) or "nothing to do"
        would = " would" if self.dry_run else ""
        lines = [f"{self.cache}:{would} {self.verb} {len(self.results)} blocks: {numbers}"]
        return "\n".join([*lines, *(f"  {key.hex()}  {result}" for key, result in self.not_done)])


def tell(outcome: Outcome, as_json: bool) -> None:
    """Prints it; exit status 1 where any block was refused."""
    if as_json:
        click.echo(json.dumps(outcome.to_json()))
    else:
        console().print(outcome.in_words(), soft_wrap=True, markup=False)
    if outcome.not_done:
        raise SystemExit(1)


def _group_option(command: Command) -> Command:
    return click.option(
        "--group", type=click.IntRange(min=0), default=0, metavar="N", help="Of this window group.  [default: 0]"
    )(command)


@click.command()
@address_option
@click.argument("cache")
@click.argument("to", type=tier_choice())
@keys_arguments
@click.option("--all", "everything", is_flag=True, help="Every block of the cache.")
@_group_option
@dry_run_option
@json_option("One JSON object.")
def move(
    daemon: DaemonAt,
    cache: str,
    to: str,
    keys: Sequence[bytes],
    source: TextIO | None,
    everything: bool,
    group: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make blocks of CACHE ready in the tier TO (device, host or disk), without holding them.

    Up is a prefetch; down is a demotion, which frees the copies above. Exit status 1 where any block could not be
    moved.
    """
    wanted, tier = selection(keys, source, everything), Tier[to.upper()]
    outcome = Outcome("move", cache, dry_run)
    tell(run(_each(daemon, group, wanted, outcome, lambda at, piece: at.move(piece, tier, dry_run=dry_run))), as_json)


@click.command()
@address_option
@click.argument("cache")
@keys_arguments
@_group_option
@dry_run_option
@yes_option
@json_option("One JSON object.")
def drop(
    daemon: DaemonAt,
    cache: str,
    keys: Sequence[bytes],
    source: TextIO | None,
    group: int,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget blocks of CACHE and everything below them, in every tier. `kvtier reset` forgets all.

    What is leased or pinned, or has such a block below it, stays. Exit status 1 where any block was not dropped.
    """
    wanted = selection(keys, source)

    async def dropped(outcome: Outcome) -> Outcome:
        async with await daemon.connect() as client:
            there = (await client.open_cache(cache, write=False)).in_group(group)
            async for piece in wanted.pieces(there):
                report = await there.drop(piece, dry_run=outcome.dry_run)
                outcome.add(piece, report.results)
                outcome.besides["dropped"] = outcome.besides.get("dropped", 0) + report.dropped
        return outcome

    outcome = run(dropped(Outcome("drop", cache, dry_run=True)))
    if not dry_run:
        confirmed(f"{outcome.in_words()}\nGo on?", yes)
        outcome = run(dropped(Outcome("drop", cache)))
    tell(outcome, as_json)


@click.command()
@address_option
@click.argument("cache")
@click.argument("tier", type=tier_choice())
@keys_arguments
@_group_option
@json_option("One JSON object.")
def pin(
    daemon: DaemonAt, cache: str, tier: str, keys: Sequence[bytes], source: TextIO | None, group: int, as_json: bool
) -> None:
    """Keep blocks of CACHE in TIER, where they must be ready, until they are unpinned or the daemon ends.

    A block pinned twice must be unpinned twice. Exit status 1 where any block was not pinned.
    """
    wanted, place = selection(keys, source), Tier[tier.upper()]
    tell(run(_each(daemon, group, wanted, Outcome("pin", cache), lambda at, piece: at.pin(piece, place))), as_json)


@click.command()
@address_option
@click.argument("cache")
@click.argument("tier", type=tier_choice())
@keys_arguments
@click.option("--all", "everything", is_flag=True, help="Every block that is pinned there, as often as it is.")
@_group_option
@json_option("One JSON object.")
def unpin(
    daemon: DaemonAt,
    cache: str,
    tier: str,
    keys: Sequence[bytes],
    source: TextIO | None,
    everything: bool,
    group: int,
    as_json: bool,
) -> None:
    """Undo a pin of blocks of CACHE in TIER, whoever made it. Exit status 1 where any block has none."""
    wanted, place = selection(keys, source, everything), Tier[tier.upper()]
    outcome = Outcome("unpin", cache)
    if everything:
        tell(run(_unpin_all(daemon, group, place, outcome)), as_json)
    else:
        tell(run(_each(daemon, group, wanted, outcome, lambda at, piece: at.unpin(piece, place))), as_json)


async def _each(
    daemon: DaemonAt,
    group: int,
    wanted: Selection,
    outcome: Outcome,
    verb: Callable[[Cache, list[bytes]], Awaitable[list[BlockResult]]],
) -> Outcome:
    """The verb, piece by piece."""
    async with await daemon.connect() as client:
        cache = (await client.open_cache(outcome.cache, write=False)).in_group(group)
        async for piece in wanted.pieces(cache):
            outcome.add(piece, await verb(cache, piece))
    return outcome


async def _unpin_all(daemon: DaemonAt, group: int, tier: Tier, outcome: Outcome) -> Outcome:
    """Round after round: a listing says that a block is pinned, not how often."""
    async with await daemon.connect() as client:
        cache = (await client.open_cache(outcome.cache, write=False)).in_group(group)
        while pinned := [block.key async for block in cache.blocks() if block.pinned & tier.bit]:
            async for piece in Selection(tuple(pinned)).pieces(cache):
                outcome.add(piece, await cache.unpin(piece, tier))
    return outcome
