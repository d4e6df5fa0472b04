"""``kvtierd`` with one fault planted: ``python -m tests.integration.faulty_daemon FAULT`` and the daemon's own flags.

For tests that are to find the fault. The daemon does not know: only this process's class is changed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvtierd import supervise
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.main import main
from kvtierd.service import assembly, catalog
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.disk.store import DiskRead, DiskStore, ReadReport


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


def hangs_when_told() -> None:
    """SIGUSR2 stops the event loop for ever; other threads go on."""
    signal.signal(signal.SIGUSR2, lambda *_: threading.Event().wait())


def dies_in_a_resize() -> None:
    """The first call of the function that $KVTIER_DIES names ends in SIGKILL; $KVTIER_DIED is a file that is made."""
    places = {"copy_slot": Arena, "carry": assembly}
    of: object = places.get(name := os.environ["KVTIER_DIES"], catalog)
    function = getattr(of, name)

    def dies(*given: object, **named: object) -> object:
        with suppress(FileExistsError):
            Path(os.environ["KVTIER_DIED"]).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(of, name, dies)
    command = [sys.executable, "-m", "tests.integration.faulty_daemon", "dies_in_a_resize"]
    setattr(supervise, "own_command", lambda arguments: [*command, *arguments])  # noqa: B010  its daemon has the fault, too


def reads_slowly() -> None:
    """The disk gives as many bytes a second as the file says that $KVTIER_DISK_SPEED names."""
    read, turn = DiskStore.read, threading.Lock()

    def slowly(disk: DiskStore, reads: Sequence[DiskRead]) -> ReadReport:
        nbytes = sum(len(part) for each in reads for part in each.parts)
        with turn:
            until = time.monotonic() + nbytes / float(Path(os.environ["KVTIER_DISK_SPEED"]).read_text())
            report = read(disk, reads)
            time.sleep(max(0.0, until - time.monotonic()))
        return report

    setattr(DiskStore, "read", slowly)  # noqa: B010


def _plant(
    begin_writes: Callable[[Arena, Tier, GroupId, Iterable[SlotId]], list[SlotId]],
    end_writes: Callable[[Arena, Tier, GroupId, Iterable[SlotId]], None],
) -> None:
    setattr(Arena, "begin_writes", begin_writes)  # noqa: B010  mypy would have it that a method is for ever
    setattr(Arena, "end_writes", end_writes)  # noqa: B010


def _was_never_used(arena: Arena, tier: Tier, group: GroupId, slot: SlotId) -> bool:
    return arena.generation(tier, group, slot) % 2 == 1


SEEN_BY_READERS: Final = (keeps_the_generation, turns_odd_too_late)
"""With these some reader is given wrong bytes."""
FAULTS: Final[Mapping[str, Callable[[], None]]] = {
    fault.__name__: fault for fault in (*SEEN_BY_READERS, hangs_when_told, dies_in_a_resize, reads_slowly)
}


if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
