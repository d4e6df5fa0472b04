"""A cache under an engine's own keys, for threads that may wait a little and must not see an error of kvtier.

The daemon may be away, at the start and at any time later. Blocks in mapped memory are still found and copied. Other
blocks are a miss, and the engine's saves are dropped, until the daemon answers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from kvtier.abi.spec import CacheSpec
from kvtier.buffers import Blocks
from kvtier.engine.client import OPEN_S, EngineClient, PendingReset, opened
from kvtier.engine.layout import cache_name
from kvtier.engine.options import SILENCE_S, Complaints, EngineOptions, Share
from kvtier.errors import InvalidArgument
from kvtier.memory.planes import Pages
from kvtier.sync import Client, SyncCache
from kvtier.types import MAPPED_TIERS, BlockResult, CacheOptions, Tier
from kvtier.wire import MAX_KEYS

SETTINGS: Final = (
    *("address", "cache", "disk_bytes", "host_bytes", "load_timeout", "on_error", "remote_wait", "weights_version"),
    "write_policy",
)
_STORED: Final = (BlockResult.OK, BlockResult.EXISTS)
_MAPPED: Final = sum(tier.bit for tier in MAPPED_TIERS)

_log = logging.getLogger("kvtier.connectors")


class Store:
    """A cache for an engine's threads. No method raises, or waits longer than ``load_timeout`` seconds for a silent
    daemon. A lookup waits for ``remote_wait`` seconds if blocks could come from a remote store."""

    def __init__(
        self, options: EngineOptions, spec: CacheSpec, share: Share = 1, *, weights: str = "", asks: bool = True
    ) -> None:
        """Opens the cache.

        Args:
            share: this cache's share of the budgets in the options.
            weights: for the log, the source of the weights' digest.
            asks: whether reads count in the hit ratio; not on a rank that reads the same blocks as the first rank.

        Raises :class:`InvalidArgument`, also for budgets without room for a block; with ``on_error = "fail"`` any error
        of opening the cache. Else other errors are logged, and a thread tries again.
        """
        try:
            self.name: Final = cache_name(spec, options.cache)
        except InvalidArgument as error:
            raise InvalidArgument(f"cache of {spec.model}: {error.field}", error.value, error.limit) from error
        options.require_room(spec, share)
        self.complaints: Final = Complaints(_log)
        connect = partial(Client, options.address, timeout=options.load_timeout, patience=SILENCE_S)
        self._connection: Final = EngineClient(_log, self.name, connect)
        self._reset: Final = PendingReset(self.name, options.address)
        self._options: Final = options
        self._spec: Final = spec
        self._weights: Final = weights
        self._asks: Final = asks
        self._budgets = {tier: int(nbytes * share) for tier, nbytes in (options.budgets or {}).items()}
        self._groups: Sequence[SyncCache] = ()
        self._connection.open(self._open, fail=options.on_error == "fail")

    def probe(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """Returns which keys have a block that a load would get."""

        def look(cache: SyncCache) -> list[bool]:
            tiers = 0xFF if self._connection.connected else _MAPPED
            found = (cache.probe(keys[at : at + MAX_KEYS]) for at in range(0, len(keys), MAX_KEYS))
            return [bool(residency & tiers) for some in found for residency in some]

        return self._tried(group, "a lookup failed", look, len(keys))

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """Like :meth:`probe`, after fetching missing blocks from a remote store."""
        there = self.probe(group, keys)

        def bring(cache: SyncCache) -> list[bool]:
            if not cache.info.remote or not self._connection.connected:
                return [False]
            unique = list(dict.fromkeys(keys))[:MAX_KEYS]
            return [bool(cache.move(unique, Tier.HOST, timeout=self._options.remote_wait))]

        wanted = self._options.remote_wait and not all(there)
        if not wanted or not self._tried(group, "blocks could not be fetched", bring, 1)[0]:
            return there
        found = self.probe(group, keys)
        self.complaints.note("blocks fetched from the store", sum(found) - sum(there))
        return found

    def load(self, group: int, keys: Sequence[bytes], blocks: Sequence[Any] | Pages) -> list[bool]:
        """Fills ``blocks``, one per key, from the stored blocks. Returns which are filled; the others may hold any
        bytes afterwards."""
        there = [at for at, found in enumerate(self.find(group, keys)) if found]
        loaded: set[int] = set()

        def get(cache: SyncCache) -> list[bool]:
            left = there
            while left:
                first = {keys[at]: at for at in reversed(left)}  # a call has no key twice
                some = sorted(first.values())
                loaded.update(some[: len(cache.get([keys[at] for at in some], _chosen(blocks, some)))])
                left = sorted(set(left) - set(some))
            self.complaints.note("blocks loaded", len(loaded))
            return [at in loaded for at in range(len(keys))]

        return self._tried(group, "a load failed", get, len(keys))

    def save(self, group: int, keys: Sequence[bytes], blocks: Blocks) -> list[bool]:
        """Stores blocks under keys. Returns for each key whether it is stored afterwards."""

        def put(cache: SyncCache) -> list[bool]:
            if not self._connection.connected:
                self.complaints.note("not saved: the daemon does not answer", len(keys))
                return [False] * len(keys)
            first = {key: at for at, key in reversed(list(enumerate(keys)))}  # a call has no key twice
            some = sorted(first.values())
            put = cache.put([keys[at] for at in some], blocks if len(some) == len(keys) else _chosen(blocks, some))
            results = dict(zip(some, put, strict=True))
            self.complaints.note("blocks saved", sum(result is BlockResult.OK for result in put))
            return [results[first[key]] in _STORED for key in keys]

        return self._tried(group, "a save failed", put, len(keys))

    def drop(self, group: int, keys: Sequence[bytes]) -> bool:
        """Forgets blocks. Returns whether all of them were stored and are gone."""

        def forget(cache: SyncCache) -> list[bool]:
            return [bool(keys) and all(result is BlockResult.OK for result in cache.drop(keys).results)]

        return self._tried(group, "blocks were not dropped", forget, 1)[0]

    def clear(self) -> None:
        """Forgets all blocks. If the daemon does not answer, lookups find nothing until it has forgotten them."""
        self._reset.begin()
        self._tried(0, "the cache was not cleared", lambda cache: [True], 1)

    def close(self) -> None:
        self._groups = ()
        self._connection.close()
        _log.info("%s closed: %s", self.name, dict(self.complaints.counts))

    def _tried(self, group: int, failure: str, work: Callable[[SyncCache], list[bool]], count: int) -> list[bool]:
        groups = self._groups
        if not groups:
            return [False] * count
        try:
            cache, reset = groups[0], self._reset
            if reset.due and not (
                self._connection.connected and cache.thread.run(lambda: reset.carry_out(cache.inner))
            ):
                return [False] * count
            return work(groups[group])
        except Exception as error:  # noqa: BLE001  the engine's thread must not end because of its cache
            self.complaints.add(failure, error)
            return [False] * count

    def _open(self, client: Client) -> None:
        cache = client.open_cache(
            self.name,
            self._spec,
            budgets=self._budgets,
            options=CacheOptions(write_policy=self._options.policy),
            timeout=OPEN_S,
        )
        if not self._asks:
            cache.inner.reader.mute()
        _log.info("%s", opened(cache.info, client.address, self._weights))
        self._groups = [cache.in_group(at) for at in range(len(self._spec.groups))]


def _chosen(blocks: Any, at: Sequence[int]) -> Any:
    """Picks blocks out of pages, an array or a sequence."""
    return blocks[np.array(at)] if isinstance(blocks, Pages | np.ndarray) else [blocks[each] for each in at]
