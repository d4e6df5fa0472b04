"""``kvtierd --supervise``: what keeps the descriptors where there is no systemd.

A small parent process that starts the daemon, holds what the daemon stores with it, and starts it again after a crash.
It is a service manager as far as the daemon can tell: it listens to sd_notify(3) messages on a socket of its own and
passes descriptors back by ``LISTEN_FDS``, so the daemon has one code path for both.

SIGTERM and SIGINT stop the daemon, then the supervisor; SIGHUP is passed on; SIGUSR2 stops the daemon cleanly and
starts it again, from what is installed by then: an upgrade that keeps the memory tiers.
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
from dataclasses import dataclass
from typing import Final, NoReturn

from kvtierd.notify import FIRST_FD, MAX_FDS, SOCKET_VARIABLE

MAX_STORED: Final = 4096
"""Descriptors, as many as systemd/kvtierd.service lets the daemon store."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 10.0
"""A daemon that ran so long before it died is started again after the first pause, not after a longer one."""
NOT_AGAIN: Final = frozenset({0, 2})
"""Exit statuses after which the daemon is not started again: it was asked to stop, or its configuration is refused."""

PENDING_AT_START: Final = (signal.SIGHUP,)
"""Blocked in a daemon until it has a handler for them: one that comes before would end it."""

_MESSAGE_BYTES: Final = 65536
_UCRED: Final = struct.Struct("iII")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * MAX_FDS) + socket.CMSG_SPACE(_UCRED.size)
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Stored:
    name: str
    fd: int


class Store:
    """Descriptors under names; the same one is kept once."""

    def __init__(self) -> None:
        self.kept: list[Stored] = []

    def add(self, name: str, fds: Sequence[int]) -> None:
        """``fds`` are the store's from now on."""
        known = {(stored.name, _file_of(stored.fd)) for stored in self.kept}
        for fd in fds:
            if (name, _file_of(fd)) in known or len(self.kept) >= MAX_STORED:
                os.close(fd)
            else:
                self.kept.append(Stored(name, fd))

    def remove(self, name: str) -> None:
        for stored in self.kept:
            if stored.name == name:
                os.close(stored.fd)
        self.kept = [stored for stored in self.kept if stored.name != name]

    def close(self) -> None:
        for name in {stored.name for stored in self.kept}:
            self.remove(name)


class NotifyListener:
    """The manager's end of the notify socket, with a name that the kernel chose. Believes the daemon alone."""

    def __init__(self, store: Store) -> None:
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
        """Everything that has come so far."""
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
    """Runs ``command`` until it is not to be started again. Returns its last exit status, as a shell would."""
    store = Store()
    try:
        return asyncio.run(_Supervisor(command, store).run())
    finally:
        store.close()


class _Supervisor:
    def __init__(self, command: Sequence[str], store: Store) -> None:
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
                if await self._stopped_within(pause_s):
                    return status
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._listener.close()

    async def _run_once(self) -> int:
        """One life of the daemon: its exit status, 128 and the signal's number if that ended it."""
        environment = os.environ | {SOCKET_VARIABLE: self._listener.address}
        self._listener.pid = pid = _spawn(self._command, environment, self._store.kept)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
            self._listener.hear()  # what it stored last counts
        finally:
            self._listener.pid = 0
            loop.remove_reader(pidfd)
            os.close(pidfd)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  it has ended
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    def _ask_to_stop(self) -> None:
        self._stop.set()
        self._pass_on(signal.SIGTERM)

    def _ask_to_restart(self) -> None:
        self._restart = self._listener.pid != 0
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        if self._listener.pid:
            os.kill(self._listener.pid, number)


def _spawn(command: Sequence[str], environment: Mapping[str, str], stored: Sequence[Stored]) -> int:
    """Starts the daemon with the stored descriptors from ``FIRST_FD`` on, and in no other place."""
    supervisor = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PENDING_AT_START)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a daemon without its supervisor would be started twice
        if os.getppid() != supervisor:
            os._exit(1)
        _exec(command, environment, stored)
    except BaseException as error:  # noqa: BLE001  two of us must never run on
        os.write(2, f"kvtierd: cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _exec(command: Sequence[str], environment: Mapping[str, str], stored: Sequence[Stored]) -> NoReturn:
    above = FIRST_FD + len(stored)
    # First out of the way of each other, then into place: a place may be another's present number.
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


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def own_command(arguments: Sequence[str]) -> list[str]:
    """What starts a daemon as this one was started, with these arguments."""
    return [sys.executable, "-m", "kvtierd.main", *arguments]
