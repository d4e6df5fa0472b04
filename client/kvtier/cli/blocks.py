"""Blocks by hand: ``kvtier move``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import click

from kvtier import aio
from kvtier.cli.common import (
    CONNECT_WAIT_S,
    address_option,
    console,
    existing_cache,
    json_option,
    run,
    tier_choice,
)
from kvtier.cli.keys import Selection, keys_arguments, selection
from kvtier.types import BlockResult, Tier


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


@click.command()
@address_option
@click.argument("cache")
@click.argument("to", type=tier_choice())
@keys_arguments
@click.option("--all", "everything", is_flag=True, help="Every block of the cache.")
@json_option("One JSON object.")
def move(
    address: str,
    cache: str,
    to: str,
    keys: Sequence[bytes],
    source: TextIO | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Make blocks of CACHE ready in the tier TO (device, host or disk), without holding them.

    Up is a prefetch; down is a demotion, which frees the copies above. Exit status 1 where any block could not be
    moved.
    """
    tell(run(_move(address, cache, Tier[to.upper()], selection(keys, source, everything))), as_json)


async def _move(address: str, name: str, to: Tier, wanted: Selection) -> Outcome:
    outcome = Outcome("move", name)
    async with await aio.connect(address, wait=CONNECT_WAIT_S) as client:
        cache = await existing_cache(client, name)
        async for piece in wanted.pieces(cache):
            outcome.add(piece, await cache.move(piece, to))
    return outcome
