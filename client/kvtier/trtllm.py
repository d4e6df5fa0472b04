"""kvtier's events as TensorRT-LLM's, for a watcher. What differs, and how it is bridged: :mod:`kvtier.abi.trtllm`."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.abi.trtllm import WHOLE_WINDOW, Json, TrtllmTeller
from kvtier.events import Event, Gap, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import EventType

__all__ = ["WHOLE_WINDOW", "TrtllmEvents"]


class TrtllmEvents:
    """Of one cache, with nothing filtered away: what it is not shown, it does not know of."""

    def __init__(self) -> None:
        self._teller = TrtllmTeller()

    def of(self, item: WatchItem) -> Iterator[Json]:
        """An item in TensorRT-LLM's words: some events, in order, or nothing."""
        match item:
            case Event():
                yield from self._event(item)
            case SnapshotSlice():
                yield from self._teller.stored(item)
            case SnapshotStart():
                yield from self._teller.begin()
            case Gap():
                self._teller.lost(item.last_id - item.first_id + 1)
            case _:
                pass

    def _event(self, event: Event) -> Iterator[Json]:
        match event.type:
            case EventType.CREATED:
                return self._teller.created(event, event.num_blocks_per_cache_level)
            case EventType.STORED:
                return self._teller.stored(event)
            case EventType.UPDATED:
                return self._teller.updated(event, event.moved_from)
            case EventType.REMOVED:
                return self._teller.removed(event)
            case EventType.CLEARED:
                return self._teller.cleared(event)
