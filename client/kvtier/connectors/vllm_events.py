"""Events of kvtier's cache in the form of vLLM's routers: by medium, under vLLM's hashes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any, Final

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtier.bridge import Options, vllm
from kvtier.events import Event, SnapshotEnd, SnapshotSlice, WatchItem
from kvtier.types import Tier

_MEDIA: Final[Mapping[Tier, str]] = {Tier.HOST: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}
_TIERS: Final = sum(tier.bit for tier in _MEDIA)
_OURS: Final = {"locality": "LOCAL", "ownership": "kvtier"}
_OPTIONS: Final = Options("ipc://vllm", tokens=True)
"""vLLM has the endpoint."""
_MOST_BLOCKS: Final = 1024
"""Most blocks whose changes one step of the engine publishes."""
_MOST_SESSIONS: Final = 1 << 16
_SNAPSHOT_S: Final = 1.0


class KvEvents:
    """The changes of a cache's blocks that the engine has not published yet.

    The leader's thread notes the items of a watch, the scheduler's thread takes events. The changes of a block are
    joined, so that no change is lost while the engine takes none.
    """

    def __init__(self, tokens_per_block: int, groups: Sequence[KVCacheGroupSpec]) -> None:
        specs = [group.kv_cache_spec for group in groups]
        self._kinds: Final = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs
        ]
        self._tokens: Final = tokens_per_block
        self._events: Final = vllm.VllmEvents(_OPTIONS, media=_MEDIA, hash_of=_hash)
        self._lock: Final = threading.Lock()
        self._changes: Final[dict[tuple[int, bytes], vllm.Change]] = {}
        """Changes from the published to the present tiers, by group and key, parents first."""
        self._sessions: Final[dict[bytes, str]] = {}
        self._begun: Final = threading.Event()
        """Set after the first snapshot."""

    def note(self, item: WatchItem) -> None:
        """Takes an item of a watch that begins with a snapshot."""
        if isinstance(item, Event | SnapshotSlice) and item.event_hash:
            item = replace(item, event_hash="")  # routers know the blocks by vLLM's hashes, which are the keys
        for group, changes in self._events.changes(item):
            by_key = {change.block.key: change for change in changes}
            blocks = vllm.parents_first(change.block for change in changes)
            if not any(change.after for change in changes):
                blocks.reverse()  # blocks leave children first
            for first in range(0, len(blocks), _MOST_BLOCKS):
                with self._lock:
                    for block in blocks[first : first + _MOST_BLOCKS]:
                        self._join(group.number, by_key[block.key])
        if isinstance(item, SnapshotEnd):
            self._begun.set()

    def wait(self) -> None:
        """Waits for the first snapshot for a short time, so that the engine publishes it before its first request."""
        self._begun.wait(_SNAPSHOT_S)

    def asked(self, keys: Iterable[bytes], session: str) -> None:
        """Notes the session of a request whose blocks may be stored."""
        self._sessions.update(dict.fromkeys(keys, session))
        while len(self._sessions) > _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    @property
    def waiting(self) -> bool:
        return bool(self._changes)

    def take(self) -> Iterator[KVCacheEvent]:
        """Yields vLLM's events of some blocks. A block is stored in its new medium before it is removed from the old
        medium."""
        with self._lock:
            places = list(islice(self._changes, _MOST_BLOCKS))
            taken = [(number, self._sessions.get(key), self._changes.pop((number, key))) for number, key in places]
        for (number, session), rows in groupby(taken, key=lambda row: row[:2]):
            group = vllm.PublishedGroup(number, tokens_per_block=self._tokens)
            for event in self._events.events_of(group, [change for _, _, change in rows]):
                fields = msgspec.structs.asdict(event) | _OURS
                yield self._stored(fields, session) if isinstance(event, vllm.BlockStored) else BlockRemoved(**fields)

    def _stored(self, fields: dict[str, Any], session: str | None) -> BlockStored:
        del fields["cache_salt"]
        fields["kv_cache_spec_kind"], fields["kv_cache_spec_sliding_window"] = self._kinds[fields["group_idx"]]
        return BlockStored(**fields, session_id=session)

    def _join(self, group: int, change: vllm.Change) -> None:
        known = self._changes.get((group, change.block.key), change)
        before, after = known.before & _TIERS, change.after & _TIERS
        if before == after:
            self._changes.pop((group, change.block.key), None)
        else:
            self._changes[group, change.block.key] = vllm.Change(change.block, before, after)


def _hash(key: bytes) -> int | bytes:
    converted: int | bytes = maybe_convert_block_hash(BlockHash(key))
    return converted
