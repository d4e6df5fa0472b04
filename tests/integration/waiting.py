"""Waiting for what can be seen, never for time to pass."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from kvtier import AsyncClient, connect

T = TypeVar("T")
Probe: TypeAlias = Callable[[], Awaitable[T]]

PATIENCE_S = 30.0
"""How long a small machine that is busy with other things may take for anything; a test that fails waits so long, none
that passes does."""

_PAUSE_S = 0.005


async def patient(address: str, **options: Any) -> AsyncClient:
    """A client whose calls wait while the daemon is away."""
    return await connect(address, wait=PATIENCE_S, **options)


@overload
async def eventually(probe: Probe[T], wanted: Callable[[T], object], *, within: float = PATIENCE_S) -> T: ...
@overload
async def eventually(probe: Callable[[], T], wanted: Callable[[T], object], *, within: float = PATIENCE_S) -> T: ...
async def eventually(probe: Callable[[], Any], wanted: Callable[[Any], object], *, within: float = PATIENCE_S) -> Any:
    """Asks ``probe`` until its answer is ``wanted``, and returns that answer. The probe may be a coroutine function."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while True:
        found = probe()
        answer = await found if isawaitable(found) else found
        if wanted(answer):
            return answer
        assert loop.time() < end, f"still not so after {within:g} s: {answer!r}"
        await asyncio.sleep(_PAUSE_S)


def halt(pid: int) -> None:
    """SIGSTOP; returns when every thread has stopped."""
    os.kill(pid, signal.SIGSTOP)
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(_PAUSE_S)


async def heard(client: AsyncClient) -> None:
    """Until the daemon is not away any more: a read without a call does not wait for that."""
    await eventually(lambda: client.connected, bool)
