"""Slots of one tier of one window group: their states and the free slots.

Every slot is in exactly one state and the states sum to the capacity. A state changes when a move is planned, not when
it starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from enum import IntEnum
from itertools import filterfalse
from typing import Final, cast

from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import SlotId


class SlotState(IntEnum):
    """
    FREE --reserve--> BLANK --commit--> READY;  FREE --copy planned--> FILLING --copy arrived--> READY
    READY, FILLING --demotion, deletion, removal while a copy runs--> RETIRING --> FREE;  RETIRING --hit--> READY
    BLANK, ORPHANED, FILLING, READY --release, failure, removal--> FREE
    BLANK --connection broken--> ORPHANED --re-attached--> BLANK;  any --tier lost, bad disk bytes--> QUARANTINED
    QUARANTINED --disk restored--> FREE;  QUARANTINED --deletion tried again--> RETIRING
    """

    FREE = 0
    BLANK = 1
    """Leased to write."""
    FILLING = 2
    """The destination of a copy."""
    READY = 3
    """Holds a block's bytes."""
    RETIRING = 4
    """Freed when work in flight ends: a demotion of the block, the deletion of a disk record, or a copy that still
    reads or fills the slot of a detached copy."""
    ORPHANED = 5
    """Leased to write by a session whose connection broke while its process lives."""
    QUARANTINED = 6
    """Out of use: its bytes failed verification, the deletion of its record failed, or its tier is out of service."""


SLOT_FREE: Final = SlotState.FREE
SLOT_BLANK: Final = SlotState.BLANK
SLOT_FILLING: Final = SlotState.FILLING
SLOT_READY: Final = SlotState.READY
SLOT_RETIRING: Final = SlotState.RETIRING
SLOT_ORPHANED: Final = SlotState.ORPHANED
SLOT_QUARANTINED: Final = SlotState.QUARANTINED
_STATES: Final = tuple(SlotState)


class SlotTable:
    """Slot states of one tier, without blocks. The slot freed last is taken first; fresh slots are taken from number 0
    up.

    A free slot costs four bytes: a tier may have millions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._states = bytearray(capacity)
        self._free = array("I", range(capacity - 1, -1, -1))
        self._counts = [0] * len(SlotState)
        self._counts[SLOT_FREE] = capacity
        self.taken = 0
        """Number of slots taken since the start."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def retiring(self) -> int:
        return self._counts[SLOT_RETIRING]

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def state(self, slot: SlotId) -> SlotState:
        return _STATES[self._states[slot]]

    def take(self, count: int, state: SlotState) -> list[SlotId]:
        """Takes ``count`` free slots and puts them in ``state``. The caller has checked that they are free."""
        taken = cast("list[SlotId]", self._free[: -count - 1 : -1].tolist())
        del self._free[len(self._free) - count :]
        self._fill(taken, state)
        self.taken += count
        return taken

    def claim(self, slots: Collection[SlotId], state: SlotState) -> None:
        """Puts these free slots in ``state``. Used at start, for slots that are in use already."""
        self._fill(slots, state)
        # FREE is 0, so only the state of a free slot is false.
        self._free = array("I", filterfalse(self._states.__getitem__, self._free))

    def _fill(self, slots: Collection[SlotId], state: SlotState) -> None:
        states = self._states
        for slot in slots:
            if states[slot] != SLOT_FREE:
                raise InvariantViolation(f"slot {slot} is {self.state(slot).name}, not FREE")
            states[slot] = state
        self._counts[SLOT_FREE] -= len(slots)
        self._counts[state] += len(slots)

    def change(self, slot: SlotId, to: SlotState) -> None:
        """Changes the state of a slot, which may be in state ``to`` already; neither state is FREE."""
        was: int = self._states[slot]
        if was == SLOT_FREE or to is SLOT_FREE:
            raise InvariantViolation(f"slot {slot}: {SlotState(was).name} to {to.name} by change()")
        self._move(slot, was, to)

    def give_back(self, slot: SlotId) -> None:
        was: int = self._states[slot]
        if was == SLOT_FREE:
            raise InvariantViolation(f"slot {slot} is freed twice")
        self._move(slot, was, SLOT_FREE)
        self._free.append(slot)

    def shut(self) -> None:
        """Takes every free slot out of use."""
        for slot in self.free_slots():
            self._move(slot, SLOT_FREE, SLOT_QUARANTINED)
        self._free = array("I")

    def reopen(self, bad: Collection[SlotId]) -> None:
        """Puts quarantined slots back in use, except ``bad`` slots."""
        for number in range(self.capacity - 1, -1, -1):
            slot = SlotId(number)
            if self._states[slot] == SLOT_QUARANTINED and slot not in bad:
                self.give_back(slot)

    def snapshot(self) -> bytes:
        """For the checker: the state of every slot."""
        return bytes(self._states)

    def free_slots(self) -> tuple[SlotId, ...]:
        """The free slots; the last is taken next."""
        return tuple(map(SlotId, self._free))

    def _move(self, slot: SlotId, was: int, to: int) -> None:
        """``was``: the slot's present state."""
        self._states[slot] = to
        self._counts[was] -= 1
        self._counts[to] += 1
