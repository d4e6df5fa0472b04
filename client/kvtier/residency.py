"""Every block's residency, rebuilt from the event stream alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.events import Event, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import EventType
from kvtier.wire import split_keys


@dataclass(slots=True, frozen=True)
class Mismatch:
    """A key whose residency differs; None = not indexed there."""

    key: bytes
    mirrored: int | None
    listed: int | None


class ResidencyTable:
    """Key to residency set, by cache and window group. Applying an item twice changes nothing.

    Exact at a watch's cursor from its ``SnapshotEnd`` on, unless a ``Gap`` came.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], dict[bytes, int]] = {}

    def apply(self, item: WatchItem) -> None:
        """Takes over what the item says; gaps and heartbeats say nothing."""
        match item:
            case Event():
                self._apply_event(item)
            case SnapshotSlice():
                self._set(item.cache, item.group, item.packed_keys, item.residency)
            case SnapshotStart():
                self._groups.clear()
            case _:
                pass

    def blocks(self, cache: str, group: int = 0) -> Mapping[bytes, int]:
        """Key to residency set. Live: it changes as items are applied."""
        return self._groups.setdefault((cache, group), {})

    def differences(self, cache: str, group: int, listed: Mapping[bytes, int]) -> list[Mismatch]:
        """Where the table and a listing of the same moment disagree, in key order."""
        mirrored = self.blocks(cache, group)
        return [
            Mismatch(key, mirrored.get(key), listed.get(key))
            for key in sorted(mirrored.keys() | listed.keys())
            if mirrored.get(key) != listed.get(key)
        ]

    def _apply_event(self, event: Event) -> None:
        if event.type in (EventType.STORED, EventType.UPDATED):
            self._set(event.cache, event.group, event.packed_keys, event.residency)
        elif event.type is EventType.REMOVED:
            blocks = self._groups.setdefault((event.cache, event.group), {})
            for key in split_keys(event.packed_keys):
                blocks.pop(key, None)
        else:
            # Created or cleared: nothing is indexed in the group now.
            self._groups[event.cache, event.group] = {}

    def _set(self, cache: str, group: int, packed: bytes, residency: bytes) -> None:
        blocks = self._groups.setdefault((cache, group), {})
        blocks.update(zip(split_keys(packed), residency, strict=True))
