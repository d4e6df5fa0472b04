"""Which calls are still to be answered: a stop waits for them before it touches their connections.

gRPC's server says that it goes away, and closes each connection right after the last answer on it. A client that
writes at that moment, if only the answer to a ping, gets a broken pipe; its gRPC then throws away what it has not read,
and the last words with it. So these are written first: who acknowledges the farewell behind them has read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc.aio

from kvtierd.service.errors import let_go

_Answer = TypeVar("_Answer")


class OpenCalls:
    """Loop thread only."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()

    def counted(self, call: Callable[[Any, Any], Awaitable[_Answer]]) -> Callable[[Any, Any], Awaitable[_Answer]]:
        """The same handler; a call is open until its refusal is written, or what it returns is gRPC's to write."""

        async def counting(request: Any, context: Any) -> _Answer:
            self._count += 1
            try:
                return await call(request, context)
            except grpc.aio.AbortError as error:
                # gRPC keeps it with the call, which the frames of its traceback name; it has caught it by then.
                asyncio.get_running_loop().call_soon(let_go, error)
                raise
            finally:
                self._count -= 1
                if not self._count:
                    self._none.set()

        return counting

    async def answered(self, within_s: float) -> None:
        """Ends when none is open, or after so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._count:
                    self._none.clear()
                    await self._none.wait()
