"""``kvtierd`` with one fault planted: ``python -m tests.integration.faulty_daemon FAULT`` and the daemon's own flags.

For tests that are to find the fault. The daemon does not know: only this process's class is changed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.event_log import EventLog, LoggedRun
from kvtierd.main import main
from kvtierd.service.daemon import Daemon
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes, TierIOError
from kvtierd.tiers.device import StandInDevice
from kvtierd.tiers.mapped import MappedStore
from kvtierd.tiers.parts import Part

HOLD_S: Final = 0.005


def keeps_the_generation() -> None:
    """A slot that is used again keeps the generation that it had for the block before."""
    begin, end = Arena.begin_writes, Arena.end_writes

    def begin_writes(arena: Arena, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> list[SlotId]:
        return begin(arena, tier, group, [slot for slot in slots if _was_never_used(arena, tier, group, slot)])

    def end_writes(arena: Arena, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> None:
        end(arena, tier, group, [slot for slot in slots if _was_never_used(arena, tier, group, slot)])

    _plant(begin_writes, end_writes)


def turns_odd_too_late() -> None:
    """A slot is written while its generation is still that of the block before; it changes when all is written."""
    begin, end = Arena.begin_writes, Arena.end_writes

    def begin_writes(arena: Arena, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> list[SlotId]:
        return []  # not yet

    def end_writes(arena: Arena, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> None:
        begin(arena, tier, group, slots := list(slots))
        end(arena, tier, group, slots)

    _plant(begin_writes, end_writes)


def _plant(
    begin_writes: Callable[[Arena, Tier, GroupId, Iterable[SlotId]], list[SlotId]],
    end_writes: Callable[[Arena, Tier, GroupId, Iterable[SlotId]], None],
) -> None:
    setattr(Arena, "begin_writes", begin_writes)  # noqa: B010  mypy would have it that a method is for ever
    setattr(Arena, "end_writes", end_writes)  # noqa: B010


def _was_never_used(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> bool:
    return arena.generation(tier, group, slot) % 2 == 1


class _LosableDevice:
    """Of a daemon whose device tier is a stand-in. It does what a file says: nothing of note while there is none."""

    def __init__(self, orders: Path) -> None:
        self._orders = orders
        self._found_out = threading.Lock()
        self._tell: Callable[[], None] | None = None
        self.lost: str | None = None

    def on_loss(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def memory(self) -> tuple[int, int]:
        if self._ordered("lose"):
            with self._found_out:
                if self.lost is None and self._tell is not None:
                    self.lost = "the test has lost it"
                    self._tell()
            raise TierIOError(0, "the test has lost it")
        return 0, 0

    def copy(self) -> None:
        """Before each."""
        while self._ordered("hold"):
            time.sleep(HOLD_S)
        self.memory()

    def _ordered(self, what: str) -> bool:
        return self._orders.exists() and self._orders.read_text() == what


def loses_its_device() -> None:
    """When the file that ``KVTIER_TEST_ORDERS`` names says ``lose``: no copy to or from it works any more, and an idle
    probe finds out. While it says ``hold``, copies do not get on."""
    device = _LosableDevice(Path(os.environ["KVTIER_TEST_ORDERS"]))
    watch, pools = Daemon._watch_device, MappedStore.pool_array

    def padded_parts(store: StandInDevice, group: GroupId, slot: SlotId) -> Sequence[Part]:
        device.copy()
        return MappedStore.padded_parts(store, group, slot)

    def pool_array(store: StandInDevice, group: GroupId, pool: int) -> Bytes:
        device.copy()
        return pools(store, group, pool)

    setattr(Daemon, "_watch_device", lambda daemon, _: watch(daemon, device))  # noqa: B010
    for method in (padded_parts, pool_array):
        setattr(StandInDevice, method.__name__, method)


def fails_to_log_events() -> None:
    """No run of events can be handed to the log."""

    def offer(log: EventLog, run: LoggedRun) -> None:
        raise RuntimeError("the test's fault")

    setattr(EventLog, "offer", offer)  # noqa: B010


SEEN_BY_READERS: Final = (keeps_the_generation, turns_odd_too_late)
"""With these some reader is given wrong bytes."""
FAULTS: Final[Mapping[str, Callable[[], None]]] = {
    fault.__name__: fault for fault in (*SEEN_BY_READERS, loses_its_device, fails_to_log_events)
}


if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
