"""A daemon that is ended and started again under load, and what must be true after each time."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtier import AsyncClient, Cache, Cursor, TierFull
from kvtier.abi.words import TIERS
from kvtierd.tiers.disk.records import decode_records, parents_of
from tests.integration.blocks import SLOT_BYTES, SPEC, Blocks, assert_bytes, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.load import CHAIN_BLOCKS, Load
from tests.integration.stored import stored_in
from tests.integration.waiting import PATIENCE_S, eventually, patient
from tests.integration.witness import Witness

ROOMY: Final = sizes(device=24, host=32, disk=640)
"""Its disk holds all chains: nothing may ever leave it that was not dropped."""
TIGHT: Final = sizes(device=24, host=32, disk=64)
"""Its disk holds a fraction of the chains: every new block there costs an old one."""
CHAINS: Final = {"roomy": 32, "tight": 24}
WORKERS: Final = 3
"""Clients on each cache."""
PROVED: Final = 6
"""Chains that are read back whole after each kill."""
EVENTS_BETWEEN: Final = 600
"""Most events between one end and the next."""


@dataclass
class Trial:
    """Made by :func:`trial`."""

    daemon: DaemonProcess
    observer: AsyncClient
    caches: dict[str, Cache]
    loads: dict[str, Load]
    witness: Witness
    rng: random.Random
    serving_s: list[float] = field(default_factory=list)
    """From the start of each process to its first answer."""

    async def end_and_restart(self, end: Callable[[], None]) -> Cursor:
        """Ends the daemon at a random point, starts it and checks what the disk had. Where it began to serve."""
        await self.witness.more(self.rng.randint(1, EVENTS_BETWEEN))
        await asyncio.sleep(self.rng.uniform(0, 0.02))  # between events, too, not only where one was just sent
        await asyncio.to_thread(end)
        on_disk = {name: recorded(self.daemon, name) for name in self.caches}
        acknowledged = self.loads["roomy"].acknowledged - self.dropped_keys()
        assert acknowledged <= on_disk["roomy"].keys(), f"{len(acknowledged - on_disk['roomy'].keys())} moves undone"
        began = time.perf_counter()
        await asyncio.to_thread(self.daemon.start)
        self.serving_s.append(time.perf_counter() - began)
        stats = await self.observer.stats()
        assert stats.pid == self.daemon.pid
        start = Cursor(stats.epoch, stats.last_event_id)
        await self.witness.reach(start)
        for name, records in on_disk.items():
            whole = _reachable(records)
            assert records.keys() - whole <= self.dropped_keys(name), f"{name}: committed without their parents"
            assert self.witness.recovered[name] == whole, f"{name}: not what the index holds"
        lost = self.witness.on_disk_before["roomy"] - self.witness.recovered["roomy"] - self.dropped_keys()
        assert not lost, f"{len(lost)} blocks that were seen on disk are not there after the restart"
        for load in self.loads.values():
            load.check()
        return start

    async def assert_reachable(self, proved: int) -> None:
        """Every roomy block on disk before the restart is matched from its root; ``proved`` chains are read whole."""
        seen, dropped = self.witness.on_disk_before["roomy"], self.loads["roomy"].dropped
        chains = {name: keys for name in self.loads["roomy"].living if (keys := _leading(name, seen))}
        for name, keys in chains.items():
            match = await self.caches["roomy"].match(keys)
            assert match.blocks == len(keys) or name in dropped, (name, len(keys), match)
        for name in self.rng.sample(sorted(chains), min(proved, len(chains))):
            found = await _patient_get(self.caches["roomy"], chains[name])
            assert len(found) == len(chains[name]) or name in dropped
            assert_bytes(chains[name][: len(found)], found)

    async def settle(self) -> None:
        """Ends the load, reads everything back and compares what the events say with what the daemon lists."""
        for load in self.loads.values():
            await load.stop()
        await self.assert_reachable(CHAINS["roomy"])
        for cache in self.caches.values():
            await self.witness.assert_agrees(cache)
        undropped = self.witness.left_disk["roomy"] - self.dropped_keys()
        assert not undropped, f"{len(undropped)} blocks left a disk that had room"

    def line(self, kills: int) -> str:
        """What was done and found, of a trial that has settled."""
        blocks = sum(load.done["blocks"] for load in self.loads.values())
        return (
            f"killed {kills} times: 0 wrong of {blocks:,} blocks read, {len(self.loads['roomy'].acknowledged):,} "
            f"acknowledged on disk and 0 of them lost, {self.witness.events:,} events without a hole; "
            f"start to serving at most {max(self.serving_s):.2f} s"
        )

    def dropped_keys(self, cache: str = "roomy") -> set[bytes]:
        """Of these, one that was on its way to disk may have got there after its parent had been deleted."""
        return {key for name in self.loads[cache].dropped for key in chain(name, CHAIN_BLOCKS)}


async def kill_under_load(start_daemon: StartDaemon, kills: int, seed: int, *flags: str) -> str:
    """Kills the daemon, starts it and looks at everything, again and again. What was done and found."""
    async with trial(start_daemon, seed, *flags) as run:
        for number in range(1, kills + 1):
            start = await run.end_and_restart(run.daemon.kill)
            assert start.epoch == number + 1
            await run.assert_reachable(PROVED)
        await run.settle()
        assert [gap.epoch for gap in run.witness.gaps] == list(range(1, kills + 1))
        return run.line(kills)


@asynccontextmanager
async def trial(start_daemon: StartDaemon, seed: int, *flags: str) -> AsyncIterator[Trial]:
    """A daemon with two caches under load and somebody who watches them from the first event on."""
    rng = random.Random(seed)
    budgets = {"roomy": ROOMY, "tight": TIGHT}
    slots = {str(tier): sum(each[tier] for each in budgets.values()) // SLOT_BYTES for tier in TIERS}
    daemon = start_daemon("--chaos-seed", str(rng.randrange(1 << 32)), *flags, **slots)
    async with AsyncExitStack() as stack:
        observer = await stack.enter_async_context(await patient(daemon.address))
        caches = {name: await observer.open_cache(name, SPEC, budgets=each) for name, each in budgets.items()}
        witness = await stack.enter_async_context(Witness(observer))
        loads = {
            name: await stack.enter_async_context(
                Load(daemon.address, name, chains=count, workers=WORKERS, seed=rng.randrange(1 << 32))
            )
            for name, count in CHAINS.items()
        }
        yield Trial(daemon, observer, caches, loads, witness, rng)


def recorded(daemon: DaemonProcess, cache: str) -> dict[bytes, bytes | None]:
    """What a dead daemon's index says is on disk: each block's key and its parent's."""
    stored = stored_in(daemon.disk_dir / "caches" / cache)
    parents = parents_of(decode_records(list(stored), list(stored.values())))
    return dict(zip(stored, parents, strict=True))


def _reachable(records: dict[bytes, bytes | None]) -> set[bytes]:
    """Those that stand on nothing, or on others of them."""
    reached: set[bytes] = set()
    while more := {key for key, parent in records.items() if parent is None or parent in reached} - reached:
        reached |= more
    return reached


def _leading(name: str, keys: set[bytes]) -> list[bytes]:
    """The leading blocks of a chain that are among ``keys``."""
    whole = chain(name, CHAIN_BLOCKS)
    return whole[: next((depth for depth, key in enumerate(whole) if key not in keys), CHAIN_BLOCKS)]


async def _patient_get(cache: Cache, keys: list[bytes]) -> Blocks:
    """While the load holds the slots there is no room to read into."""

    async def attempt() -> Blocks | None:
        try:
            return await cache.get(keys, timeout=PATIENCE_S)
        except TierFull:
            return None

    found = await eventually(attempt, lambda got: got is not None)
    assert found is not None
    return found
