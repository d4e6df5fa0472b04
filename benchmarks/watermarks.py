"""What clean slots ahead of need give and cost: one trace, several daemons that differ in their watermarks alone.

``python benchmarks/watermarks.py TRACE [--marks 0,0.2,0.5] [--requests N] [--together] [--json]``

Every request goes to each daemon, one after the other and in another order each time, so that all of them meet the same
machine; a daemon then rests while the others work. With ``--together`` none does. A call waited for room
where the daemon, while it ran, freed a slot of the device by a copy (event ``updated``, cause ``capacity``); what it
fetched from below it waited for as well, whatever the watermarks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Final, TypeVar

from kvtier import AsyncClient, Cache, CacheSpec, Cause, Event, Tier, TooShort, connect
from kvtier.lease import Lease
from kvtier.replay.private import PrivateDaemon, TierSlots
from kvtier.replay.trace import Request, key_of, read

T = TypeVar("T")

BLOCK_BYTES: Final = 65536
_SETTLED_S: Final = 0.5


@dataclass(slots=True, frozen=True)
class Marks:
    clean: float

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--clean-fraction", str(self.clean))

    def __str__(self) -> str:
        return f"{self.clean:g}" if self.clean else "off"


@dataclass(slots=True)
class Book:
    """What one daemon did. ``requests``: seconds of each; ``calls``: begin and end of each acquire and reserve, wall
    clock in nanoseconds."""

    requests: list[float] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    found: int = 0
    asked: int = 0
    freed: list[int] = field(default_factory=list)
    """When a slot of the device was freed by a copy that somebody waited for."""
    copied: Counter[str] = field(default_factory=Counter)
    """Bytes by edge and cause."""

    def note(self, event: Event) -> None:
        if event.moved_from is None or event.moved_to is None:
            return
        self.copied[f"{event.moved_from} → {event.moved_to}, {event.cause}"] += event.moved_bytes
        if event.cause is Cause.CAPACITY and event.moved_from is Tier.DEVICE:
            self.freed.append(event.time_ns)

    @property
    def waited(self) -> float:
        """Share of the calls."""
        times = sorted(self.freed)
        return sum(bisect_left(times, begin) < bisect_right(times, end) for begin, end in self.calls) / len(self.calls)

    def percentile(self, percent: int) -> float:
        return quantiles(self.requests, n=100, method="inclusive")[percent - 1]

    def bytes_down(self) -> int:
        downwards = (f"{Tier.DEVICE} → {Tier.HOST}", f"{Tier.DEVICE} → {Tier.DISK}", f"{Tier.HOST} → {Tier.DISK}")
        return sum(count for what, count in self.copied.items() if what.startswith(downwards))


class Feed:
    """One daemon and its client, which does with each request what an engine would."""

    def __init__(self, marks: Marks, client: AsyncClient, cache: Cache) -> None:
        self.marks = marks
        self.book = Book()
        self._client = client
        self._cache = cache
        self._watcher = asyncio.create_task(self._watch())

    async def serve(self, request: Request) -> None:
        keys = [key_of(block) for block in request.ids]
        begun = time.perf_counter()
        held: list[Lease] = []
        try:
            found = await self._acquire(keys, held)
            if found < len(keys):
                await self._store(keys, found, held)
        finally:
            await self._cache.release(*reversed(held))
        self.book.requests.append(time.perf_counter() - begun)
        self.book.found += found
        self.book.asked += len(keys)

    async def end(self) -> None:
        """Once what was begun is done and told of."""
        await asyncio.sleep(_SETTLED_S)
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)

    async def _acquire(self, keys: list[bytes], held: list[Lease]) -> int:
        if not (await self._cache.match(keys)).blocks:
            return 0
        try:
            lease = await self._timed(self._cache.acquire(keys, Tier.DEVICE, min_blocks=1))
        except TooShort:
            return 0
        held.append(lease)
        return lease.blocks

    async def _store(self, keys: list[bytes], found: int, held: list[Lease]) -> None:
        lease = await self._timed(self._cache.reserve(len(keys) - found, Tier.DEVICE))
        held.append(lease)
        for place in range(len(keys) - found):
            lease.view(place)[0][:] = place % 251
        await lease.commit(keys[found:], parent=keys[found - 1] if found else None)

    async def _timed(self, call: Awaitable[T]) -> T:
        begun = time.time_ns()
        answer = await call
        self.book.calls.append((begun, time.time_ns()))
        return answer

    async def _watch(self) -> None:
        async for item in self._client.watch(causes=[]):
            if isinstance(item, Event):
                self.book.note(item)


async def in_turn(feeds: Sequence[Feed], requests: Sequence[Request]) -> None:
    """Each request to all of them, one after the other, before the next one."""
    for number, request in enumerate(requests):
        first = number % len(feeds)
        for one in (*feeds[first:], *feeds[:first]):
            await one.serve(request)


async def together(feeds: Sequence[Feed], requests: Sequence[Request]) -> None:
    """All at the same time, each as fast as it goes: no daemon has a moment's rest."""

    async def alone(one: Feed) -> None:
        for request in requests:
            await one.serve(request)

    await asyncio.gather(*map(alone, feeds))


async def run(requests: Sequence[Request], slots: TierSlots, marks: Sequence[Marks], *, busy: bool) -> list[Feed]:
    spec = CacheSpec.single(
        "watermarks", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=BLOCK_BYTES // 32
    )
    async with AsyncExitStack() as stack:
        feeds = []
        for each in marks:
            daemon = PrivateDaemon(slots.as_bytes(spec), module=("kvtierd.main", *each.flags))
            await stack.enter_async_context(daemon)
            client = await stack.enter_async_context(await connect(daemon.address))
            feeds.append(Feed(each, client, await client.open_cache("c", spec)))
        await (together if busy else in_turn)(feeds, requests)
        for one in feeds:
            await one.end()
        return feeds


def rows(feeds: Sequence[Feed], params: dict[str, Any]) -> list[dict[str, Any]]:
    """As ``kvtier bench`` writes them; floors are those of the first daemon."""
    facts: dict[str, tuple[str, Callable[[Book], float]]] = {
        "request p50": ("ms", lambda book: book.percentile(50) * 1e3),
        "request p99": ("ms", lambda book: book.percentile(99) * 1e3),
        "calls that waited for room": ("1", lambda book: book.waited),
        "hit ratio": ("1", lambda book: book.found / book.asked),
        "copied downwards": ("MiB", lambda book: book.bytes_down() / 2**20),
    }
    table = []
    for one in feeds:
        for name, (unit, measure) in facts.items():
            value, floor = measure(one.book), measure(feeds[0].book)
            shown = {"clean": one.marks.clean, **params}
            ratio = round(value / floor, 4) if floor else None
            row = {"name": name, "params": shown, "value": round(value, 4), "unit": unit, "floor": round(floor, 4)}
            table.append(row | {"ratio": ratio})
        for what, count in sorted(one.book.copied.items()):
            shown = {"clean": one.marks.clean, "copies": what, **params}
            floor = feeds[0].book.copied[what] / 2**20
            row = {
                "name": "copied",
                "params": shown,
                "value": round(count / 2**20, 2),
                "unit": "MiB",
                "floor": round(floor, 2),
            }
            table.append(row | {"ratio": round(count / 2**20 / floor, 4) if floor else None})
    return table


def show(feeds: Sequence[Feed]) -> None:
    for one in feeds:
        book = one.book
        print(
            f"{one.marks!s:10} p50 {book.percentile(50) * 1e3:6.2f} ms  p99 {book.percentile(99) * 1e3:7.2f} ms  "
            f"waited {book.waited:.3f} of {len(book.calls)}  hits {book.found / book.asked:.4f}  "
            f"down {book.bytes_down() / 2**20:.0f} MiB"
        )
        for what, count in sorted(book.copied.items()):
            print(f"           {what:32} {count / 2**20:8.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Daemons with different watermarks on one trace, fed in turn.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--marks", default="0,0.2,0.5", help="clean_fraction of each daemon")
    parser.add_argument("--requests", type=int, help="only the first so many requests")
    parser.add_argument("--slots", default="200,800,5000", help="of device, host and disk")
    parser.add_argument("--together", action="store_true", help="feed them all at the same time")
    parser.add_argument("--json", action="store_true", help="one list of {name, params, value, unit, floor, ratio}")
    arguments = parser.parse_args()
    slots = TierSlots(*map(int, arguments.slots.split(",")))
    requests = asyncio.run(read(arguments.trace, arguments.requests))
    requests = [request for request in requests if 0 < len(request.ids) <= slots.device]
    marks = [Marks(float(each)) for each in arguments.marks.split(",")]
    feeds = asyncio.run(run(requests, slots, marks, busy=arguments.together))
    if arguments.json:
        params = {"requests": len(requests), "slots": arguments.slots, "together": arguments.together}
        print(json.dumps(rows(feeds, params)))
    else:
        show(feeds)


if __name__ == "__main__":
    main()
