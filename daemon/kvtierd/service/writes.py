"""A message on its way to a peer: whoever waits for it may be cancelled, it itself is not.

gRPC has no way to end a call while a write is pending. A task of its own for each write would keep it, and cost three
more callbacks and two more turns of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from functools import partial
from typing import Any, Final

import grpc.aio


class Write:
    """Begins when it is made. Loop thread only."""

    __slots__ = ("_error", "_pending", "_steps")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], message: bytes) -> None:
        self._steps: Final[Generator[Any, None, None]] = context.write(message).__await__()
        self._pending: asyncio.Future[None] | None = None
        """gRPC's own, which must not be cancelled before it is done; None once the write is over."""
        self._error: Exception | None = None
        self._step()

    async def ended(self, within_s: float | None = None) -> bool:
        """Whether it ended within that time, well or not. May be asked again."""
        while self._pending is not None:
            if not self._pending.done():
                loop = self._pending.get_loop()
                waiter = loop.create_future()
                self._pending.add_done_callback(partial(_wake, waiter))
                timer = None if within_s is None else loop.call_later(within_s, _wake, waiter)
                try:
                    await waiter
                finally:
                    if timer is not None:
                        timer.cancel()
                if not self._pending.done():
                    return False
            self._step()
        return True

    async def taken(self) -> None:
        """Returns once the peer has taken it. Raises what gRPC does where it cannot."""
        await self.ended()
        self.require_taken()

    def require_taken(self) -> None:
        """Of one that has ended. Raises what gRPC does where the peer has not taken it."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Nobody waits for it any more. Nothing happens if it has ended."""
        if self._pending is not None:
            self._pending.cancel()
            self._steps.close()
            self._pending = None

    def _step(self) -> None:
        try:
            self._pending = self._steps.send(None)
        except StopIteration:
            self._pending = None
        except Exception as error:  # noqa: BLE001  it is raised where the write is waited for
            self._pending, self._error = None, error


def _wake(waiter: asyncio.Future[None], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(None)
