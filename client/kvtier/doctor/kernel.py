"""Features of the kernel that tell who a client is and when it is gone."""

from __future__ import annotations

import os
import platform
import socket
import struct
from dataclasses import dataclass
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn

NAME: Final = "kernel"
_SO_PEERPIDFD: Final = 77


@dataclass(slots=True, frozen=True)
class Kernel:
    """``pidfd``, ``peer_credentials``: why not, None = it has them. ``peer_pidfd``: Linux 6.5 and newer."""

    release: str
    pidfd: str | None
    peer_credentials: str | None
    peer_pidfd: bool


def read() -> Kernel:
    return Kernel(platform.release(), _pidfd(), *_peer())


def _pidfd() -> str | None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return str(error)
    return None


def _peer() -> tuple[str | None, bool]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        except OSError as error:
            return str(error), False
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return None, False
        return None, True


def check(kernel: Kernel) -> Finding:
    missing = {"pidfd_open": kernel.pidfd, "SO_PEERCRED": kernel.peer_credentials}
    reasons = [f"{name}: {why}" for name, why in missing.items() if why is not None]
    if reasons:
        advice = "Linux 5.3 or newer, and pidfd_open allowed in the sandbox's seccomp profile"
        return fail(NAME, f"Linux {kernel.release}: {'; '.join(reasons)}", advice)
    if not kernel.peer_pidfd:
        found = f"Linux {kernel.release} has pidfds, but not of a socket's peer: a client is identified by its pid"
        return warn(NAME, found, "Linux 6.5 or newer, where a pid that was reused in between cannot mislead")
    return ok(NAME, f"Linux {kernel.release}: pidfds, and those of a socket's peer")
