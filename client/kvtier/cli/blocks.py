"""Blocks by hand: ``kvtier move``, ``drop`` and ``unpin``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import click

from kvtier.abi.keys import KEY_BYTES
from kvtier.cache import Cache
from kvtier.cli.common import (
    DaemonAt,
    address_option,
    confirmed,
    dry_run_option,
    json_option,
    show,
    yes_option,
)
from kvtier.client import AsyncClient
from kvtier.types import TIERS, BlockResult, Tier

PIECE: Final = 256
"""Keys of one call: each of them gets its slots in one step, so a piece must be small beside any tier worth having."""


class KeyType(click.ParamType[bytes]):
    """A block key in hex, or its beginning of at least ``shortest`` bytes."""

    name = "key"

    def __init__(self, shortest: int = KEY_BYTES) -> None:
        self.shortest = shortest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        try:
            key = bytes.fromhex(value)
        except ValueError:
            key = b""
        if not self.shortest <= len(key) <= KEY_BYTES:
            digits = f"{2 * self.shortest} to {2 * KEY_BYTES}" if self.shortest < KEY_BYTES else f"{2 * KEY_BYTES}"
            self.fail(f"{value!r} is not a key: {digits} hexadecimal digits, an even number", param, ctx)
        return key


@dataclass(slots=True)
class Outcome:
    """What became of blocks that were asked for. ``besides``: what else the verb says, such as subtrees dropped."""

    verb: str
    cache: str
    dry_run: bool = False
    results: list[tuple[bytes, BlockResult]] = field(default_factory=list)
    besides: Counter[str] = field(default_factory=Counter)

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
        counts = Counter(str(result) for _, result in self.results) + self.besides
        numbers = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing to do"
        would = " would" if self.dry_run else ""
        lines = [f"{self.cache}:{would} {self.verb} {len(self.results)} blocks: {numbers}"]
        return "\n".join([*lines, *(f"  {key.hex()}  {result}" for key, result in self.not_done)])

    def tell(self, as_json: bool) -> None:
        """Prints it; exit status 1 where any block was refused."""
        show(as_json, self.to_json(), self.in_words())
        if self.not_done:
            raise SystemExit(1)


_TIER: Final = click.argument("tier", type=click.Choice([str(tier) for tier in TIERS], case_sensitive=False))
_GROUP: Final = click.option(
    "--group", type=click.IntRange(min=0), default=0, metavar="N", help="Of this window group."
)
_JSON: Final = json_option("One JSON object.")


@click.command()
@address_option
@click.argument("cache")
@_TIER
@click.argument("keys", nargs=-1, type=KeyType(), metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Every block of the cache.")
@_GROUP
@_JSON
def move(
    daemon: DaemonAt, cache: str, tier: str, keys: Sequence[bytes], everything: bool, group: int, as_json: bool
) -> None:
    """Make blocks of CACHE ready in TIER (device, host or disk), without holding them.

    Up is a prefetch; down is a demotion, which frees the copies above. Exit status 1 where any block could not be
    moved.
    """
    if bool(keys) == everything:
        raise click.UsageError("name the blocks in one way: KEYs or --all")
    outcome = Outcome("move", cache)

    async def moved(at: Cache) -> None:
        chosen = [block.key async for block in at.blocks()] if everything else dict.fromkeys(keys)
        for piece in _pieces(chosen):
            outcome.add(piece, await at.move(piece, Tier[tier.upper()]))

    daemon.ask(lambda client: _in_group(client, cache, group, moved))
    outcome.tell(as_json)


@click.command()
@address_option
@click.argument("cache")
@click.argument("keys", nargs=-1, required=True, type=KeyType(), metavar="KEY...")
@_GROUP
@_JSON
@dry_run_option
@yes_option
def drop(
    daemon: DaemonAt, cache: str, keys: Sequence[bytes], group: int, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Forget blocks of CACHE and everything below them, in every tier. `kvtier reset` forgets all.

    What is leased or pinned, or has such a block below it, stays. Exit status 1 where any block was not dropped.
    """

    def dropped(outcome: Outcome) -> Outcome:
        async def verb(at: Cache) -> None:
            for piece in _pieces(dict.fromkeys(keys)):
                report = await at.drop(piece, dry_run=outcome.dry_run)
                outcome.add(piece, report.results)
                outcome.besides["dropped"] += report.dropped

        daemon.ask(lambda client: _in_group(client, cache, group, verb))
        return outcome

    outcome = dropped(Outcome("drop", cache, dry_run=True))
    if not dry_run:
        confirmed(f"{outcome.in_words()}\nGo on?", yes)
        outcome = dropped(Outcome("drop", cache))
    outcome.tell(as_json)


@click.command()
@address_option
@click.argument("cache")
@_TIER
@_GROUP
@_JSON
def unpin(daemon: DaemonAt, cache: str, tier: str, group: int, as_json: bool) -> None:
    """Undo every pin of blocks of CACHE in TIER, whoever made it. Exit status 1 where any could not be undone."""
    place, outcome = Tier[tier.upper()], Outcome("unpin", cache)

    async def unpinned(at: Cache) -> None:
        """Round after round: a listing says that a block is pinned, not how often."""
        while pinned := [block.key async for block in at.blocks() if block.pinned & place.bit]:
            for piece in _pieces(pinned):
                outcome.add(piece, await at.unpin(piece, place))

    daemon.ask(lambda client: _in_group(client, cache, group, unpinned))
    outcome.tell(as_json)


async def _in_group(client: AsyncClient, cache: str, group: int, verb: Callable[[Cache], Awaitable[None]]) -> None:
    await verb((await client.open_cache(cache, write=False)).in_group(group))


def _pieces(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Of :data:`PIECE` keys at most."""
    left = iter(keys)
    while piece := list(islice(left, PIECE)):
        yield piece
