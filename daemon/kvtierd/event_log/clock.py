"""The clock by which logged events age: it runs while the log exists, never backwards, and no wall clock moves it."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from uuid import UUID

_STORED: Final = struct.Struct("<QQQ16s")
"""The log's clock, CLOCK_BOOTTIME, the wall clock (all ns), the system's boot id."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True, frozen=True)
class Clocks:
    """What the system has of time. ``boot_ns`` also counts while it sleeps; ``boot_id`` says since when."""

    boot_ns: Callable[[], int]
    wall_ns: Callable[[], int]
    boot_id: bytes

    @classmethod
    def of_system(cls) -> Self:
        """Where a sandbox hides which boot this is, all are taken for the same one: events may be kept longer."""
        try:
            boot_id = UUID(_BOOT_ID.read_text().strip()).bytes
        except OSError:
            boot_id = bytes(16)
        return cls(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns, boot_id)


class LogClock:
    """Nanoseconds that the log has lived, as far as can be told.

    While the system runs its own clock is counted, whatever becomes of the wall clock. Over a reboot only the wall
    clock knows, and is believed if it has gone forward.
    """

    def __init__(self, clocks: Clocks, stored: bytes | None = None) -> None:
        self._clocks: Final = clocks
        self._offset = -clocks.boot_ns()
        if stored is not None:
            self._offset += _now_after(clocks, stored)

    def now(self) -> int:
        return max(0, self._offset + self._clocks.boot_ns())

    def to_stored(self) -> bytes:
        return _STORED.pack(self.now(), self._clocks.boot_ns(), self._clocks.wall_ns(), self._clocks.boot_id)


def _now_after(clocks: Clocks, stored: bytes) -> int:
    log_ns, boot_ns, wall_ns, boot_id = _STORED.unpack(stored)
    away_ns = clocks.boot_ns() - boot_ns if boot_id == clocks.boot_id else clocks.wall_ns() - wall_ns
    return int(log_ns + max(0, away_ns))
