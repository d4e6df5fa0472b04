"""``kvtierd --supervise``: keeps the daemon's descriptors without systemd.

The supervisor, a small parent process, starts the daemon, holds the descriptors that the daemon stores, and starts the
daemon again after a crash. The daemon sees a service manager: the supervisor listens to sd_notify(3) messages on a
socket and passes descriptors back by ``LISTEN_FDS``, so the daemon has one code path for both.

SIGTERM and SIGINT stop the daemon, then the supervisor. SIGHUP is passed on. SIGUSR2 stops the daemon cleanly and
starts the version installed by then: an upgrade that keeps the memory tiers.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from kvtierd.notify import FIRST_FD, MAX_FDS, SOCKET_VARIABLE, PassedFd

MAX_STORED: Final = 4096
"""Most descriptors in the store, as in systemd/kvtierd.service."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 10.0
"""A daemon that ran this long before it died is started again after the first pause."""
NOT_AGAIN: Final = frozenset({0, 2})
"""Exit statuses that end the supervisor, too: the daemon was asked to stop, or its configuration is refused."""

PENDING_AT_START: Final = (signal.SIGHUP,)
"""Signals blocked in a daemon until it has handlers: an earlier signal would end the daemon."""

_MESSAGE_BYTES: Final = 65536
_UCRED: Final = struct.Struct("iII")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * MAX_FDS) + socket.CMSG_SPACE(_UCRED.size)
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger(__name__)


class DescriptorStore:
    """Descriptors under names."""

    def __init__(self) -> None:
        self.kept: list[PassedFd] = []

    def add(self, name: str, fds: Sequence[int]) -> None:
        """Takes ownership of ``fds``."""
        room = MAX_STORED - len(self.kept)
        self.kept += [PassedFd(name, fd) for fd in fds[:room]]
        _close_all(fds[room:])

    def remove(self, name: str) -> None:
        for stored in self.kept:
            if stored.name == name:
                os.close(stored.fd)
        self.kept = [stored for stored in self.kept if stored.name != name]

    def close(self) -> None:
        for name in {stored.name for stored in self.kept}:
            self.remove(name)


class NotifyListener:
    """The manager's end of the notify socket, whose name the kernel chose. Obeys only the daemon's messages."""

    def __init__(self, store: DescriptorStore) -> None:
        self._store: Final = store
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._sock: Final = socket.socket(socket.AF_UNIX, kind)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.bind("")
        self.pid = 0

    @property
    def address(self) -> str:
        name: bytes = self._sock.getsockname()
        return "@" + name[1:].decode()

    def fileno(self) -> int:
        return self._sock.fileno()

    def hear(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            fds, pid = _unpacked(ancillary)
            if pid == self.pid:
                self._obey(data, fds)
            else:
                _close_all(fds)

    def _obey(self, data: bytes, fds: Sequence[int]) -> None:
        fields = dict(line.split("=", 1) for line in data.decode(errors="replace").splitlines() if "=" in line)
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            self._store.add(name, fds)
            return
        _close_all(fds)
        if fields.get("FDSTOREREMOVE") == "1":
            self._store.remove(name)

    def close(self) -> None:
        self._sock.close()


def supervise(command: Sequence[str]) -> int:
    """Runs ``command``, again after each crash. Returns its last exit status, as a shell would."""
    store = DescriptorStore()
    try:
        return asyncio.run(_Supervisor(command, store).run())
    finally:
        store.close()


class _Supervisor:
    def __init__(self, command: Sequence[str], store: DescriptorStore) -> None:
        self._command: Final = list(command)
        self._store: Final = store
        self._listener: Final = NotifyListener(store)
        self._stop: Final = asyncio.Event()
        self._restart = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._listener.hear)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        loop.add_signal_handler(signal.SIGUSR2, self._ask_to_restart)
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                began = loop.time()
                status = await self._run_once()
                again, self._restart = self._restart, False
                if self._stop.is_set() or (status in NOT_AGAIN and not again):
                    return status
                if again:
                    continue
                pause_s = FIRST_PAUSE_S if loop.time() - began >= STEADY_S else pause_s
                _log.error("the daemon died status=%d kept=%d again_in=%.1f", status, len(self._store.kept), pause_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), pause_s)
                    return status
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._listener.close()

    async def _run_once(self) -> int:
        """Runs the daemon once. Returns its exit status, or 128 plus the number of the signal that ended it."""
        environment = os.environ | {SOCKET_VARIABLE: self._listener.address}
        self._listener.pid = pid = _spawn(self._command, environment, self._store.kept)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
            self._listener.hear()  # the daemon's last messages count, too
        finally:
            self._listener.pid = 0
            loop.remove_reader(pidfd)
            os.close(pidfd)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  it has ended
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _ask_to_stop(self) -> None:
        self._stop.set()
        self._pass_on(signal.SIGTERM)

    def _ask_to_restart(self) -> None:
        self._restart = self._listener.pid != 0
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        if self._listener.pid:
            os.kill(self._listener.pid, number)


def _spawn(command: Sequence[str], environment: Mapping[str, str], stored: Sequence[PassedFd]) -> int:
    """Starts the daemon with the stored descriptors at ``FIRST_FD`` and above, and nowhere else."""
    supervisor = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PENDING_AT_START)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # else a new supervisor would start a second daemon
        if os.getppid() != supervisor:
            os._exit(1)
        _exec(command, environment, stored)
    except BaseException as error:  # noqa: BLE001  the forked child must never run on
        os.write(2, f"kvtierd: cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _exec(command: Sequence[str], environment: Mapping[str, str], stored: Sequence[PassedFd]) -> NoReturn:
    above = FIRST_FD + len(stored)
    # First move all out of the way, then into place: a place may be the present number of another descriptor.
    moved = [fcntl.fcntl(one.fd, fcntl.F_DUPFD_CLOEXEC, above) for one in stored]
    for place, fd in enumerate(moved, FIRST_FD):
        os.dup2(fd, place, inheritable=True)
    variables = dict(environment)
    if stored:
        names = ":".join(one.name for one in stored)
        variables |= {"LISTEN_FDS": str(len(stored)), "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": names}
    signal.pthread_sigmask(signal.SIG_SETMASK, PENDING_AT_START)
    os.execve(command[0], list(command), variables)


def _unpacked(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[list[int], int]:
    """Descriptors and the sender's pid."""
    fds, pid = array.array("i"), 0
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, _, _ = _UCRED.unpack(data)
    return fds.tolist(), pid


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts a daemon with the same interpreter and these arguments."""
    return [sys.executable, "-m", "kvtierd.main", *arguments]
