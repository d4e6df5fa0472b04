"""``kvtier explain``: where one block is, why it stays or goes next, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import click

from kvtier.aio import AsyncClient
from kvtier.causes import change_of, why_gone
from kvtier.cli.common import DaemonAt, address_option, json_option, run
from kvtier.errors import InvalidArgument
from kvtier.explaining import (
    BlockExplained,
    CopyExplained,
    CopyState,
    Departure,
    Explanation,
    LeaseExplained,
    Obstacle,
    Past,
    Precision,
    key_or_prefix,
)
from kvtier.types import EventType, Tier, tiers_of
from kvtier.words import clean, duration, size

GONE: Final = 3
UNKNOWN: Final = 4
STATUS: Final[Mapping[str, int]] = {"stored": 0, "ambiguous": 1, "gone": GONE, "unknown": UNKNOWN}

_OBSTACLES: Final[Mapping[Obstacle, str]] = {
    Obstacle.UNKNOWN: "something keeps it that this client does not know",
    Obstacle.FILLING: "its bytes are still on the way",
    Obstacle.LEASED: "it is leased",
    Obstacle.PINNED: "it is pinned",
    Obstacle.AWAITED: "a call that waits for room has asked for it",
    Obstacle.MOVING: "a copy under way reads it",
    Obstacle.CHILDREN: "it is in no other tier, and blocks under it are stored",
    Obstacle.DISK_CHILDREN: "blocks under it are on disk, and need their prefix there",
    Obstacle.TIER_LOST: "its tier is out of service, and it is about to be given up",
}
_GO_FIRST: Final = frozenset({Obstacle.CHILDREN, Obstacle.DISK_CHILDREN})
_NO_THRESHOLD: Final = 101


class KeyPrefixType(click.ParamType[bytes]):
    """A block key in hex, or its beginning."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        try:
            return key_or_prefix(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)


@click.command()
@address_option
@click.argument("key", type=KeyPrefixType())
@click.option("--cache", metavar="NAME", help="Only in this cache.  [default: all that you may see]")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Show only the last N events of its past.")
@json_option("One JSON object.")
def explain(daemon: DaemonAt, key: bytes, cache: str | None, limit: int | None, as_json: bool) -> None:
    """Say where the block KEY is, why it stays or goes next, and what became of it.

    KEY is in hex; its first 8 digits or more suffice if no other key begins like that. Looking is no use of the block.

    Exit status: 0 it is stored; 3 it is gone, and the log knows why; 4 nothing is known of it: it was never stored, or
    that is longer ago than the log goes back; 1 several keys begin like that, or as for every command.
    """
    told = run(_explain(daemon, key, cache))
    if as_json:
        said = told.to_json()
        if limit is not None and said["past"] is not None:
            said["past"] = said["past"][len(said["past"]) - min(limit, len(said["past"])) :]
        click.echo(json.dumps(said))
    else:
        for line in page(told, limit):
            click.echo(line)
    raise SystemExit(STATUS[told.state])


async def _explain(daemon: DaemonAt, key: bytes, cache: str | None) -> Explanation:
    client: AsyncClient
    async with await daemon.connect() as client:
        return await client.explain(key, cache=cache)


def page(told: Explanation, limit: int | None = None) -> Iterator[str]:
    """The lines for a person."""
    if told.state == "ambiguous":
        yield f"{len(told.candidates)}{' and more' if told.more_candidates else ''} keys begin with {told.asked.hex()}:"
        yield from (f"  {key.hex()}" for key in told.candidates)
        return
    yield click.style(f"block {(told.key or told.asked).hex()}", bold=True)
    for block in told.blocks:
        yield from _now(block, told.time_ns)
    endings = list(told.endings())
    if told.state == "gone" and not endings:
        yield "not stored any more; the event that says why is lost"
    for end in endings:
        yield f"{end.cache}, group {end.group}: {click.style('gone', fg='red')} since {_when(end.time_ns)}"
        yield f"  {why_gone(end.cause)}"
    if told.state == "unknown":
        yield from _unknown(told)
    yield from _history(told, limit)


def _unknown(told: Explanation) -> Iterator[str]:
    if told.past is None:
        yield "not stored now; what the log knows of it is for who may watch"
        return
    since = "the log is empty"
    if told.oldest is not None:
        since = f"the oldest event in it is {told.oldest.cursor}, of {_when(told.oldest.time_ns)}"
    yield f"nothing is known of it: it was never stored, or that is longer ago than the log goes back ({since})"


def _now(block: BlockExplained, now_ns: int) -> Iterator[str]:
    where = " + ".join(map(str, tiers_of(block.residency))) or "on its way"
    yield f"{block.cache}, group {block.group}: {click.style(where, fg='green')}"
    yield f"  priority    {_priority(block)}"
    yield f"  retention   {_retention(block, now_ns)}"
    parent = "a root" if block.parent is None else f"under {block.parent.hex()}"
    yield f"  chain       {parent}; depth {block.depth}, {_count(block.children, 'block')} directly under it"
    for copy in block.copies:
        yield f"  {copy.tier!s:<11} slot {copy.slot}, {copy.state}; {_turn(copy, block)}"
    for move in block.moves:
        yield f"  moving      {move.moved_from} → {move.moved_to}: {move.cause}"
    for lease in block.leases:
        yield f"  held        {_lease(lease)}"
    yield from (f"  pinned      in {copy.tier}, {_count(copy.pins, 'time')}" for copy in block.copies if copy.pins)
    if block.waiting:
        yield f"  waiting     {_count(block.waiting, 'call')} for room"


def _priority(block: BlockExplained) -> str:
    protected = "; used again after it had left, so it goes after the others" if block.hot else ""
    if block.priority == block.own_priority:
        return f"{block.priority}{protected}"
    return f"{block.priority}, its own is {block.own_priority}: a block under it has more{protected}"


def _retention(block: BlockExplained, now_ns: int) -> str:
    if not block.duration_ms:
        return "keeps its priority for ever"
    lasts = duration(block.duration_ms * 10**6)
    if not block.deadline_ns:
        return f"keeps its priority for {lasts} after its release; the clock stands"
    return f"keeps its priority for {lasts}: {duration(max(0, block.deadline_ns - now_ns))} left"


def _turn(copy: CopyExplained, block: BlockExplained) -> str:
    """Why it stays, or when and how it goes."""
    if copy.state is CopyState.LEAVING:
        return "going down now, unless it is used before"
    why = " and ".join(_OBSTACLES[obstacle] for obstacle in copy.obstacles)
    if copy.departure is Departure.NEVER:
        return f"stays: {why}"
    first = f"stays until what needs it has gone ({why}), then " if _GO_FIRST & set(copy.obstacles) else ""
    return f"{first}{_place(copy)}; it is {_departure(copy, block)}; {_count(copy.free_slots, 'slot')} free"


def _place(copy: CopyExplained) -> str:
    """``unheld_slots`` are those that nobody holds."""
    if copy.precision is Precision.EXACT and not copy.ahead:
        return f"the next to go of {copy.unheld_slots}"
    meant = {Precision.AT_LEAST: "at least ", Precision.ABOUT: "about "}.get(copy.precision, "")
    return f"{meant}{copy.ahead} of {copy.unheld_slots} go before it"


def _departure(copy: CopyExplained, block: BlockExplained) -> str:
    if copy.departure is Departure.FREED:
        return "in another tier as well, so it goes without a copy"
    if copy.departure is Departure.DEMOTED:
        return "copied down first"
    if copy.tier is Tier.DISK or copy.threshold == _NO_THRESHOLD:
        return "forgotten then: there is no tier below"
    if block.priority < copy.threshold:
        return f"forgotten then: only from priority {copy.threshold} on do blocks go down"
    return "forgotten then: only blocks that were used a second time go down"


def _lease(lease: LeaseExplained) -> str:
    who = f", pid {lease.pid} {clean(lease.command)}" if lease.pid else ""
    lost = ", whose connection broke" if lease.orphaned else ""
    age = timedelta(seconds=lease.age_ns // 10**9)
    return f"in {lease.tier} by lease {lease.lease_id} of session {lease.session_id}{who}{lost}, for {age}"


def _history(told: Explanation, limit: int | None) -> Iterator[str]:
    past = told.past or ()
    shown = past if limit is None else past[len(past) - min(limit, len(past)) :]
    if not shown:
        return
    yield "past"
    if len(shown) < len(past):
        yield f"  … {len(past) - len(shown)} earlier events"
    elif past[0].type is not EventType.STORED:
        yield "  … what was before is no longer in the log"
    several = len({(each.cache, each.group) for each in past}) > 1
    for each in shown:
        yield _past_line(each, several)
    for gap in told.gaps:
        yield click.style(f"  events {gap.epoch}:{gap.first_id} to {gap.last_id} are lost: {gap.reason}", fg="yellow")


def _past_line(past: Past, several: bool) -> str:
    columns = [f"  {_when(past.time_ns)}", f"{past.cursor!s:>8}", f"{past.type!s:<7}", f"{_path(past):<24}"]
    moved = f"; {size(past.moved_bytes)} in {duration(past.queue_ns + past.copy_ns)}" if past.moved_bytes else ""
    priority = f"; priority {past.priority}" if past.priority is not None else ""
    place = f"; {past.cache}, group {past.group}" if several else ""
    why = change_of(past.cause) if past.residency else ""
    return "  ".join([*columns, f"{past.cause}{f': {why}' if why else ''}{priority}{moved}{place}"])


def _path(past: Past) -> str:
    before = "?" if past.before is None else _places(past.before)
    after = _places(past.residency) if past.residency else "gone"
    return (
        f"→ {after}" if past.type is EventType.STORED else f"{before} → {after}" if before != after else f"in {after}"
    )


def _places(residency: int) -> str:
    return "+".join(map(str, tiers_of(residency))) or "nowhere"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _when(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
