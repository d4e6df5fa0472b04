"""A bug on the loop's side is told, and does not keep the engine from its end."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kvtierd.core.events import BlockEvent, EventSequencer
from kvtierd.core.ids import SessionId, Tier
from kvtierd.mover.engine import Engine
from tests.unit.mover.rig import Client, key, make_runtime, mover_threads


class BrokenHub:
    def __init__(self) -> None:
        self.broken = False

    def publish(self, events: Sequence[BlockEvent]) -> None:
        if self.broken:
            raise RuntimeError("cannot publish")


async def test_a_bug_on_the_loops_side_shows_in_health_and_in_the_log() -> None:
    loop = asyncio.get_running_loop()
    logged: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: logged.append(context))
    hub, sequencer = BrokenHub(), EventSequencer()
    engine = Engine(loop, hub, sequencer)
    engine.add_cache(make_runtime({Tier.DEVICE: 2, Tier.HOST: 2}, sequencer))
    client = Client(engine, SessionId(1))
    await client.put([key(1)])
    task = asyncio.create_task(client.move([key(1)], Tier.HOST))
    await asyncio.sleep(0)
    hub.broken = True
    await engine.settle()

    assert "cannot publish" in engine.problems()[0]
    assert "cannot publish" in str(logged[0]["exception"])
    task.cancel()
    assert await engine.shutdown(5.0)
    assert mover_threads() == []
