"""``kvtier explain``: the place, the leases and the past of one block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

import click
from rich.text import Text

from kvtier.cli.blocks import KeyType
from kvtier.cli.common import DaemonAt, address_option, cache_option
from kvtier.cli.options import command, output_option
from kvtier.cli.output import show
from kvtier.cli.watch_lines import text_lines
from kvtier.events import WatchItem
from kvtier.explanation import SHORTEST_PREFIX, BlockExplained, CopyExplained, CopyState, Explanation, why_gone
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
@click.argument("key", type=KeyType(SHORTEST_PREFIX))
@cache_option(help="Only in this cache.  [default: all that you may see]")
@output_option()
def explain(daemon: DaemonAt, key: bytes, cache: str | None, form: str) -> None:
    """Say where a block is, which leases hold it, and its past.

    KEY is in hex; its first 8 digits or more suffice if no other key begins with them. The command does not count as a
    use of the block.

    Exit status: 0 the block is stored, here or in a remote store; 3 it is gone, and the log has the cause; 4 it is
    unknown: never stored, or longer ago than the log goes back; 1 several keys begin with KEY, or as for every command.
    """
    told = daemon.ask(lambda client: client.explain(key, cache=cache))
    show(form, told.to_json(), Text("\n").join(page(told)))
    raise SystemExit(STATUS[told.state])


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
        since = datetime.fromtimestamp(end.time_ns / 1e9).isoformat(" ", "milliseconds")
        yield Text(f"{end.cache}, group {end.group}: gone since {since}. {why_gone(end.cause)}", style="red")
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
