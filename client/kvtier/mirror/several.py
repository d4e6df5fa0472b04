"""Mirrors of several daemons side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Self

from kvtier.errors import DeadlineExceeded
from kvtier.mirror.follower import DEFAULT_MIRROR_HEARTBEAT_S, DEFAULT_MIRROR_TIMEOUT_S, Mirror
from kvtier.mirror.ranking import Standing, ranked
from kvtier.session import require_timeout
from kvtier.types import Tier
from kvtier.wire import Keys

if TYPE_CHECKING:
    from kvtier.aio import AsyncClient


class Mirrors:
    """A mirror of each daemon, and which of them has the longest prefix::

        async with kvtier.Mirrors({"node-1": one, "node-2": two}, caches=["llama"]) as mirrors:
            first = mirrors.best(keys)[0]

    Entering it returns once each is exact or has met a problem, but after ``timeout`` seconds in any case: a daemon
    that is away keeps nobody from using the others, and joins when it comes. Arguments as of :class:`kvtier.Mirror`.
    """

    def __init__(
        self,
        clients: Mapping[str, AsyncClient],
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        self.mirrors: Final[Mapping[str, Mirror]] = MappingProxyType(
            {name: Mirror(client, caches, heartbeat_s=heartbeat_s) for name, client in clients.items()}
        )
        """By the names given."""
        require_timeout(timeout)
        self._timeout = timeout

    def best(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> list[Standing]:
        """What each daemon has of the chain, the longest prefix first, without a call. Arguments as of
        :meth:`kvtier.Mirror.match`.

        One that is stale keeps its place: it had these blocks when it was last heard, and may be gone.
        """
        return ranked(self.mirrors, keys, cache, tiers)

    async def aclose(self) -> None:
        """Stops following all of them."""
        await asyncio.gather(*(mirror.aclose() for mirror in self.mirrors.values()))

    async def __aenter__(self) -> Self:
        try:
            for mirror in self.mirrors.values():
                mirror.start()
            await asyncio.gather(*(self._settle(mirror) for mirror in self.mirrors.values()))
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _settle(self, mirror: Mirror) -> None:
        try:
            await mirror.settled(self._timeout)
        except DeadlineExceeded:
            return  # its state says so
