"""Makes docs/top.svg: `kvtier top` over a minute of real traffic against a daemon of its own (`make screenshot`).

Two engines replay the trace extract side by side, each in a cache of its own, and two watchers follow, all of them
processes; what the picture shows is what the daemon said of them.
"""

import argparse
import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kvtier import Tier, connect
from kvtier.cli.common import DaemonAt
from kvtier.cli.top.app import TopApp
from kvtier.cli.top.feed import Feed
from kvtier.cli.top.history import WINDOW_S
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.replay.trace import replay_spec

ROOT = Path(__file__).resolve().parent.parent
TRACE = "examples/traces/conversation-extract.jsonl"
KVTIER = (os.path.relpath(sys.executable, ROOT), "-m", "kvtier.cli")
CACHES = {"chat-70b": TierSlots(200, 800, 6_000), "code-8b": TierSlots(100, 300, 2_000)}
BLOCK_BYTES = 64 * 1024


async def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=WINDOW_S + 5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "top.svg")
    chosen = parser.parse_args(arguments)
    async with traffic() as address, Feed(DaemonAt(address), 1.0) as feed:
        app = TopApp(feed, 1.0, await feed.ask())
        async with app.run_test(size=(chosen.columns, chosen.lines)) as pilot:
            await pilot.pause(chosen.seconds)
            chosen.out.write_text(without_fetches(app.export_screenshot(title="kvtier top")))
    print(f"written: {chosen.out}")
    return 0


def without_fetches(picture: str) -> str:
    """Whoever looks at it asks nobody else for a font: theirs will do."""
    return re.sub(r",\s*url\([^)]*\)\s*format\([^)]*\)", "", picture)


@contextlib.asynccontextmanager
async def traffic() -> AsyncGenerator[str, None]:
    """The address of a daemon that is busy as long as the block runs."""
    spec = replay_spec(BLOCK_BYTES)
    budgets = {name: slots.as_bytes(spec) for name, slots in CACHES.items()}
    sizes = {tier: sum(each[tier] for each in budgets.values()) for tier in Tier}
    async with PrivateDaemon(sizes) as daemon, asyncio.TaskGroup() as group:
        async with await connect(daemon.address) as client:
            for name, each in budgets.items():
                await (await client.open_cache(name, spec, budgets=each)).close()
        works = [
            group.create_task(again_and_again(daemon.address, "replay", TRACE, "--cache", name)) for name in CACHES
        ]
        works += [group.create_task(again_and_again(daemon.address, "watch", *how)) for how in ((), ("--json",))]
        yield daemon.address
        for work in works:
            work.cancel()


async def again_and_again(address: str, *command: str) -> None:
    """Runs a command of kvtier whenever it has ended."""
    while True:
        process = await asyncio.create_subprocess_exec(
            *KVTIER, *command, "--address", address, stdout=asyncio.subprocess.DEVNULL, cwd=ROOT
        )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
