"""Writers that are stopped, kicked or killed go on writing into slots that they no longer have, or their forked
children do. No other client's block gets their bytes."""

import asyncio
import os
import select
import signal
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest

from kvtier import Tier
from tests.integration.actors import Actor
from tests.integration.blocks import block, blocks, chain, opened_cache
from tests.integration.seeing import tier_stats
from tests.integration.waiting import eventually
from tests.torture.runs import scaled
from tests.torture.writer import SLOTS

FATES = ("stopped", "kicked", "killed")
"""A forked child of a killed writer goes on writing."""
ROUNDS = scaled(20, 2)
"""Rounds for each fate."""
OTHERS, LENGTH = 4, 3

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


@pytest.mark.parametrize("fate", FATES)
async def test_nobody_writes_into_anothers_block(start_daemon, ending, found, fate):
    daemon, sums = start_daemon(host=SLOTS + OTHERS * LENGTH, disk=128), Counter[str]()
    async with opened_cache(daemon.address, "c") as (client, cache):
        for number in range(ROUNDS):
            await cache.reset()
            with ExitStack() as ends:
                await one_round(client, cache, daemon.address, fate, number, sums, ends)
            await eventually(lambda: tier_stats(client, "c", Tier.HOST), lambda tier: not (tier.held or tier.orphaned))
    found(
        f"writers {fate} {ROUNDS} times, who write on: {sums['wrong']} wrong of {sums['read']:,} blocks that "
        f"others stored meanwhile"
    )
    assert sums["read"] and not sums["wrong"]


async def one_round(client, cache, address, fate, number, sums, ends):
    forks = fate == "killed"
    writer = ends.enter_context(Actor("", module="tests.torture.writer", address=address, cache="c", forks=forks))
    said = await asyncio.to_thread(writer.says)
    writes = os.pidfd_open(said["pid"])
    ends.callback(os.close, writes)
    if forks:
        writer.kill()
        await eventually(lambda: tier_stats(client, "c", Tier.HOST), lambda tier: not tier.held)
    else:
        writer.signal(signal.SIGSTOP)
    if fate == "kicked":
        await client.kick(said["session"])
    chains = [chain(f"{number}/{other}", LENGTH) for other in range(OTHERS + SLOTS // LENGTH)]
    for keys in chains:
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
    writer.go_on()
    writer.signal(signal.SIGCONT)
    over = False
    while not over:
        over = bool(select.select([writes], [], [], 0)[0])
        for keys in chains:
            read = await cache.get(keys)
            sums["read"] += len(read)
            sums["wrong"] += sum(not np.array_equal(found, block(key)) for key, found in zip(keys, read, strict=False))
