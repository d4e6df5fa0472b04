"""Replays real LLM traffic through three tiers, verifies every byte, and restarts the daemon without losing the cache.

``make demo`` runs this. The demo starts a private daemon with a device tier of 200 blocks, a host tier of 800 and a
disk tier of 6,000, and replays the first 1,000 requests of a trace of real chat traffic (``examples/traces/README.md``;
``$KVTIER_TRACE`` names another trace). Then the demo stops the daemon, starts it on the same directories and asks for
the blocks again. The blocks found stand beside the blocks that other memories of a simulated host find.

The exit status is 1 if a promise does not hold; the output names the promise.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import kvtier
from kvtier.cli.replay import table
from kvtier.cli.watch_lines import text_lines
from kvtier.events import WatchItem
from kvtier.replay.private import PrivateDaemon
from kvtier.replay.runner import ReplayReport, replay, wrong_blocks
from kvtier.replay.trace import Payload, Request, key_of, read, replay_spec
from kvtier.types import Tier, size
from kvtierd.simulate.policy import BELADY, blocks_found

HERE = Path(__file__).resolve().parent
TRACES = (HERE.parent.parent / "shared/traces/conversation_trace.jsonl", HERE / "traces/conversation-extract.jsonl")
REQUESTS = 1_000
SPEC = replay_spec(block_bytes=16 * 1024)
SLOTS = {Tier.DEVICE: 200, Tier.HOST: 800, Tier.DISK: 6_000}
TOKENS_PER_BLOCK = 512
"""Of the trace (examples/traces/README.md)."""
MEASURED = (1_280, 2_761, 51)
"""Tokens of a prompt, milliseconds to its first token computed and loaded (docs/benchmarks.md#engines)."""

ENOUGH_HITS = 2_000
ENOUGH_DISK_HITS = 500
ENOUGH_AFTER_RESTART = 500
EVENTS_SHOWN_OF_A_KIND = 2
LINE_EVERY = 200
"""Requests, where no bar is shown."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass
class Restart:
    """The disk tier's answers after the restart."""

    blocks: int = 0
    requests: int = 0
    wrong: int = 0


def trace_path() -> Path:
    chosen = os.environ.get("KVTIER_TRACE")
    return Path(chosen) if chosen else next(path for path in TRACES if path.exists())


async def main() -> int:
    path = trace_path()
    requests = await read(path, REQUESTS)
    console.rule("kvtier: real LLM traffic through three tiers")
    console.print(
        f"{len(requests)} requests of {path.name} against a device tier of {SLOTS[Tier.DEVICE]} blocks, a host tier of "
        f"{SLOTS[Tier.HOST]} and a disk tier of {SLOTS[Tier.DISK]}, {SPEC.block_bytes(0) // 1024} KiB each.\n"
    )
    console.print("A private daemon starts. Some lines of its `kvtier watch`:\n")
    async with PrivateDaemon({tier: slots * SPEC.record_bytes(0) for tier, slots in SLOTS.items()}) as daemon:
        report = await first_life(daemon, requests)
        console.print("\nThe requests and their hits:\n")
        console.print(table(report))

        status = await daemon.stop()
        console.print(f"\nThe daemon is stopped (exit status {status}) and started again on the same directories.")
        await daemon.start()
        again = await second_life(daemon, requests)
        console.print(
            f"The disk tier answered {again.requests} requests with {again.blocks} blocks, "
            f"{again.wrong} of them with wrong bytes.\n"
        )
    console.print(gain(report, requests))
    return verdict(report, status, again)


async def first_life(daemon: PrivateDaemon, requests: list[Request]) -> ReplayReport:
    """Replays the requests."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=len(requests))

        def show(done: int) -> None:
            bar.update(task, completed=done)
            if not console.is_terminal and done % LINE_EVERY == 0:
                console.print(f"{done:,} of {len(requests):,} requests are replayed")

        async with kvtier.connect(daemon.address) as client, sample_of_events(client):
            return await replay(client, await client.open_cache("demo", SPEC), requests, progress=show)


@asynccontextmanager
async def sample_of_events(client: kvtier.AsyncClient) -> AsyncIterator[None]:
    """Prints the first few lines of each kind of event while the ``with`` block runs."""
    seen: dict[object, int] = {}

    def show(item: WatchItem) -> None:
        if isinstance(item, kvtier.Event):
            kind = (item.type, item.cause, item.moved_from, item.moved_to)
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= EVENTS_SHOWN_OF_A_KIND:
                console.print(*text_lines(item), sep="\n")

    async def follow() -> None:
        async for item in client.watch():
            show(item)

    watching = asyncio.create_task(follow())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def second_life(daemon: PrivateDaemon, requests: list[Request]) -> Restart:
    """Asks the restarted daemon for the latest requests' blocks until enough blocks have come from disk."""
    answer, payload = Restart(), Payload(SPEC.block_bytes(0))
    async with kvtier.connect(daemon.address) as client:
        cache = await client.open_cache("demo", SPEC)
        for request in reversed(requests):
            keys = [key_of(block) for block in request]
            match = await cache.match(keys)
            on_disk = sum(bool(where & kvtier.Tier.DISK.bit) for where in match.residency)
            if not on_disk:
                continue
            async with cache.acquire(keys[: min(match.blocks, SLOTS[Tier.DEVICE])]) as lease:
                answer.wrong += await wrong_blocks(lease, payload)
                answer.blocks += sum(where == kvtier.Tier.DISK.bit for where in lease.found_in)
                answer.requests += 1
            if answer.blocks >= ENOUGH_AFTER_RESTART:
                break
    return answer


def gain(report: ReplayReport, requests: list[Request]) -> str:
    """Compares the blocks found with the blocks that simulated hosts find, and with the work of computing them."""
    chains = [[key_of(block) for block in request[: SLOTS[Tier.DEVICE]]] for request in requests]
    all_slots = sum(SLOTS.values())
    found = sum(report.hits.values())
    alone = blocks_found("lru", {Tier.DEVICE: SLOTS[Tier.DEVICE]}, chains)
    lru, belady = (blocks_found(policy, {Tier.HOST: all_slots}, chains) for policy in ("lru", BELADY))
    tokens, (measured, computed_ms, loaded_ms) = found * TOKENS_PER_BLOCK, MEASURED
    saved_ms = tokens / measured * (computed_ms - loaded_ms)
    return (
        f"kvtier found {found:,} blocks. An engine alone, with the device's {SLOTS[Tier.DEVICE]} blocks, finds "
        f"{alone:,}; {all_slots:,} blocks in one memory find {lru:,} under LRU and {belady:,} at best (Belady's rule, "
        f"which knows the future).\nThe blocks found are {size(found * SPEC.block_bytes(0))} and {tokens:,} tokens. "
        f"vLLM on two CPU cores computes {measured:,} tokens of a small Llama in {computed_ms:,} ms and loads them in "
        f"{loaded_ms} ms (docs/benchmarks.md).\nAt that rate the blocks found save {saved_ms:,.0f} ms, for each "
        f"request {saved_ms / len(requests):,.0f} ms to the first token.\n"
    )


def verdict(report: ReplayReport, status: int, again: Restart) -> int:
    promises: Mapping[str, bool] = {
        f"at least {ENOUGH_HITS} hits": sum(report.hits.values()) >= ENOUGH_HITS,
        f"at least {ENOUGH_DISK_HITS} hits on disk": report.hits[kvtier.Tier.DISK] >= ENOUGH_DISK_HITS,
        "no block with wrong bytes": report.verify_failures + again.wrong == 0,
        "no gap in the events": report.event_gaps == 0,
        "every block where the events say it is": report.residency_mismatches == 0,
        "a clean stop": status == 0,
        f"at least {ENOUGH_AFTER_RESTART} blocks from disk after the restart": again.blocks >= ENOUGH_AFTER_RESTART,
    }
    for promise, held in promises.items():
        console.print(f"  {'kept  ' if held else 'BROKEN'}  {promise}", style="green" if held else "bold red")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
