"""The tables of docs/away.md: what an engine sees while the daemon is away, observed with real daemons.

``python -m tests.integration.away`` prints them.
"""

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier import Client, KvtierError, Tier, connect
from tests.engine.toy import TOKENS, Engine, engine, wait_until
from tests.integration.blocks import SPEC, block, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, eventually

COMMON: Final = (
    "`connected`",
    "lookups and `get`, in mapped memory",
    "lookups and `get`, on disk alone",
    "other calls, all calls without mapped memory",
    "calls with `wait`",
    "an engine's steps",
    "leases",
    "blocks on disk",
)
COMMON_HEAD: Final = ("while the daemon is away", "answer")
"""Heads the table of the answers that are the same in every way."""
OWN_HEAD: Final = ("daemon", "next start", "blocks in memory alone")
AT_ONCE_S: Final = 5.0
"""For a call whose timeout is 30 seconds, on a machine that is busy with other things."""

TIERS: Final = {Tier.HOST: 8 << 20, Tier.DISK: 16 << 20}
STORED: Final = chain("stored", 8)
MAPPED, ON_DISK = STORED[:4], STORED[4:]
IN_MEMORY: Final = chain("in memory", 4)
NEW: Final = chain("new", 2)
KNOWN: Final = list(range(100, 100 + 10 * TOKENS + 1))
UNKNOWN: Final = [7] * (6 * TOKENS + 1)

Call = Callable[[Any, Any], Any]
"""Of a client and its cache, either the synchronous ones or the asynchronous ones."""
LOOKUPS: Final[tuple[Callable[[list[bytes]], Call], ...]] = (
    lambda keys: lambda client, cache: cache.prefix_length(keys),
    lambda keys: lambda client, cache: cache.match(keys),
    lambda keys: lambda client, cache: cache.get(keys),
)
CALLS: Final[tuple[Call, ...]] = (
    lambda client, cache: cache.acquire(STORED),
    lambda client, cache: cache.reserve(1),
    lambda client, cache: cache.put(NEW, blocks(NEW)),
    lambda client, cache: cache.move(MAPPED, Tier.DISK),
    lambda client, cache: client.open_cache("c"),
    lambda client, cache: client.stats(),
)


@dataclass(slots=True, frozen=True)
class Way:
    """How a daemon runs, goes and comes back. ``row``: of the page's second table."""

    signal: str
    row: str
    of: Callable[[Path, dict[Tier, int]], Any]
    go: Callable[[Any], object]
    come_back: Callable[[Any], object]
    back: str


def kill_alone(daemon: SupervisedDaemon) -> None:
    """Its supervisor does not see it before :func:`let_see`."""
    os.kill(daemon.supervisor, signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGKILL)


def let_see(daemon: SupervisedDaemon) -> None:
    os.kill(daemon.supervisor, signal.SIGCONT)
    daemon.await_ready()


PLAIN, KILLED, ENDED = ROWS = "`kvtierd`", "`kvtierd --supervise`, after KILL", "`kvtierd --supervise`, after TERM"
WAYS: Final = (
    Way("KILL", PLAIN, DaemonProcess, DaemonProcess.kill, DaemonProcess.start, "by hand"),
    Way("TERM", PLAIN, DaemonProcess, DaemonProcess.stop, DaemonProcess.start, "by hand"),
    Way("KILL", KILLED, SupervisedDaemon, kill_alone, let_see, "by itself"),
    Way("TERM", ENDED, SupervisedDaemon, SupervisedDaemon.stop, SupervisedDaemon.start, "by hand"),
)


class Callers:
    """A synchronous client and its cache, and asynchronous ones."""

    def __init__(self, synchronous: tuple[Any, Any], asynchronous: tuple[Any, Any]) -> None:
        self._synchronous = synchronous
        self._asynchronous = asynchronous
        self._clients = synchronous[0], asynchronous[0]

    async def say(self, *calls: Call) -> str:
        """What all answer, and how soon."""
        said = [await told(asyncio.to_thread(call, *self._synchronous)) for call in calls]
        said += [await told(call(*self._asynchronous)) for call in calls]
        return agreed(said)

    @property
    def connected(self) -> str:
        return agreed([str(client.connected).lower() for client in self._clients])

    async def become(self, connected: bool) -> None:
        """Waits without a call."""
        await eventually(lambda: {client.connected for client in self._clients}, lambda seen: seen == {connected})


async def told(call: Awaitable[Any]) -> str:
    began = time.monotonic()
    try:
        answer = worded(await call)
    except KvtierError as error:
        answer = f"`{type(error).__name__}`: {re.sub('( at /|:).*', '', str(error))}"
    took = time.monotonic() - began
    return f"{answer}, at once" if took < AT_ONCE_S else f"{answer}, after {took:.0f} s"


def worded(answer: Any) -> str:
    """Four blocks, be it their number or their bytes, are all that is in mapped memory of a chain."""
    found = getattr(answer, "blocks", answer)
    if isinstance(found, list):
        right = [np.array_equal(one, block(key)) for one, key in zip(found, STORED, strict=False)]
        found = sum(right) if all(right) else "wrong bytes"
    return {4: "found", 0: "a miss"}.get(found, str(found))


def agreed(said: list[str]) -> str:
    """One, where all are the same."""
    return " / ".join(sorted(set(said)))


def steps(toy: Engine) -> str:
    """Of an engine that is asked for a prompt that is stored, and for one that is not."""
    began = time.monotonic()
    known, unknown = toy.run(KNOWN), toy.run(UNKNOWN)
    assert time.monotonic() - began < 2 * AT_ONCE_S
    assert (unknown.loaded, unknown.computed) == (0, 6)
    return "load mapped blocks, compute the rest" if (known.loaded, known.failed) == (10, 0) else str(known)


def fill(toy: Engine, cache: Any) -> None:
    toy.run(KNOWN)
    toy.settle()
    for keys in (STORED, IN_MEMORY):
        cache.put(keys, blocks(keys), tier=Tier.HOST)
    cache.move(STORED, Tier.DISK)
    cache.acquire(MAPPED, Tier.HOST).release()


async def left_of(cache: Any, keys: list[bytes]) -> str:
    async with cache.acquire(keys) as lease:
        return {0: "gone", len(keys): "kept"}.get(len(lease), f"{len(lease)} of {len(keys)}")


async def observed(way: Way, home: Path) -> dict[str, str]:
    """Cells of the tables by their heads."""
    daemon = way.of(home, TIERS)
    await asyncio.to_thread(daemon.start)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, daemon.stop)
        toy = stack.enter_context(engine(daemon.address, host_bytes=1 << 20, disk_bytes=1 << 20))
        client = stack.enter_context(await asyncio.to_thread(Client, daemon.address))
        cache = await asyncio.to_thread(client.open_cache, "c", SPEC, budgets=sizes(host=32, disk=64))
        other = await stack.enter_async_context(await connect(daemon.address))
        callers = Callers((client, cache), (other, await other.open_cache("c")))
        unmapped = await other.open_cache("c", mapped=False)
        patient = await stack.enter_async_context(await connect(daemon.address, wait=PATIENCE_S))
        await asyncio.to_thread(fill, toy, cache)
        lease = await asyncio.to_thread(cache.acquire, MAPPED, Tier.HOST)
        view = lease.view(0)[0]
        before = bytes(view)

        await asyncio.to_thread(way.go, daemon)
        await callers.become(connected=False)
        waiting = asyncio.ensure_future(patient.stats())
        connected = callers.connected
        calls = [await callers.say(*CALLS), *[await told(lookup(STORED)(other, unmapped)) for lookup in LOOKUPS]]
        answers = [
            await callers.say(*(lookup(STORED) for lookup in LOOKUPS)),
            await callers.say(*(lookup(ON_DISK) for lookup in LOOKUPS)),
            agreed(calls),
            "do not wait" if waiting.done() else "answer when the daemon is back",
            await asyncio.to_thread(steps, toy),
        ]
        views = "can be read" if bytes(view) == before else "change"

        await asyncio.to_thread(way.come_back, daemon)
        await callers.become(connected=True)
        await waiting
        then = callers.connected
        lost = (await told(asyncio.to_thread(lease.require_live))).partition(":")[0]
        await asyncio.to_thread(lease.release)
        await asyncio.to_thread(wait_until, lambda: toy.run(UNKNOWN).loaded == 6)
        again = await other.open_cache("c")
        answers += [f"{views}, then {lost}", await left_of(again, STORED), way.back, await left_of(again, IN_MEMORY)]
        return dict(zip((*COMMON, *OWN_HEAD[1:]), (f"{connected}, then {then}", *answers), strict=True))


def line(cells: Sequence[str]) -> str:
    """A row as the page has it."""
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = rows
    return [line(head), f"|{'---|' * len(head)}", *map(line, rest)]


async def main() -> None:
    seen: list[tuple[Way, dict[str, str]]] = []
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="kv-") as home:
            seen.append((way, await observed(way, Path(home))))

    def cell(name: str, *rows: str) -> str:
        return agreed([cells[name] for way, cells in seen if way.row in rows])

    common = [(name, cell(name, *ROWS)) for name in COMMON]
    own = [(row, *(cell(name, row) for name in OWN_HEAD[1:])) for row in ROWS]
    print(*table([COMMON_HEAD, *common]), "", *table([OWN_HEAD, *own]), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
