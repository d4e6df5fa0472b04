"""A mover on real parts: an arena in shared memory, the core, and a disk in a directory of the test's."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import ArenaLayout, is_ready
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.events import BlockEvent, Cause, EventSequencer
from kvtierd.core.ids import CacheId, GroupId, Key, MoveId, SessionId, SlotId, Tier, Traits
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, GroupGrant, Move, MoveItem, Refusal
from kvtierd.core.policy import GroupShape
from kvtierd.core.transfers import ChainRequest, CommitItem
from kvtierd.mover.engine import Engine
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import TierIOError
from kvtierd.tiers.disk.batch import DiskWrite
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.store import Begun, DiskRead, DiskStore, ReadReport
from kvtierd.tiers.mapped import Chaos, HostStore, StandInDevice
from tests.slot_rows import changes

GROUP = GroupId(0)
CACHE = CacheId(1)

SPEC = CacheSpec(
    model="rig",
    dtype="float16",
    tokens_per_block=16,
    groups=(WindowGroupSpec(pools=(PoolSpec(2, 2, 64), PoolSpec(1, 1, 40, kv_factor=1))),),
)
"""Two pools: 16 KiB, and 1,280 bytes, which padding must not spoil."""


def key(number: int) -> Key:
    return Key(hashlib.sha256(f"block {number}".encode()).digest())


def content(of: Key) -> list[np.ndarray]:
    """The bytes of a block, one array a pool; every byte depends on the key and on its place."""
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(of[:8])))
    return [generator.integers(0, 256, SPEC.pool_bytes(0, pool), dtype=np.uint8) for pool in range(2)]


class StubbornDisk(DiskStore):
    """A real store that can be told to wait, or to fail."""

    def __init__(self, inner: DiskStore) -> None:
        self._inner = inner
        self._gate = threading.Event()
        self.failing = False
        self.open_gate()

    def close_gate(self) -> None:
        self._gate.clear()

    def open_gate(self) -> None:
        self._gate.set()

    def write(self, *arguments: Any, **named: Any) -> frozenset[int]:
        self._pass()
        return self._inner.write(*arguments, **named)

    def begin(self, writes: Sequence[DiskWrite]) -> Begun:
        return self._inner.begin(writes)

    def finish(self, *arguments: Any, **named: Any) -> frozenset[int]:
        self._pass()
        return self._inner.finish(*arguments, **named)

    def read(self, reads: Sequence[DiskRead], *, held: bool = True) -> ReadReport:
        self._pass()
        return self._inner.read(reads, held=held)

    def sync(self) -> None:
        self._inner.sync()

    def _pass(self) -> None:
        assert self._gate.wait(30)
        if self.failing:
            raise TierIOError(5, "the disk is unwell")


class Hub:
    """Keeps what was published."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []

    def publish(self, events: Sequence[BlockEvent]) -> None:
        self.events.extend(events)

    def residency(self, cache: CacheId = CACHE) -> dict[Key, int]:
        """Every block's residency set, rebuilt from events alone."""
        rebuilt: dict[Key, int] = {}
        for event in self.events:
            for change in changes(event.blocks) if event.cache == cache else ():
                rebuilt[change.key] = change.residency
        return {block: tiers for block, tiers in rebuilt.items() if tiers}


class Client:
    """One session's view of an engine: puts blocks and gets them back, checking every byte."""

    def __init__(self, engine: Engine, session: SessionId, cache: CacheId = CACHE) -> None:
        self.engine = engine
        self.session = session
        self.cache = cache

    async def reserve(self, count: int, tier: Tier = Tier.DEVICE, timeout_s: float | None = 30.0) -> GroupGrant:
        return await self.engine.reserve(self.cache, self.session, GROUP, tier, count, timeout_s)

    async def put(self, chain: Sequence[Key], tier: Tier = Tier.DEVICE, *, after: Key | None = None) -> None:
        """Stores a chain whose first block has the parent ``after``."""
        grant = await self.reserve(len(chain), tier)
        self.commit(grant, chain, tier, after=after)
        self.release(grant)

    def commit(self, grant: GroupGrant, chain: Sequence[Key], tier: Tier, *, after: Key | None = None) -> None:
        assert grant.lease is not None
        runtime = self.engine.runtime(self.cache)
        for slot, block in zip(grant.slots, chain, strict=True):
            fill(runtime, tier, slot, block)
        parents = [after, *chain[:-1]]
        items = [
            CommitItem(slot, block, parent, 35) for slot, block, parent in zip(grant.slots, chain, parents, strict=True)
        ]
        self.engine.commit(self.cache, self.session, grant.lease, items)

    async def acquire(
        self, chain: Sequence[Key], tier: Tier = Tier.DEVICE, min_blocks: int = 0, timeout_s: float | None = 30.0
    ) -> Grant | Refusal:
        wanted = [ChainRequest(tuple(chain), min_blocks)]
        (answer,) = await self.engine.acquire(self.cache, self.session, [GROUP], tier, wanted, timeout_s)
        return answer

    async def get(self, chain: Sequence[Key], tier: Tier = Tier.DEVICE) -> int:
        """How much of the chain is there; all of that is compared, byte by byte."""
        answer = await self.acquire(chain, tier)
        if isinstance(answer, Refusal):
            return 0
        runtime = self.engine.runtime(self.cache)
        for slot, block in zip(answer.only.slots, chain, strict=False):
            assert holds(runtime, tier, slot, block)
            assert ready(runtime, tier, slot)
        self.release(answer.only)
        return answer.blocks

    async def move(self, chain: Sequence[Key], to: Tier, timeout_s: float | None = 30.0) -> Grant:
        return await self.engine.move(self.cache, self.session, GROUP, to, chain, timeout_s)

    def release(self, grant: GroupGrant) -> None:
        if grant.lease is not None:
            self.engine.release(self.cache, self.session, [grant.lease])


def make_runtime(
    slots: Mapping[Tier, int],
    sequencer: EventSequencer,
    disk: DiskStore | None = None,
    chaos: Chaos | None = None,
    cache: CacheId = CACHE,
) -> CacheRuntime:
    """A cache with these slots and no blocks, not yet opened."""
    layout = ArenaLayout.plan(SPEC, {(0, tier): count for tier, count in slots.items()})
    identity = ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=1, pid=os.getpid())
    arena = Arena.create(f"rig-{cache}", layout, identity)
    shape = GroupShape(GROUP, dict(slots), {tier: SPEC.block_bytes(0) for tier in slots})
    manager = BlockManager(cache, [shape], sequencer)
    manager.fill({}, {}, unclean=False, restarted=False)
    return CacheRuntime(
        id=cache,
        name=f"rig-{cache}",
        spec=SPEC,
        manager=manager,
        arena=arena,
        host=HostStore(arena) if Tier.HOST in slots else None,
        device=StandInDevice(arena, chaos) if Tier.DEVICE in slots else None,
        disk=disk,
    )


def mover_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvtierd-")]


def move(number: int, src: Tier, dst: Tier | None, items: Iterable[tuple[int, int, int | None]]) -> Move:
    """A move of (block number, source slot, destination slot) items."""
    return Move(
        MoveId(number),
        GROUP,
        src,
        dst,
        cause=Cause.CAPACITY,
        items=[
            MoveItem(key(block), None, Traits(35), SlotId(source), None if target is None else SlotId(target))
            for block, source, target in items
        ],
    )


def fill(runtime: CacheRuntime, tier: Tier, slot: int, block: Key) -> None:
    """Writes a block's bytes into a memory slot, as a client would."""
    for part, data in zip(runtime.memory(tier).parts(GROUP, SlotId(slot)), content(block), strict=True):
        part[:] = data


def holds(runtime: CacheRuntime, tier: Tier, slot: int, block: Key) -> bool:
    """Whether a memory slot holds exactly the block's bytes."""
    parts = runtime.memory(tier).parts(GROUP, SlotId(slot))
    return all(np.array_equal(part, data) for part, data in zip(parts, content(block), strict=True))


def ready(runtime: CacheRuntime, tier: Tier, slot: SlotId) -> bool:
    """Whether the slot's generation tells clients that its bytes are a block's."""
    return is_ready(runtime.arena.generation(tier, GROUP, slot))


class House:
    """An engine with its caches and what it published.

    Leaving it (``async with``) compares the events with the listings and shuts down, which must leave nothing.
    """

    def __init__(self, directory: Path | None = None, make_disk: type[StubbornDisk] = StubbornDisk) -> None:
        self.hub = Hub()
        self._make_disk = make_disk
        self.sequencer = EventSequencer()
        self.engine = Engine(asyncio.get_running_loop(), self.hub, self.sequencer, debug_checks=True)
        self.disk: StubbornDisk
        self._directory = directory
        self._roots: list[DiskRoot] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._roots:
            self.disk.open_gate()
        await self.engine.settle()
        compared = [(self.hub.residency(cache), self.listed(cache)) for cache in self.engine._executor.caches]
        clean = await self.engine.shutdown(10.0)
        for root in self._roots:
            root.close()
        if raised[0] is None:
            assert clean
            assert mover_threads() == []
            for from_events, from_listing in compared:
                assert from_events == from_listing

    def open(self, slots: Mapping[Tier, int], cache: CacheId = CACHE, chaos: Chaos | None = None) -> CacheRuntime:
        if Tier.DISK in slots:
            assert self._directory is not None
            root = DiskRoot.open(self._directory / f"disk-{cache}", floor_bytes=0)
            self._roots.append(root)
            self.disk = self._make_disk(root.create(f"rig-{cache}", SPEC, {GROUP: slots[Tier.DISK]}))
        runtime = make_runtime(slots, self.sequencer, self.disk if Tier.DISK in slots else None, chaos, cache)
        self.engine.add_cache(runtime)
        return runtime

    def client(self, session: int = 7, cache: CacheId = CACHE) -> Client:
        return Client(self.engine, SessionId(session), cache)

    def listed(self, cache: CacheId = CACHE) -> dict[Key, int]:
        """Every block's residency set, as the core lists it."""
        rows: dict[Key, int] = {}
        page = 0
        while True:
            listing = self.engine.manager(cache).listing(GROUP, page, 100)
            rows |= {row.key: row.residency for row in listing.rows}
            page = listing.next_page
            if page == 0:
                return rows
