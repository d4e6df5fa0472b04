"""What a daemon says of itself, asked for again and again, whatever becomes of it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from kvtier.aio import AsyncClient
from kvtier.cli.common import DaemonAt
from kvtier.cli.top.frame import Leases
from kvtier.errors import KvtierError, PermissionDenied, RetryableError
from kvtier.stats import DaemonStats

LEASES_EVERY_S: Final = 5.0
"""There may be thousands; their number changes all the time, the oldest ones do not."""

_PATIENCE_S: Final = 2.0
"""A daemon that takes longer to answer is away."""


@dataclass(slots=True, frozen=True)
class Answer:
    """``received``: seconds of the monotonic clock."""

    stats: DaemonStats
    leases: Leases
    received: float


@dataclass(slots=True, frozen=True)
class Silence:
    """There is none, and why."""

    why: str


class Feed:
    """Of one daemon, over its restarts. ``async with``; raises :class:`kvtier.errors.KvtierError` where it does not
    answer at first, or refuses."""

    def __init__(self, daemon: DaemonAt, interval: float) -> None:
        self._daemon = daemon
        self._interval = interval
        self._client: AsyncClient | None = None
        self._leases = Leases()
        self._leases_due = 0.0

    async def __aenter__(self) -> Feed:
        self._client = await self._daemon.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._hang_up()

    @property
    def address(self) -> str:
        return self._daemon.address

    async def ask(self) -> Answer:
        """Raises :class:`kvtier.errors.KvtierError`."""
        if self._client is None:
            self._client = await self._daemon.connect()
        stats = await self._client.stats(timeout=_PATIENCE_S)
        received = time.monotonic()
        if received >= self._leases_due:
            self._leases_due = received + LEASES_EVERY_S
            self._leases = await _leases(self._client)
        return Answer(stats, self._leases, received)

    async def follow(self) -> AsyncGenerator[Answer | Silence, None]:
        """An answer, or that there is none, each interval; an answer that comes late does not make the next one late,
        and none is made up for."""
        due = time.monotonic()
        while True:
            try:
                yield await self.ask()
            except RetryableError as error:
                yield Silence(str(error))
            except KvtierError as error:
                await self._hang_up()  # what was refused for good is asked for anew: rules can change
                yield Silence(str(error))
            due = max(due + self._interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


async def _leases(client: AsyncClient) -> Leases:
    """Who administers some caches only is not told of them."""
    try:
        return Leases(tuple(await client.leases(timeout=_PATIENCE_S)))
    except PermissionDenied as error:
        return Leases(refused=str(error))
