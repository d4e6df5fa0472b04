"""The wall clock, by which durations of retention end and events are stamped."""

from __future__ import annotations

import ctypes
import time
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn

NAME: Final = "clock"
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 256
"""More than ``struct timex`` (208 bytes on 64-bit Linux); all zero, it only asks."""

_NOT_BEFORE: Final = 1_735_689_600
"""2025-01-01: this version did not exist before."""


def read() -> tuple[float, bool | None]:
    """Seconds since the epoch, and whether somebody keeps the clock right (None: the kernel does not say)."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return time.time(), None if state < 0 else state != _TIME_ERROR


def check(now: float, kept: bool | None) -> Finding:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    advice = "timedatectl set-ntp true, or another time service"
    if now < _NOT_BEFORE:
        return fail(NAME, f"{stamp} cannot be", advice)
    if kept is None:
        return warn(NAME, f"{stamp}; the kernel does not say whether it is kept in time", advice)
    if not kept:
        return warn(NAME, f"{stamp}; nothing keeps it in time: deadlines of retention jump with it", advice)
    return ok(NAME, f"{stamp}, kept in time")
