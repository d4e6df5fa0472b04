"""``kvtier bench events``: what watchers cost the daemon, and how soon and how fast they have its events.

A writer stores small blocks, which move to another tier and leave (:data:`kvtier.bench.writer.TRAFFIC`). In turn nobody
watches, and as many processes as asked for, each of which decodes every change.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.bench.helper import Helper, helping
from kvtier.bench.place import Place, place, spec_of
from kvtier.bench.result import Result, quantile, spread
from kvtier.bench.writer import TRAFFIC
from kvtier.errors import DaemonError
from kvtier.private import TierSlots
from kvtier.stats import DaemonStats
from kvtier.types import EventType

BLOCK_BYTES: Final = 4096
"""A page, the least that a slot takes: what is measured is the bookkeeping."""
_SETTLED_S: Final = 0.02


@dataclass(slots=True, frozen=True)
class Options:
    """``rounds`` of each kind of traffic, of twice ``seconds`` each. ``chain``: blocks of a put."""

    watchers: int = 8
    rounds: int = 4
    seconds: float = 3.0
    chain: int = 256
    traffic: Sequence[str] = tuple(TRAFFIC)


@dataclass(slots=True, frozen=True)
class Phase:
    """What happened while writers wrote, and until the last watcher had all of it.

    ``changes``: blocks of events; of them ``moved`` were moves. ``cpu_s``: of the daemon. ``puts``: milliseconds of
    each. ``seen``: what each watcher told, :class:`kvtier.bench.watcher.Seen`.
    """

    changes: int
    moved: int
    events: int
    seconds: float
    cpu_s: float
    puts: Sequence[float]
    seen: Sequence[dict[str, Any]]


async def run(options: Options) -> AsyncIterator[Result]:
    """Floors: the same without watchers. Raises :class:`DaemonError` where what watchers saw does not add up."""
    device = 32 * options.chain
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(place(spec_of(BLOCK_BYTES), TierSlots(device, 2 * device, 0)))
        address = here.client.address
        writing = (address, str(BLOCK_BYTES), str(options.chain))
        writer = await stack.enter_async_context(helping("kvtier.bench.writer", *writing))
        watchers = [
            await stack.enter_async_context(helping("kvtier.bench.watcher", address)) for _ in range(options.watchers)
        ]
        for traffic in options.traffic:
            bench = _Bench(here, writer, watchers, traffic, options)
            await bench.warm_up()
            for turn in range(options.rounds):
                for watched in (turn % 2 == 0, turn % 2 == 1):
                    await bench.phase(watched)
            for result in bench.results():
                yield result
            yield await bench.catch_up_from_log()


class _Bench:
    """Of one kind of traffic."""

    def __init__(self, here: Place, writer: Helper, watchers: Sequence[Helper], traffic: str, options: Options) -> None:
        if here.daemon is None:
            raise DaemonError("only a private daemon can be measured so", reason="BENCH")
        self._client = here.client
        self._daemon = here.daemon
        self._stat = Path(f"/proc/{here.daemon.pid}/stat")
        self._writer = writer
        self._watchers = watchers
        self._traffic = traffic
        self._options = options
        self._watched: list[Phase] = []
        self._unwatched: list[Phase] = []
        self._catch_ups: list[dict[str, Any]] = []
        self._last: tuple[list[int], int, dict[str, Any]]
        """Of the last phase: the cursor before it, its last event's id, and what a watcher saw of it."""

    async def warm_up(self) -> None:
        """Until blocks leave: from then on each change comes as often as the others."""
        before = await self._removed()
        while await self._removed() == before:
            await self._write()

    async def _removed(self) -> int:
        return sum(cache.removed for cache in (await self._client.stats()).caches)

    async def phase(self, watched: bool) -> None:
        """What nobody watched, one watcher is told of afterwards: the last of it out of the daemon's memory, what was
        before out of its log."""
        watchers = self._watchers if watched else ()
        before = await self._settled()
        since = [before.epoch, before.last_event_id]
        await asyncio.gather(*(watcher.ask(since=since) for watcher in watchers))
        began, cpu = time.perf_counter(), self._cpu_s()
        written = await self._write()
        until = (await self._settled()).last_event_id
        seen = await asyncio.gather(*(watcher.ask(until=until) for watcher in watchers))
        seconds, cpu = time.perf_counter() - began, self._cpu_s() - cpu
        if not watched:
            seen = [await _told(self._watchers[0], since, until)]
            self._catch_ups += seen
        changes = _agreed(seen, since[1], until, written["blocks"])
        self._last = since, until, seen[0]
        phase = Phase(sum(changes.values()), changes["updated"], until - since[1], seconds, cpu, written["puts"], seen)
        (self._watched if watched else self._unwatched).append(phase)

    async def catch_up_from_log(self) -> Result:
        """What the last phase's watchers were told, told to a new one by a daemon that has been restarted since."""
        since, until, seen = self._last
        await self._daemon.stop()
        await self._daemon.start()
        async with helping("kvtier.bench.watcher", self._daemon.address) as watcher:
            again = await _told(watcher, since, until)
        changes = sum(_agreed([again, seen], since[1], until, seen["changes"][str(EventType.STORED)]).values())
        params = self._params() | {"changes": changes}
        return Result("events.catch_up.log", params, changes / again["seconds"], "changes/s")

    async def _write(self) -> dict[str, Any]:
        return await self._writer.ask(traffic=self._traffic, seconds=self._options.seconds)

    async def _settled(self) -> DaemonStats:
        """Once nothing is under way any more: the answer to a put does not wait for the last moves that it began."""
        before = await self._client.stats()
        while True:
            await asyncio.sleep(_SETTLED_S)
            now = await self._client.stats()
            queued = sum(edge.queued_blocks for cache in now.caches for edge in cache.edges)
            if not queued and now.last_event_id == before.last_event_id:
                return now
            before = now

    def _cpu_s(self) -> float:
        """Seconds of CPU that the daemon has had, in hundredths."""
        user, system = self._stat.read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    # -- what came of it -------------------------------------------------------------------------------------------

    def results(self) -> list[Result]:
        params, count, watched = self._params(), len(self._watchers), self._watched
        latencies = [each / 1e3 for phase in watched for seen in phase.seen for each in seen["latencies"]]

        def alone(name: str, unit: str, figures: Sequence[float]) -> Result:
            return Result(f"events.{name}", params | {"spread": spread(figures)}, statistics.median(figures), unit)

        return [
            self._compared("changes", "changes/s", lambda phase: phase.changes / phase.seconds),
            alone("delivered", "changes/s", [count * phase.changes / phase.seconds for phase in watched]),
            self._compared("daemon_cpu.moved", "us/block", lambda phase: 1e6 * phase.cpu_s / phase.moved),
            self._compared("daemon_cpu.change", "us/change", lambda phase: 1e6 * phase.cpu_s / phase.changes),
            alone(
                *("watcher_cpu.change", "us/change"),
                [1e6 * seen["cpu_s"] / phase.changes for phase in watched for seen in phase.seen],
            ),
            self._compared("put.p50", "ms", lambda phase: quantile(phase.puts, 0.5)),
            self._compared("put.p99", "ms", lambda phase: quantile(phase.puts, 0.99)),
            Result("events.latency.p50", params, quantile(latencies, 0.5), "ms"),
            Result("events.latency.p99", params, quantile(latencies, 0.99), "ms"),
            alone(
                *("catch_up.running", "changes/s"),
                [sum(seen["changes"].values()) / seen["seconds"] for seen in self._catch_ups],
            ),
        ]

    def _compared(self, name: str, unit: str, of: Callable[[Phase], float]) -> Result:
        ours, floor = [of(phase) for phase in self._watched], [of(phase) for phase in self._unwatched]
        params = self._params() | {"spread": spread(ours), "floor_spread": spread(floor)}
        return Result(f"events.{name}", params, statistics.median(ours), unit, statistics.median(floor))

    def _params(self) -> dict[str, Any]:
        """``blocks_per_event``: while somebody watched."""
        changes, events = sum(each.changes for each in self._watched), sum(each.events for each in self._watched)
        return {
            "traffic": self._traffic,
            "watchers": len(self._watchers),
            "rounds": self._options.rounds,
            "seconds": self._options.seconds,
            "block_bytes": BLOCK_BYTES,
            "chain": self._options.chain,
            "blocks_per_event": round(changes / events, 1),
        }


async def _told(watcher: Helper, since: list[int], until: int) -> dict[str, Any]:
    """What happened after the cursor, up to that event."""
    return await watcher.ask(since=since, until=until)


def _agreed(seen: Sequence[dict[str, Any]], since: int, until: int, stored: int) -> dict[str, int]:
    """How many blocks changed, by type of event. Raises :class:`DaemonError` where not all tell the same, an event is
    missing, or not every block that was stored is there."""
    first = seen[0]
    changes: dict[str, int] = first["changes"]
    for each in seen:
        if each["skipped"] or (each["first"], each["last"]) != (since + 1, until):
            told = f"was told of events {each['first']} to {each['last']} and missed {each['skipped']}"
            raise DaemonError(f"a watcher {told}, of {since + 1} to {until}", reason="BENCH")
        if (each["digest"], each["changes"]) != (first["digest"], changes):
            raise DaemonError("watchers were told different things", reason="BENCH")
    if changes.get(str(EventType.STORED)) != stored:
        raise DaemonError(f"{stored} blocks were stored, and events tell of {changes}", reason="BENCH")
    return changes
