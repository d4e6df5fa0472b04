"""Kernels that write and read slots while blocks swap between all tiers: every word is the block's, every time."""

import asyncio
from collections import Counter
from typing import Any, Final

import pytest

from kvtier import connect
from tests import devices
from tests.gpu.kernels import kernels
from tests.gpu.racing import SIZES, Race
from tests.integration.actors import Actor
from tests.integration.daemon import DaemonProcess
from tests.integration.seeing import cache_stats
from tests.integration.test_crash import SEED
from tests.integration.waiting import PATIENCE_S

pytestmark = pytest.mark.gpu

ENGINES: Final = 4
TURNS: Final = 25 if devices.ON_FAKE else 400
DEEDS: Final = ("written", "checked on the device", "put", "checked in arrays")
EDGES: Final = ("device>host", "host>device", "host>disk", "disk>device")
_ROUNDS: Final = 10
_END_S: Final = 12 * PATIENCE_S


@pytest.fixture
def daemon(short_dir):
    print(f"KVTIER_SEED={SEED}")
    with DaemonProcess(short_dir, SIZES) as process:
        yield process


async def swapped(daemon):
    """Blocks that went along each edge; none failed, and nobody holds a slot."""
    async with await connect(daemon.address) as client:
        stats = await cache_stats(client, "race")
        assert not any(tier.held for tier in stats.tiers)
        assert not any(edge.failures for edge in stats.edges)
        assert (await client.stats()).problems == ()
    return {edge.edge: edge.blocks for edge in stats.edges}


async def race(daemon, device, tell):
    """Until there was something of everything."""
    engines = Race(daemon.address, kernels(device, SEED), SEED)
    tally, edges = Counter[str](), dict[str, int]()
    for _ in range(_ROUNDS):
        tally = await engines.run(ENGINES, TURNS)
        edges = await swapped(daemon)
        if all(tally[deed] for deed in DEEDS) and all(edges.get(edge) for edge in EDGES):
            tell.append(f"{dict(tally)}; {edges}")
            return tally
    raise AssertionError(f"{tally}, {edges}")


async def test_copies_race_kernels(daemon, device, tell):
    await race(daemon, device, tell)


async def test_kernels_of_two_processes_race_the_copies(daemon, device, tell):
    script: dict[str, Any] = {"address": daemon.address, "seed": SEED + 1, "engines": ENGINES, "turns": TURNS}
    with Actor("race", module="tests.gpu.players", **script) as actor:
        assert await asyncio.to_thread(actor.says, _END_S) == {"begins": True}
        await Race(daemon.address, kernels(device, SEED), SEED).run(ENGINES, TURNS)
        theirs = Counter(await asyncio.to_thread(actor.says, _END_S))
    assert theirs["written"] and theirs["checked on the device"]
    tell.append(f"the other process: {dict(theirs)}")
    await race(daemon, device, tell)


async def test_a_short_race(daemon, device):
    """Short enough to be run under a checker of memory accesses, too."""
    tally = await Race(daemon.address, kernels(device, SEED), SEED).run(2, 12)
    assert tally.total()
