"""Blocks by hand: ``kvtier move``, ``drop``, ``pin`` and ``unpin``."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TextIO, TypeVar

import click

from kvtier.abi.keys import KEY_BYTES
from kvtier.cache import Cache
from kvtier.cli.common import (
    DaemonAt,
    address_option,
    confirmed,
    dry_run_option,
    json_option,
    run,
    show,
    yes_option,
)
from kvtier.types import BlockResult, Tier

Command = TypeVar("Command", bound=Callable[..., Any])

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


@dataclass(slots=True, frozen=True)
class Selection:
    """Keys in the order given, each once; None = all of the cache."""

    keys: tuple[bytes, ...] | None

    @classmethod
    def of(cls, keys: Sequence[bytes], source: TextIO | None, everything: bool = False) -> Selection:
        """What was given, by exactly one of the ways there are. Raises :class:`click.UsageError`."""
        if bool(keys) + (source is not None) + everything != 1:
            raise click.UsageError("name the blocks in one way: KEYs, --from, or --all where the command has it")
        if everything:
            return cls(None)
        found = tuple(dict.fromkeys(keys if source is None else _read(source)))
        if not found:
            raise click.UsageError("there is no key in the file")
        return cls(found)

    async def pieces(self, cache: Cache) -> AsyncIterator[list[bytes]]:
        """Of :data:`PIECE` keys at most. All of a cache are those of a listing made before anything is changed."""
        left = iter([block.key async for block in cache.blocks()] if self.keys is None else self.keys)
        while piece := list(islice(left, PIECE)):
            yield piece


def _read(source: TextIO) -> Iterator[bytes]:
    for number, line in enumerate(source, 1):
        if text := line.strip():
            try:
                yield KeyType().convert(text, None, None)
            except click.BadParameter as error:
                raise click.UsageError(f"{source.name}, line {number}: {error.message}") from error


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


def block_options(command: Command) -> Command:
    """``[KEY]...``, ``--from``, ``--group`` and ``--json``."""
    for option in (
        json_option("One JSON object."),
        click.option("--group", type=click.IntRange(min=0), default=0, metavar="N", help="Of this window group."),
        click.option("--from", "source", type=click.File(), metavar="FILE", help="Keys, one a line; - is stdin."),
        click.argument("keys", nargs=-1, type=KeyType(), metavar="[KEY]..."),
    ):
        command = option(command)
    return command


def tier_argument(name: str) -> Callable[[Command], Command]:
    return click.argument(name, type=click.Choice([str(tier) for tier in Tier], case_sensitive=False))


@click.command()
@address_option
@click.argument("cache")
@tier_argument("to")
@block_options
@click.option("--all", "everything", is_flag=True, help="Every block of the cache.")
@dry_run_option
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
    wanted, tier = Selection.of(keys, source, everything), Tier[to.upper()]
    outcome = Outcome("move", cache, dry_run)
    run(_each(daemon, group, wanted, outcome, lambda at, piece: at.move(piece, tier, dry_run=dry_run)))
    outcome.tell(as_json)


@click.command()
@address_option
@click.argument("cache")
@block_options
@dry_run_option
@yes_option
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
    wanted = Selection.of(keys, source)

    def dropped(outcome: Outcome) -> Outcome:
        async def verb(at: Cache, piece: list[bytes]) -> list[BlockResult]:
            report = await at.drop(piece, dry_run=outcome.dry_run)
            outcome.besides["dropped"] += report.dropped
            return list(report.results)

        run(_each(daemon, group, wanted, outcome, verb))
        return outcome

    outcome = dropped(Outcome("drop", cache, dry_run=True))
    if not dry_run:
        confirmed(f"{outcome.in_words()}\nGo on?", yes)
        outcome = dropped(Outcome("drop", cache))
    outcome.tell(as_json)


@click.command()
@address_option
@click.argument("cache")
@tier_argument("tier")
@block_options
def pin(
    daemon: DaemonAt, cache: str, tier: str, keys: Sequence[bytes], source: TextIO | None, group: int, as_json: bool
) -> None:
    """Keep blocks of CACHE in TIER, where they must be ready, until they are unpinned or the daemon ends.

    A block pinned twice must be unpinned twice. Exit status 1 where any block was not pinned.
    """
    wanted, place, outcome = Selection.of(keys, source), Tier[tier.upper()], Outcome("pin", cache)
    run(_each(daemon, group, wanted, outcome, lambda at, piece: at.pin(piece, place)))
    outcome.tell(as_json)


@click.command()
@address_option
@click.argument("cache")
@tier_argument("tier")
@block_options
@click.option("--all", "everything", is_flag=True, help="Every block that is pinned there, as often as it is.")
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
    wanted, place, outcome = Selection.of(keys, source, everything), Tier[tier.upper()], Outcome("unpin", cache)
    if everything:
        run(_unpin_all(daemon, group, place, outcome))
    else:
        run(_each(daemon, group, wanted, outcome, lambda at, piece: at.unpin(piece, place)))
    outcome.tell(as_json)


async def _each(
    daemon: DaemonAt,
    group: int,
    wanted: Selection,
    outcome: Outcome,
    verb: Callable[[Cache, list[bytes]], Awaitable[list[BlockResult]]],
) -> None:
    """The verb, piece by piece."""
    async with await daemon.connect() as client:
        cache = (await client.open_cache(outcome.cache, write=False)).in_group(group)
        async for piece in wanted.pieces(cache):
            outcome.add(piece, await verb(cache, piece))


async def _unpin_all(daemon: DaemonAt, group: int, tier: Tier, outcome: Outcome) -> None:
    """Round after round: a listing says that a block is pinned, not how often."""
    async with await daemon.connect() as client:
        cache = (await client.open_cache(outcome.cache, write=False)).in_group(group)
        while pinned := [block.key async for block in cache.blocks() if block.pinned & tier.bit]:
            async for piece in Selection(tuple(pinned)).pieces(cache):
                outcome.add(piece, await cache.unpin(piece, tier))
