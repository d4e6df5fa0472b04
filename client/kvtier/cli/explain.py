"""``kvtier explain``: the place and the past of a block, and the stored part of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, TextIO

import click
from rich.text import Text

from kvtier.abi.keys import Scope, chain_keys
from kvtier.abi.words import ENDED_MS, KEY_BYTES
from kvtier.cli.blocks import KeyType
from kvtier.cli.common import DaemonAt, address_option, cache_option
from kvtier.cli.locate import token_ids
from kvtier.cli.options import command, output_option
from kvtier.cli.output import show
from kvtier.cli.watch_lines import text_lines
from kvtier.client import AsyncClient
from kvtier.events import WatchItem
from kvtier.explanation import (
    SHORTEST_PREFIX,
    BlockExplained,
    CopyExplained,
    CopyState,
    Explanation,
    RequestExplanation,
)
from kvtier.types import LeaseInfo, duration

GONE: Final = 3
UNKNOWN: Final = 4
STATUS: Final[Mapping[str, int]] = {"stored": 0, "remote": 0, "ambiguous": 1, "gone": GONE, "unknown": UNKNOWN}

_STATES: Final[Mapping[CopyState, str]] = {
    CopyState.FILLING: "its bytes are on the way",
    CopyState.READY: "ready",
    CopyState.LEAVING: "going down now, unless it is used before",
}

_REMOTE: Final[Mapping[bool | None, str]] = {
    True: "the remote store has it",
    False: "the remote store does not have it",
    None: "it is unknown whether the remote store has it",
}


@command()
@address_option
@click.argument("wanted", metavar="[KEY|@PROMPT]", required=False)
@cache_option(help="Only in this cache; a request needs it.  [default: all that you may see]")
@click.option("--tokenizer", metavar="FILE", help="Of the PROMPT's text: the model's tokenizer.json.")
@click.option("--tokens", type=click.File(), help="A file with a prompt's token ids.")
@click.option("--keys", type=click.File(), help="A file with a chain's keys in hex.")
@click.option("--salt", type=click.File(), help="A file with the prompt's salt; a newline at its end does not count.")
@output_option()
def explain(
    daemon: DaemonAt,
    wanted: str | None,
    cache: str | None,
    tokenizer: str | None,
    tokens: TextIO | None,
    keys: TextIO | None,
    salt: TextIO | None,
    form: str,
) -> None:
    """Say where a block or a request is stored, and why not.

    A KEY is a block's, in hex, or its first 8 digits or more: the answer is its tiers, its leases and its past. A
    request is a PROMPT, token ids or keys: the answer is how much of it a load would find, in which tiers, and why the
    first missing block is missing. The command does not count as a use of the blocks.

    Exit status: 0 the block, or the whole request, is stored, here or in a remote store; 3 it is gone, and the log has
    the cause; 4 it is unknown: never stored, or longer ago than the log goes back; 1 several keys begin with KEY, or as
    for every command.
    """
    if [wanted, tokens, keys].count(None) != 2 or (tokenizer is not None and wanted is None):
        raise click.UsageError("name a KEY, @PROMPT with --tokenizer, --tokens or --keys")
    if wanted is not None and tokenizer is None:
        key = KeyType(SHORTEST_PREFIX).convert(wanted, None, None)
        told = daemon.ask(lambda client: client.explain(key, cache=cache))
        show(form, told.to_json(), Text("\n").join(page(told)))
        raise SystemExit(STATUS[told.state])
    if cache is None:
        raise click.UsageError("a request has other keys in each cache: say which by --cache")
    if keys is not None:
        chain = b"".join(KeyType(KEY_BYTES).convert(line, None, None) for line in keys.read().split())
        asked = daemon.ask(lambda client: client.explain_request(cache, chain))
    else:
        ids = token_ids(tokens.read()) if tokens is not None else _tokenized(wanted or "", tokenizer or "")
        secret = salt.read().removesuffix("\n") if salt is not None else None
        asked = daemon.ask(lambda client: _explained(client, cache, ids, secret))
    show(form, asked.to_json(), Text("\n").join(_request(asked)))
    if asked.miss is not None:
        raise SystemExit(GONE if any(end.cache == cache for end in asked.miss.endings()) else UNKNOWN)


async def _explained(client: AsyncClient, cache: str, tokens: Sequence[int], salt: str | None) -> RequestExplanation:
    opened = await client.open_cache(cache, write=False)
    prompt, step = opened.prompt(tokens, Scope(salt=salt)), opened.spec.tokens_per_block
    variants = {} if salt is None else {"without the salt": chain_keys(tokens, step)}
    return await client.explain_request(cache, prompt, variants=variants)


def _tokenized(prompt: str, place: str) -> list[int]:
    """Token ids of ``@FILE`` or of a text. ``place``: the file or the name of the tokenizer."""
    try:
        from tokenizers import Tokenizer  # for this command alone

        text = Path(prompt[1:]).read_text() if prompt.startswith("@") else prompt
        return list(Tokenizer.from_file(place).encode(text).ids)
    except ImportError as error:
        raise click.ClickException("--tokenizer needs the package: pip install tokenizers") from error
    except Exception as error:  # tokenizers raises no class of its own
        raise click.ClickException(f"{place}: {error}") from error


def _request(told: RequestExplanation) -> Iterator[Text]:
    known = [run.load_s for run in told.runs if run.load_s is not None]
    seconds = sum(known) if len(known) == len(told.runs) else 0.0
    slow = f", a load takes about {seconds:.3f} s" if seconds else ""
    yield Text(f"{told.cache}: {told.blocks} of {told.asked} blocks are stored{slow}", style="bold")
    for run in told.runs:
        yield Text(f"  {run.tier!s:<11} blocks {run.first_block} to {run.first_block + run.blocks - 1}")
    if told.remote_blocks > told.blocks:
        yield Text(f"  remote      blocks {told.blocks} to {told.remote_blocks - 1}")
    if told.miss is not None:
        low, high = told.parts_at
        at = f"token {low}" if low == high else f"a token from {low} to {high - 1}"
        yield Text(f"block {told.blocks} is missing: {told.why}", style="red")
        yield Text(f"the nearest stored prompt parts at {at}")


def page(told: Explanation) -> Iterator[Text]:
    if told.state == "ambiguous":
        yield Text(f"several keys begin with {told.asked.hex()}:")
        yield from (Text(f"  {key.hex()}") for key in told.keys)
        return
    yield Text(f"block {(told.keys[0] if told.keys else told.asked).hex()}", style="bold")
    remote = {(each.cache, each.group): each.there for each in told.remote}
    for block in told.blocks:
        yield from _now(block, told.time_ns)
        if (place := (block.cache, block.group)) in remote:
            yield Text(f"  remote      {_REMOTE[remote.pop(place)]}")
    for (cache, group), there in remote.items():
        if there:
            yield Text(f"{cache}, group {group}: {_REMOTE[there]}", style="green")
    for end in told.endings():
        yield Text(f"{end.cache}, group {end.group}: {end}", style="red")
    if told.past is None:
        yield Text("its past is for those who may watch")
    elif told.state == "unknown":
        yield Text("nothing is known of it: it was never stored, or that is longer ago than the log goes back")
    items: list[WatchItem] = [*(told.past or ()), *told.gaps]
    for item in items:
        yield from text_lines(item)


def _now(block: BlockExplained, now_ns: int) -> Iterator[Text]:
    yield Text(f"{block.cache}, group {block.group}: stored", style="green")
    own = (
        "" if block.priority == block.own_priority else f", its own is {block.own_priority}: a block under it has more"
    )
    yield Text(f"  priority    {block.priority}{own}; {_retention(block, now_ns)}")
    parent = "a root" if block.parent is None else f"under {block.parent.hex()}"
    yield Text(f"  chain       {parent}; depth {block.depth}, blocks directly under it: {block.children}")
    yield from map(_copy, block.copies)
    yield from map(_lease, block.leases)


def _retention(block: BlockExplained, now_ns: int) -> str:
    if not block.duration_ms:
        return "kept for ever"
    if block.duration_ms == ENDED_MS:
        return "a hint ended it, until a request finds it"
    if not block.deadline_ns:
        return f"kept for {duration(block.duration_ms * 10**6)} after its release"
    return f"kept for {duration(max(0, block.deadline_ns - now_ns))} more"


def _copy(copy: CopyExplained) -> Text:
    pins = f"; pinned {copy.pins} times" if copy.pins else ""
    readers = f"; copies under way that read it: {copy.readers}" if copy.readers else ""
    return Text(f"  {copy.tier!s:<11} slot {copy.slot}, {_STATES[copy.state]}{pins}{readers}")


def _lease(lease: LeaseInfo) -> Text:
    who = f", pid {lease.pid} {lease.command}" if lease.pid else ""
    lost = ", orphaned" if lease.orphaned else ""
    age = timedelta(seconds=lease.age_ns // 10**9)
    text = (
        f"  held        in {lease.tier} by lease {lease.lease_id} of session {lease.session_id}{who}{lost}, for {age}"
    )
    return Text(text, style="yellow" if lease.orphaned else "")
