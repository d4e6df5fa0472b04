"""A mirror that a thread of the client keeps exact. Any thread may look."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Self

from kvtier.errors import ClientClosed
from kvtier.mirror import follower
from kvtier.mirror.follower import DEFAULT_MIRROR_HEARTBEAT_S, DEFAULT_MIRROR_TIMEOUT_S, MirrorView
from kvtier.sync.client import Client
from kvtier.types import Cursor


class Mirror(MirrorView):
    """``with kvtier.sync.Mirror(client, ["llama"]) as mirror``: see :class:`kvtier.Mirror`."""

    def __init__(
        self,
        client: Client,
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        self._thread = client._thread
        self._mirror = follower.Mirror(client._client, caches, heartbeat_s=heartbeat_s, timeout=timeout)
        super().__init__(self._mirror._content)

    def synced(self, cursor: Cursor | None = None, *, timeout: float | None = None) -> None:
        """See :meth:`kvtier.Mirror.synced`."""
        self._thread.run(lambda: self._mirror.synced(cursor, timeout=timeout))

    def close(self) -> None:
        """Stops following. What it knows stays, and is stale. Does nothing if its client is closed."""
        if not self._thread.forked:
            with suppress(ClientClosed):
                self._thread.run(self._mirror.aclose)

    def __enter__(self) -> Self:
        self._thread.run(self._mirror.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
