"""A client on the fake GPU in a process of its own, to be killed in the middle of a kernel: see :mod:`actors`."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import sys
import time
from typing import Any

from kvtier import Tier, connect
from kvtier.gpu import Gpu
from tests.integration.blocks import SPEC


async def scribble(address: str, cache: str, slots: int) -> None:
    """Reserves slots of the device tier, and has a kernel write to them over and over; then loses its connection."""
    fake: Any = importlib.import_module("cuda.bindings.driver")
    client = await connect(address)
    lease = await (await client.open_cache(cache, SPEC)).reserve(slots, Tier.DEVICE)
    memory = lease.memory
    assert memory is not None and isinstance(memory.gpu, Gpu)
    parts: list[Any] = [part for index in range(slots) for part in lease.view(index)]

    def kernel() -> None:
        while True:
            for part in parts:
                ctypes.memset(part.address, 0xEE, part.nbytes)
            time.sleep(0)

    memory.gpu.driver.bind()
    fake.fake_work(int(memory.gpu.driver.stream()), kernel)
    link, keeper = client._session._link, client._session._keeper
    assert link is not None and keeper is not None
    keeper.cancel()
    link.attach._sock.shutdown(2)  # type: ignore[attr-defined]
    print(json.dumps({"slots": lease.slots}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(scribble(**json.loads(sys.stdin.readline())))
