"""A watcher of one window group, which rebuilds the places of blocks from the events alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvtierd.core.events import BlockEvent, Cause, EventType
from kvtierd.core.ids import Key, Label
from kvtierd.core.transfers import ListingRow
from tests.events_page import told
from tests.simulation.forest import hash_of, label_of
from tests.simulation.violation import Violation, require
from tests.slot_rows import changes

LOSSES: Final = (Cause.CORRUPT, Cause.IO_ERROR, Cause.LOST, Cause.ANCESTOR)
"""Causes of events of lost bytes, after which a block may be nowhere until its descendants have gone."""


class Mirror:
    """``blocks``: the latest change of each block. ``short``: blocks that a restart once found in memory alone, which
    keeps only the hash of a label.

    Checks the order of events: no event repeats another, and in a chained group parents are stored before their
    children and removed after them.
    """

    def __init__(self, *, chained: bool) -> None:
        self.blocks: dict[Key, ListingRow] = {}
        self.short: set[Key] = set()
        self._chained = chained
        self._children: dict[Key, int] = {}
        self._handlers: dict[EventType, Callable[[ListingRow, Cause], None]] = {
            EventType.STORED: self._stored,
            EventType.UPDATED: self._updated,
            EventType.REMOVED: self._removed,
        }

    def apply(self, event: BlockEvent) -> None:
        kind = (event.type.name.lower(), event.cause.name.lower())
        require(kind in told(), f"the documentation does not say that {kind[0]} comes with {kind[1]}")
        if event.type is EventType.CLEARED:
            self.blocks.clear()
            self._children.clear()
        if (event.type, event.cause) == (EventType.UPDATED, Cause.REMOTE):
            for change in changes(event.blocks):
                require(self.blocks.get(change.key) == change, "a journey beyond the host changes a block")
            return
        handle = self._handlers.get(event.type)
        for change in changes(event.blocks):
            if (event.type, event.cause) == (EventType.STORED, Cause.COMMIT):
                self.short.discard(change.key)
            require(change.label == self.label_of(change.key), "a block is told of under another's label")
            require(handle is not None, f"a {event.type.name} event names a block")
            if handle is not None:
                handle(change, event.cause)

    def label_of(self, key: Key) -> Label | None:
        return hash_of(key) if key in self.short else label_of(key)

    def _stored(self, change: ListingRow, cause: Cause) -> None:
        require(change.key not in self.blocks, "a block is stored twice")
        require(change.residency != 0, "a block is stored nowhere")
        if change.parent is not None and self._chained:
            require(change.parent in self.blocks, "a block is stored before its parent")
            self._children[change.parent] = self._children.get(change.parent, 0) + 1
        above = self.label_of(change.parent) if change.parent is not None and self._chained else None
        require(change.parent_label == above, "a block is told of under another parent's label")
        self.blocks[change.key] = replace(change, parent_label=None)

    def _updated(self, change: ListingRow, cause: Cause) -> None:
        known = self.blocks.get(change.key)
        if known is None:
            raise Violation("an unknown block is updated")
        require(known != change, "an update changes nothing")
        require(known.parent == change.parent, "a block has changed its parent")
        hollow = change.residency == 0 and (cause in LOSSES or known.residency == 0)
        require(change.residency != 0 or hollow, "a block that is nowhere is not reported removed")
        self.blocks[change.key] = change

    def _removed(self, change: ListingRow, cause: Cause) -> None:
        require(change.key in self.blocks, "an unknown block is removed")
        require(change.residency == 0, "a removed block is said to be somewhere")
        require(self._children.get(change.key, 0) == 0, "a block is removed before its children")
        del self.blocks[change.key]
        if change.parent is not None and self._chained:
            self._children[change.parent] -= 1
