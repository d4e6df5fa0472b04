"""``kvtier locate``: the daemons that have a block, or blocks of a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Group, RenderableType
from rich.text import Text

from kvtier.abi.keys import MAX_TOKEN_ID, Scope, chain_keys
from kvtier.cli.blocks import KeyType
from kvtier.cli.common import DaemonAt, address_option, cache_option
from kvtier.cli.options import command, output_option
from kvtier.cli.output import nonzero, plain, show, table
from kvtier.cli.status import peer_line
from kvtier.client import AsyncClient
from kvtier.errors import NotFound
from kvtier.explanation import SHORTEST_PREFIX
from kvtier.types import TIERS, Holdings


def _wanted(ctx: click.Context, param: click.Parameter, value: str) -> bytes | list[int]:
    """Parses a block key in hex, or its beginning, or token ids: ``1,2,3``, or ``@FILE`` with token ids."""
    text = value
    if value.startswith("@"):
        try:
            text = Path(value[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise click.BadParameter(f"{value[1:]}: {error}", ctx, param) from error
    elif "," not in value:
        return KeyType(SHORTEST_PREFIX).convert(value, param, ctx)
    return token_ids(text)


def token_ids(text: str) -> list[int]:
    """Parses token ids. Raises :class:`click.BadParameter`."""
    tokens = re.findall(r"[^\s,\[\]]+", text)
    bad = next((each for each in tokens if not each.isdecimal() or int(each) > MAX_TOKEN_ID), None)
    if bad is not None:
        raise click.BadParameter(f"{bad!r} is no token id: integers from 0 to {MAX_TOKEN_ID}, with commas between them")
    return [int(each) for each in tokens]


@command()
@address_option
@click.argument("wanted", callback=_wanted, metavar="KEY|PROMPT")
@cache_option(help="Only in this cache; a PROMPT needs it.  [default: all that you may see]")
@click.option("--salt", type=click.File(), help="A file with the PROMPT's salt; a newline at its end does not count.")
@output_option()
def locate(daemon: DaemonAt, wanted: bytes | list[int], cache: str | None, salt: TextIO | None, form: str) -> None:
    """Say which daemons have a block, or how much of a prompt.

    Asks this daemon, which knows the blocks of its peers; no peer is asked. KEY is in hex; its first 8 digits or more
    suffice if no other key begins with them. PROMPT is token ids: 1,2,3, or @FILE, which keeps them out of command
    lines and logs. The prompt's keys are computed without adapter and images. The command does not count as a use
    of the blocks.

    Exit status: 1 if no daemon has the block, or several keys begin with KEY; else as for every command.
    """
    if isinstance(wanted, list) and cache is None:
        raise click.UsageError("a prompt has other keys in each cache: say which by --cache")
    if isinstance(wanted, bytes) and salt is not None:
        raise click.UsageError("--salt is a PROMPT's: a KEY contains its salt")
    scope = Scope(salt=salt.read().removesuffix("\n") if salt is not None else None)

    async def found(client: AsyncClient) -> Holdings:
        if isinstance(wanted, bytes):
            return await client.holdings(wanted, cache=cache)
        specs = {each.name: each.spec for each in await client.caches() if not each.not_served}
        if cache not in specs:
            raise NotFound(f"no such cache that you may read: {cache}", reason="UNKNOWN_CACHE")
        step = specs[cache].tokens_per_block
        if len(wanted) < step:
            raise NotFound(f"the prompt is shorter than a block of {step} tokens", reason="TOO_SHORT")
        return await client.holdings(chain_keys(wanted, step, scope), cache=cache)

    told = daemon.ask(found)
    ambiguous = isinstance(wanted, bytes) and len(told.keys) > 1
    keys = "\n  ".join(["several keys begin like that:", *(key.hex() for key in told.keys)])
    show(form, _json(told), Group(*([Text(keys)] if ambiguous else _page(told))))
    if ambiguous or not told.found:
        raise SystemExit(1)


def _json(told: Holdings) -> dict[str, Any]:
    found = [
        {**plain(held), "tiers": {str(tier): blocks for tier, blocks in held.tiers.items()}} for held in told.found
    ]
    return {"keys": [key.hex() for key in told.keys], "found": found, "peers": [plain(peer) for peer in told.peers]}


def _page(told: Holdings) -> Iterator[RenderableType]:
    yield Text(f"blocks asked for: {len(told.keys)}{'' if told.found else '; nobody has the first'}")
    rows = (
        (
            *(held.peer or "this one", held.cache, nonzero(held.group), str(held.blocks)),
            *(nonzero(held.tiers.get(tier, 0)) for tier in TIERS),
        )
        for held in told.found
    )
    yield table(("daemon", "cache", "group", "blocks", *map(str, TIERS)), rows, left=("daemon", "cache"))
    yield from (peer_line(peer) for peer in told.peers if peer.state != "exact" or peer.problem)
