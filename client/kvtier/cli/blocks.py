"""``kvtier blocks``, ``move``, ``drop``, ``pin`` and ``unpin``, and block keys on the command line."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.abi.words import KEY_BYTES
from kvtier.cli.common import DaemonAt, address_option, cache_argument, confirmed
from kvtier.cli.options import CommandGroup, command, dry_run_option, output_option, seconds_of, yes_option
from kvtier.cli.output import KEPT, show
from kvtier.client import AsyncClient
from kvtier.errors import InvalidArgument, NotFound
from kvtier.explanation import SHORTEST_PREFIX
from kvtier.types import DEFAULT_PRIORITY, TIERS, BlockResult, Tier, tiers_of
from kvtier.verbs import Hint, HintResult
from kvtier.wire import ListedBlock, key_prefix

if TYPE_CHECKING:
    from kvtier.cache import Cache

PIECE: Final = 256
"""Keys per call. A call takes all its slots in one step, so a piece must be much smaller than any realistic tier."""


class KeyType(click.ParamType[bytes]):
    """A block key in hex, or its beginning of at least ``shortest`` bytes."""

    name = "key"

    def __init__(self, shortest: int = SHORTEST_PREFIX) -> None:
        self.shortest = shortest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        try:
            return key_prefix("key", value, self.shortest)
        except InvalidArgument:
            digits = f"{2 * self.shortest} to {2 * KEY_BYTES} hexadecimal digits, an even number"
            self.fail(f"{value!r} is not a key: {digits}", param, ctx)


async def whole_key(client: AsyncClient, cache: str, key: bytes) -> bytes:
    """Completes ``key`` to the key of a block of ``cache`` that begins with it. A whole key is returned unchecked.

    Raises: :class:`NotFound`, or :class:`click.ClickException` if several keys begin with ``key``.
    """
    if len(key) == KEY_BYTES:
        return key
    found = (await client.explain(key, cache=cache, past=False)).keys
    if not found:
        raise NotFound(f"no block of {cache} has a key that begins with {key.hex()}", reason="UNKNOWN_KEY")
    if len(found) > 1:
        raise click.ClickException("\n  ".join([f"several keys begin with {key.hex()}:", *(k.hex() for k in found)]))
    return found[0]


@dataclass(slots=True)
class BlocksReport:
    """The results of a verb, block by block. ``besides``: further counts, for example ``dropped``."""

    verb: str
    cache: str
    dry_run: bool = False
    results: list[tuple[bytes, BlockResult]] = field(default_factory=list)
    besides: Counter[str] = field(default_factory=Counter)
    kept_in_store: bool = False

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
            **({"kept_in_store": True} if self.kept_in_store else {}),
            "not_done": [{"key": key.hex(), "result": str(result)} for key, result in self.not_done],
        }

    def in_words(self) -> str:
        counts = Counter(str(result) for _, result in self.results) + self.besides
        numbers = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing to do"
        would = " would" if self.dry_run else ""
        lines = [f"{self.cache}:{would} {self.verb} {len(self.results)} blocks: {numbers}{KEPT * self.kept_in_store}"]
        return "\n".join([*lines, *(f"  {key.hex()}  {result}" for key, result in self.not_done)])

    def tell(self, form: str) -> None:
        """Prints the outcome, and ends the command with status 1 if any block was refused."""
        show(form, self.to_json(), self.in_words())
        if self.not_done:
            raise SystemExit(1)


_TIERS: Final = click.Choice([str(tier) for tier in TIERS], case_sensitive=False)
_TIER: Final = click.argument("tier", type=_TIERS)
GROUP_OPTION: Final = click.option(
    "--group", type=click.IntRange(min=0), default=0, metavar="N", help="Of this window group."
)
_OUTPUT: Final = output_option()


@command()
@address_option
@cache_argument
@_TIER
@click.argument("keys", nargs=-1, type=KeyType(), metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Every block of the cache.")
@GROUP_OPTION
@_OUTPUT
def move(
    daemon: DaemonAt, cache: str, tier: str, keys: Sequence[bytes], everything: bool, group: int, form: str
) -> None:
    """Make blocks ready in a tier (device, host or disk).

    A move up is a prefetch; a move down is a demotion, which frees the copies above. A KEY is 64 hexadecimal digits, or
    the first 8 or more. Exit status 1 if any block could not be moved.
    """
    if bool(keys) == everything:
        raise click.UsageError("name the blocks in one way: KEYs or --all")
    outcome = BlocksReport("move", cache)

    async def moved(client: AsyncClient, at: Cache) -> None:
        chosen = [block.key async for block in at.blocks()] if everything else await _whole(client, cache, keys)
        for piece in _pieces(chosen):
            outcome.add(piece, await at.move(piece, Tier[tier.upper()]))

    daemon.ask(lambda client: _in_group(client, cache, group, moved))
    outcome.tell(form)


@command()
@address_option
@cache_argument
@click.argument("keys", nargs=-1, required=True, type=KeyType(), metavar="KEY...")
@GROUP_OPTION
@_OUTPUT
@dry_run_option
@yes_option
def drop(daemon: DaemonAt, cache: str, keys: Sequence[bytes], group: int, dry_run: bool, yes: bool, form: str) -> None:
    """Forget blocks of a cache and all blocks below them.

    The blocks leave every tier; `kvtier reset` forgets all. A KEY is 64 hexadecimal digits, or the first 8 or more. A
    block stays if it, or a block below it, is leased or pinned. Exit status 1 if any block was not dropped.
    """

    def dropped(outcome: BlocksReport) -> BlocksReport:
        async def verb(client: AsyncClient, at: Cache) -> None:
            for piece in _pieces(await _whole(client, cache, keys)):
                report = await at.drop(piece, dry_run=outcome.dry_run)
                outcome.add(piece, report.results)
                outcome.besides["dropped"] += report.dropped
                outcome.kept_in_store |= report.kept_in_store

        daemon.ask(lambda client: _in_group(client, cache, group, verb))
        return outcome

    outcome = dropped(BlocksReport("drop", cache, dry_run=True))
    if not dry_run:
        confirmed(f"{outcome.in_words()}\nGo on?", yes)
        outcome = dropped(BlocksReport("drop", cache))
    outcome.tell(form)


@command()
@address_option
@cache_argument
@click.argument("keys", nargs=-1, required=True, type=KeyType(), metavar="KEY...")
@click.option("--for", "seconds", required=True, type=seconds_of, metavar="TIME", help="Such as 30s, 10m or 2h.")
@click.option("--tier", type=_TIERS, default="host", show_default=True, help="Where the blocks stay.")
@GROUP_OPTION
def pin(daemon: DaemonAt, cache: str, keys: Sequence[bytes], seconds: float, tier: str, group: int) -> None:
    """Keep blocks in a tier for a time.

    Brings the blocks into the tier, and holds a lease of them, which `kvtier leases` shows. The command runs for that
    time: the lease ends with it, also after Ctrl-C. Exit status 1 if any block is not stored.
    """

    async def kept(client: AsyncClient, at: Cache) -> None:
        wanted = list(await _whole(client, cache, keys))
        async with at.acquire(wanted, Tier[tier.upper()]) as lease:
            if lease.blocks < len(wanted):
                raise NotFound(f"block {wanted[lease.blocks].hex()} of {cache} is not stored", reason="UNKNOWN_KEY")
            click.echo(f"{cache}: {len(wanted)} blocks stay in {tier} for {seconds:g} s, while this command runs")
            await asyncio.sleep(seconds)

    daemon.ask(lambda client: _in_group(client, cache, group, kept))


@command()
@address_option
@cache_argument
@_TIER
@GROUP_OPTION
@_OUTPUT
def unpin(daemon: DaemonAt, cache: str, tier: str, group: int, form: str) -> None:
    """Undo every pin in a tier of a cache, of any client. Exit status 1 if any could not be undone."""
    place, outcome = Tier[tier.upper()], BlocksReport("unpin", cache)

    async def unpinned(_: AsyncClient, at: Cache) -> None:
        """Repeats until no block is pinned: a listing says that a block is pinned, not how often."""
        while pinned := [block.key async for block in at.blocks() if block.pinned & place.bit]:
            for piece in _pieces(pinned):
                outcome.add(piece, await at.unpin(piece, place))

    daemon.ask(lambda client: _in_group(client, cache, group, unpinned))
    outcome.tell(form)


@command()
@address_option
@cache_argument
@click.argument("action")
@click.argument("keys", nargs=-1, type=KeyType(), metavar="[KEY]...")
@click.option("--conversation", default="", metavar="TAG", help="Its blocks, or with KEYs how far it has got.")
@click.option("--tokens", nargs=2, type=int, default=(0, 0), metavar="START END", help="Its range; END 0: all.")
@click.option("--tier", type=_TIERS, help="For pin, prefetch and demote.")
@click.option("--priority", type=int, default=DEFAULT_PRIORITY, help="For retain.")
@click.option("--for", "seconds", type=seconds_of, metavar="TIME", help="Such as 30s or 10m; at most an hour.")
@_OUTPUT
def hint(
    daemon: DaemonAt,
    cache: str,
    action: str,
    keys: Sequence[bytes],
    conversation: str,
    tokens: tuple[int, int],
    tier: str | None,
    priority: int,
    seconds: float | None,
    form: str,
) -> None:
    """Tell the daemon the future of blocks.

    An ACTION is reached, retain, pin, prefetch, demote, end or return. Exit status 1 if the hint is rejected, or none
    of its blocks is stored.
    """
    results: list[HintResult] = []

    async def told(client: AsyncClient, at: Cache) -> None:
        whole = b"".join(await _whole(client, cache, keys))
        results.extend(
            await at.hint(Hint(action, conversation, whole, (tokens[0], tokens[1] or None), tier, priority, seconds))
        )

    daemon.ask(lambda client: _in_group(client, cache, 0, told))
    (result,) = results
    name = result.outcome.name.lower()
    says = f"{cache}: {action}: {name}, {result.blocks} blocks" + f": {result.reason}" * bool(result.reason)
    show(form, {**asdict(result), "outcome": name}, says)
    if name in ("rejected", "missing"):
        raise SystemExit(1)


@click.group(cls=CommandGroup)
def blocks() -> None:
    """List the blocks of a cache."""


@blocks.command("ls")
@address_option
@cache_argument
@GROUP_OPTION
@output_option()
def list_blocks(daemon: DaemonAt, cache: str, group: int, form: str) -> None:
    """List the blocks of CACHE: their keys, tiers and pins."""
    found: list[ListedBlock] = []

    async def listed(_: AsyncClient, at: Cache) -> None:
        found.extend([block async for block in at.blocks()])

    daemon.ask(lambda client: _in_group(client, cache, group, listed))
    show(form, [_as_object(block) for block in found], "\n".join(map(_line, found)) or "no blocks")


def _as_object(block: ListedBlock) -> dict[str, Any]:
    return {
        "key": block.key.hex(),
        "parent": None if block.parent is None else block.parent.hex(),
        "tiers": _names(block.residency),
        "pinned": _names(block.pinned),
        "priority": block.priority,
    }


def _line(block: ListedBlock) -> str:
    pinned = f"  pinned in {' '.join(_names(block.pinned))}" if block.pinned else ""
    return f"{block.key.hex()}  {' '.join(_names(block.residency))}{pinned}"


def _names(tiers: int) -> list[str]:
    return [str(tier) for tier in tiers_of(tiers)]


async def _whole(client: AsyncClient, cache: str, keys: Iterable[bytes]) -> Iterable[bytes]:
    """Completes the keys, and returns each key once, in order."""
    return dict.fromkeys([await whole_key(client, cache, key) for key in keys])


async def _in_group(
    client: AsyncClient, cache: str, group: int, verb: Callable[[AsyncClient, Cache], Awaitable[None]]
) -> None:
    await verb(client, (await client.open_cache(cache, write=False)).in_group(group))


def _pieces(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(keys)
    while piece := list(islice(left, PIECE)):
        yield piece
