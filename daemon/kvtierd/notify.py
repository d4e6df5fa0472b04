"""What the daemon tells its service manager, and what it was given by it: sd_notify(3) and sd_listen_fds(3).

The protocol is a dozen documented lines and part of systemd's stable interface. The libraries for it either lack
descriptors (sdnotify) or need systemd's own library to build (systemd-python), and ``kvtierd --supervise`` has to speak
the other side of it as well.

Messages are best effort: a manager that does not listen is logged once and never stops the daemon.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
WATCHDOG_VARIABLES: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")
LISTEN_VARIABLES: Final = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
FIRST_FD: Final = 3
"""Descriptors that a manager passes begin here."""
MAX_FDS: Final = 253
"""In one message, the kernel's limit."""

_SEND_TIMEOUT_S: Final = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class PassedFd:
    """A descriptor out of the manager's store, ours to close. ``name``: the one it was stored under."""

    name: str
    fd: int


class Notifier:
    """Tells the manager. Every method does nothing where there is none. Any thread; blocks for a second at most."""

    def __init__(self, address: str | None) -> None:
        """``address``: a path, or a name in the abstract namespace behind ``@``; None: nobody listens."""
        self._address = f"\0{address[1:]}" if address is not None and address.startswith("@") else address
        self._failed = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """Takes the variable away, so that no child speaks for this process."""
        return cls(environment.pop(SOCKET_VARIABLE, None))

    @property
    def listens(self) -> bool:
        """Whether there is a manager, and with it a store for descriptors."""
        return self._address is not None

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is complete."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """A reload begins; :meth:`ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def extend(self, seconds: float) -> None:
        """What goes on now (a start, a stop) may take so much longer from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """Feeds the watchdog."""
        self._send("WATCHDOG=1")

    def store(self, name: str, fds: Sequence[int]) -> None:
        """Keeps descriptors beyond the end of this process, under one name without colons."""
        for first in range(0, len(fds), MAX_FDS):
            # FDPOLL=0: descriptors leave the store when they are removed, not when a poll of them says anything.
            self._send("FDSTORE=1", f"FDNAME={_line(name)}", "FDPOLL=0", fds=fds[first : first + MAX_FDS])

    def forget(self, name: str) -> None:
        """Ends the keeping of all descriptors stored under the name."""
        self._send("FDSTOREREMOVE=1", f"FDNAME={_line(name)}")

    def _send(self, *lines: str, fds: Sequence[int] = ()) -> None:
        if self._address is None:
            return
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_SEND_TIMEOUT_S)
                sock.sendmsg(["\n".join(lines).encode()], ancillary, 0, self._address)
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.warning("the service manager cannot be told %s error=%r", lines[0], _reason(error))
            self._failed = True


def watchdog_interval_s(environment: MutableMapping[str, str]) -> float | None:
    """Seconds within which the manager wants to be told that all is well; None: it does not care. Takes the variables
    away. Raises ValueError where they make no sense."""
    usec, pid = (environment.pop(name, None) for name in WATCHDOG_VARIABLES)
    if usec is None or (pid is not None and int(pid) != os.getpid()):
        return None
    if int(usec) <= 0:
        raise ValueError(f"WATCHDOG_USEC = {usec}: must be above 0")
    return int(usec) / 1e6


def passed_fds(environment: MutableMapping[str, str]) -> tuple[PassedFd, ...]:
    """Descriptors that the manager kept for us, now close-on-exec. Takes the variables away.

    Raises ValueError where they make no sense, OSError (EBADF) where a descriptor is not open.
    """
    count, pid, names = (environment.pop(name, None) for name in LISTEN_VARIABLES)
    if count is None or (pid is not None and int(pid) != os.getpid()):
        return ()
    fds = range(FIRST_FD, FIRST_FD + int(count))
    given = names.split(":") if names else ["unknown"] * len(fds)
    if len(given) != len(fds):
        raise ValueError(f"LISTEN_FDNAMES has {len(given)} names for {len(fds)} descriptors")
    for fd in fds:
        os.set_inheritable(fd, False)
    return tuple(PassedFd(name, fd) for name, fd in zip(given, fds, strict=True))


def _line(text: str) -> str:
    """A newline would begin another assignment."""
    return text.replace("\n", " ")


def _reason(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
