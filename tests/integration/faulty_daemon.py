"""``kvtierd`` with one fault planted: ``python -m tests.integration.faulty_daemon FAULT`` and the daemon's own flags.

For tests that are to find the fault. The daemon does not know: only this process's class is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Final

from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.main import main
from kvtierd.tiers.arena import Arena

Change = Callable[[Arena, Tier, GroupId, SlotId], None]


def keeps_the_generation() -> None:
    """A slot that is used again keeps the generation that it had for the block before."""
    begin, end = Arena.begin_write, Arena.end_write

    def begin_write(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> None:
        if _was_never_used(arena, tier, group, slot):
            begin(arena, tier, group, slot)

    def end_write(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> None:
        if _was_never_used(arena, tier, group, slot):
            end(arena, tier, group, slot)

    _plant(begin_write, end_write)


def turns_odd_too_late() -> None:
    """A slot is written while its generation is still that of the block before; it changes when all is written."""
    begin, end = Arena.begin_write, Arena.end_write

    def begin_write(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> None:
        """Not yet."""

    def end_write(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> None:
        begin(arena, tier, group, slot)
        end(arena, tier, group, slot)

    _plant(begin_write, end_write)


def _plant(begin_write: Change, end_write: Change) -> None:
    setattr(Arena, "begin_write", begin_write)  # noqa: B010  mypy would have it that a method is for ever
    setattr(Arena, "end_write", end_write)  # noqa: B010


def _was_never_used(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> bool:
    return arena.generation(tier, group, slot) % 2 == 1


FAULTS: Final[Mapping[str, Callable[[], None]]] = {
    fault.__name__: fault for fault in (keeps_the_generation, turns_odd_too_late)
}


if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
