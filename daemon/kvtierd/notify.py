"""Messages to the service manager, and descriptors from it: sd_notify(3) and sd_listen_fds(3).

The protocol is a dozen documented lines and part of systemd's stable interface. The libraries for it either lack
descriptors (sdnotify) or need systemd's own library to build (systemd-python), and ``kvtierd --supervise`` has to speak
the manager's side, too.

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
"""The first descriptor that a manager passes."""
MAX_FDS: Final = 253
"""Most descriptors in a message, the kernel's limit."""

_SEND_TIMEOUT_S: Final = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class PassedFd:
    """A descriptor in the manager's store. The daemon that it is passed to must close it. ``name``: in the store."""

    name: str
    fd: int


class Notifier:
    """Sends messages to the manager; does nothing without a manager. Any thread; blocks for a second at most."""

    def __init__(self, address: str | None) -> None:
        """``address``: a path, or a name in the abstract namespace behind ``@``; None = no manager."""
        self._address = f"\0{address[1:]}" if address is not None and address.startswith("@") else address
        self._failed = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """Removes the variable, so that no child process speaks for this one."""
        return cls(environment.pop(SOCKET_VARIABLE, None))

    @property
    def listens(self) -> bool:
        """Whether there is a manager, and so a store for descriptors."""
        return self._address is not None

    def ready(self, status: str) -> None:
        """Reports that the start or a reload is complete."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """Reports that a reload begins; :meth:`ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def extend(self, seconds: float) -> None:
        """Asks for ``seconds`` more from now for the present start or stop."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """Feeds the watchdog."""
        self._send("WATCHDOG=1")

    def store(self, name: str, fd: int) -> None:
        """Stores a descriptor beyond the end of this process, under a name without colons."""
        # FDPOLL=0: descriptors leave the store when they are removed, not when a poll reports an event.
        self._send("FDSTORE=1", f"FDNAME={_line(name)}", "FDPOLL=0", fds=[fd])

    def forget(self, name: str) -> None:
        """Removes all descriptors stored under the name."""
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
            reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
            if not self._failed:
                _log.warning("the service manager cannot be told %s error=%r", lines[0], reason)
            self._failed = True


def watchdog_interval_s(environment: MutableMapping[str, str]) -> float | None:
    """Seconds within which the manager expects a watchdog message; None = no watchdog. Removes the variables. Raises
    ValueError if they make no sense."""
    usec, pid = (environment.pop(name, None) for name in WATCHDOG_VARIABLES)
    if usec is None or (pid is not None and int(pid) != os.getpid()):
        return None
    if int(usec) <= 0:
        raise ValueError(f"WATCHDOG_USEC = {usec}: must be above 0")
    return int(usec) / 1e6


def passed_fds(environment: MutableMapping[str, str]) -> tuple[PassedFd, ...]:
    """Descriptors that the manager kept for the daemon, now close-on-exec. Removes the variables. Raises ValueError if
    they make no sense, OSError (EBADF) if a descriptor is not open."""
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
    """Replaces newlines, which would begin another assignment."""
    return text.replace("\n", " ")
