"""What one call of the core does to the slots of a group in one tier, collected as it goes."""

from __future__ import annotations

from kvtierd.core.block import Block
from kvtierd.core.ids import GroupId, SessionId, SlotId, Tier
from kvtierd.core.outcome import SlotChanges


class Ledger:
    """Emptied by :meth:`take` at the end of each call. ``touched``: where it puts itself when the first entry is made.

    One of each group and tier: a slot's number alone says there which it is.
    """

    __slots__ = (
        "_begun",
        "_clean",
        "_disowned",
        "_filled",
        "_group",
        "_owners",
        "_restated",
        "_tier",
        "_touched",
    )

    def __init__(self, group: GroupId, tier: Tier, touched: list[Ledger]) -> None:
        self._group = group
        self._tier = tier
        self._touched = touched
        self._reset()

    def _reset(self) -> None:
        self._clean = True
        self._begun: dict[SlotId, None] = {}
        self._filled: dict[SlotId, Block] = {}
        self._disowned: dict[SlotId, None] = {}
        self._restated: dict[SlotId, Block] = {}
        self._owners: dict[SlotId, SessionId | None] = {}

    def _touch(self) -> None:
        if self._clean:
            self._clean = False
            self._touched.append(self)

    def begin_write(self, slot: SlotId) -> None:
        """The slot's bytes are, or are about to be, no block's: its generation is odd until :meth:`end_write`."""
        self._touch()
        if self._filled:
            self._filled.pop(slot, None)
        self._begun[slot] = None

    def free(self, slot: SlotId) -> None:
        """The slot's bytes are no block's, and it is nobody's."""
        self.begin_write(slot)
        self._owners[slot] = None

    def end_write(self, slot: SlotId, block: Block) -> None:
        """The slot's bytes are the block's."""
        self._touch()
        self._filled[slot] = block

    def disown(self, slot: SlotId) -> None:
        """The slot's bytes stand for those who hold or copy them; they are their block's no more."""
        if slot not in self._filled:
            self._touch()
            self._disowned[slot] = None

    def restate(self, slot: SlotId, block: Block) -> None:
        """The slot's bytes are the block's, whose traits have changed."""
        if slot not in self._filled:
            self._touch()
            self._restated[slot] = block

    def owner(self, slot: SlotId, session: SessionId | None) -> None:
        """Who leases the slot; None = nobody."""
        self._touch()
        self._owners[slot] = session

    def take(self) -> SlotChanges:
        """All of it; the ledger is empty again."""
        changes = SlotChanges(
            self._group, self._tier, self._begun, self._filled, self._disowned, self._restated, self._owners
        )
        self._reset()
        return changes
