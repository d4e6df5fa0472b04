"""Limits of a process: locked memory and file descriptors."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn
from kvtier.words import size

DESCRIPTORS_PER_SESSION: Final = 4
"""Its connection, its line for commits, its gRPC connection and its pidfd."""
DESCRIPTORS_BESIDES: Final = 256
"""For caches (13 each), the event log and the sockets."""

_LINE: Final = re.compile(r"^(Max locked memory|Max open files)\s+\S+\s+(\S+)", re.MULTILINE)
_DROP_IN: Final = "systemctl edit kvtierd, [Service]"


@dataclass(slots=True, frozen=True)
class Limits:
    """Hard limits, None = none. ``whose``: the process they are of, in words."""

    whose: str
    memlock: int | None
    descriptors: int | None


def parse(text: str, whose: str) -> Limits:
    """Of ``/proc/<pid>/limits``. Raises KeyError where it does not say."""
    found = {name: None if value == "unlimited" else int(value) for name, value in _LINE.findall(text)}
    return Limits(whose, found["Max locked memory"], found["Max open files"])


def read(daemon: int | None) -> Limits:
    """The daemon's where it runs and we may see them, else our own: a shell's, not those that a service would get."""
    if daemon is not None:
        try:
            return parse(Path(f"/proc/{daemon}/limits").read_text(), f"kvtierd, pid {daemon}")
        except OSError:
            return _own(f"this shell (those of pid {daemon} are hidden: run as root or as the daemon's user)")
    return _own("this shell (a service has those of its unit)")


def _own(whose: str) -> Limits:
    memlock, files = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    return Limits(whose, *(None if limit == resource.RLIM_INFINITY else limit for limit in (memlock, files)))


def check_memlock(limits: Limits, needed: int) -> Finding:
    """``needed``: bytes of the tiers that live in memory."""
    name = "locked memory"
    if limits.memlock is None or limits.memlock >= needed:
        limit = "unlimited" if limits.memlock is None else size(limits.memlock)
        return ok(name, f"{limit} for {limits.whose}; {size(needed)} are configured")
    short = f"less than the {size(needed)} of the tiers in memory: they cannot be locked and may be swapped out"
    by_hand = "without systemd: /etc/security/limits.d/kvtier.conf, '* - memlock unlimited'"
    return warn(
        name,
        f"{size(limits.memlock)} for {limits.whose}, {short}",
        f"{_DROP_IN}: LimitMEMLOCK=infinity; {by_hand}",
    )


def check_descriptors(limits: Limits, max_sessions: int) -> Finding:
    name = "file descriptors"
    needed = max_sessions * DESCRIPTORS_PER_SESSION + DESCRIPTORS_BESIDES
    if limits.descriptors is None or limits.descriptors >= needed:
        return ok(name, f"{limits.descriptors or 'unlimited'} for {limits.whose}; {needed} are enough")
    sessions = max(0, (limits.descriptors - DESCRIPTORS_BESIDES) // DESCRIPTORS_PER_SESSION)
    found = f"{limits.descriptors} for {limits.whose}: enough for {sessions} sessions, max_sessions is {max_sessions}"
    advice = f"{_DROP_IN}: LimitNOFILE={max(needed, 65536)}; without systemd: ulimit -Hn, or a smaller max_sessions"
    return (warn if sessions > 0 else fail)(name, found, advice)
