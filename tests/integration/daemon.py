"""A real ``kvtierd`` process on directories of its own, whose log and exit status are checked when it stops."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

from kvtier import Tier
from kvtier.abi.attach import ATTACH_SOCKET, RPC_SOCKET
from tests import devices
from tests.integration.waiting import PATIENCE_S, halt

STOP_S = 40.0
_TROUBLE = ("Traceback", "level=error", "level=critical")


class StartDaemon(Protocol):
    """Lends a test a daemon with this many slots per tier; see :class:`tests.integration.pool.DaemonPool`."""

    def __call__(self, *flags: str, device: int = 0, host: int = 0, disk: int = 0) -> DaemonProcess: ...


class DaemonProcess:
    """Runs ``kvtierd`` with state, disk tier and sockets below ``home``, whose path must be short, and with the device
    tier of :mod:`tests.devices`.

    A test may start, stop and kill it repeatedly: the directories stay. Blocking, so that plain tests can use it, too.
    """

    def __init__(self, home: Path, sizes: Mapping[Tier, int], flags: Sequence[str] = ()) -> None:
        """``sizes``: bytes by tier; absent = no such tier. ``flags``: further options of the command line."""
        self.home = home
        self.sizes = dict(sizes)
        self.flags = list(flags)
        self.device = devices.NAME
        """The device of the device tier."""
        self.variables: dict[str, str] = {}
        """Variables that are added to its environment. Variables of this process that configure a daemon are
        removed."""
        self.program = ["kvtierd.main"]
        """The module to run, and arguments before all flags."""
        self.within: list[str] = []
        """A command before the daemon's own, which it executes."""
        self.number: int | None = None
        """Its pid in its own pid namespace, if :attr:`within` makes one."""
        self.disturbed = False
        """Whether a test has stopped, killed or paused the daemon, or asked it to end."""
        self._log_from = 0
        self.tcp_address = ""
        """The TCP address that the daemon prints; empty without TCP."""
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return str(self.home / "run")

    @property
    def disk_dir(self) -> Path:
        return self.home / "disk"

    @property
    def state_dir(self) -> Path:
        return self.home / "state"

    @property
    def sockets(self) -> tuple[Path, Path]:
        return Path(self.address, RPC_SOCKET), Path(self.address, ATTACH_SOCKET)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The daemon's standard error since :meth:`forget_log`."""
        if not self._log_file.exists():
            return ""
        return self._log_file.read_bytes()[self._log_from :].decode(errors="replace")

    def forget_log(self) -> None:
        """Leaves the present contents out of :attr:`log`: they belong to an earlier test."""
        self._log_from = self._log_file.stat().st_size

    def command(self) -> list[str]:
        """Returns the command that runs the daemon in the foreground."""
        return [
            *self.within,
            *(sys.executable, "-m", *self.program),
            *("--runtime-dir", self.address),
            *("--state-dir", str(self.state_dir)),
            *("--disk-dir", str(self.disk_dir)),
            *("--default-budget", "100%", "--max-reserved-fraction", "1"),  # a test gives its sizes once
            *(part for tier, size in self.sizes.items() for part in self._sized(tier, size)),
            *self.flags,
        ]

    def _sized(self, tier: Tier, size: int) -> tuple[str, str]:
        return ("--device", f"{self.device}={size}") if tier is Tier.DEVICE else (f"--{tier}-bytes", str(size))

    def start(self) -> None:
        """Starts the daemon, and waits until it serves."""
        assert not self.running, "the daemon runs already"
        environment = devices.of_daemon(os.environ)
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, env=environment | self.variables, text=True
            )
        line = self._first_line(self._process)
        said, _, tcp = line.rstrip("\n").partition(" tcp=")
        wanted = f"kvtierd ready pid={self.number or self.pid} address={self.address}"
        if said != wanted:  # a daemon left running would be reported by another test
            self.kill()
        assert said == wanted, f"{line!r}\n{self.log}"
        self.tcp_address = tcp

    def terminate(self) -> None:
        """Asks for a clean stop, without waiting for it."""
        assert self._process is not None
        self.disturbed = True
        self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the daemon's end."""
        assert self._process is not None
        self.disturbed = True
        self._process.kill()
        self._reap(self._process)

    def ended(self) -> int:
        """Waits for an end that was asked for. Returns the exit status, negative for a signal."""
        assert self._process is not None
        process = self._process
        try:
            return process.wait(STOP_S)
        finally:
            process.kill()
            self._reap(process)

    def pause(self) -> None:
        """Pauses the process, and waits until it has stopped."""
        self.disturbed = True
        halt(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def stop(self) -> None:
        """Stops a started daemon, and checks exit status 0, a log without errors, and that no socket is left."""
        if self._process is None:
            return
        self.disturbed = True
        process, died = self._process, self._process.poll()
        try:
            assert died is None, f"the daemon died by itself, status {died}\n{self.log}"
            process.terminate()
            status = process.wait(STOP_S)
        finally:
            process.kill()
            self._reap(process)
        assert status == 0, f"exit status {status}\n{self.log}"
        self.assert_healthy_log()
        left = [path for path in self.sockets if path.exists()]
        assert not left, f"left behind: {left}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()

    def restart(self) -> None:
        """Stops the daemon as :meth:`stop`, and starts it."""
        self.stop()
        self.start()

    def crash(self) -> None:
        """Kills the daemon, and starts it."""
        self.kill()
        self.start()

    def assert_healthy_log(self) -> None:
        trouble = [line for line in self.log.splitlines() if any(word in line for word in _TROUBLE)]
        assert not trouble, self.log

    @property
    def _log_file(self) -> Path:
        return self.home / "kvtierd.log"

    def _first_line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S * 3)
        return process.stdout.readline() if readable else "(nothing)"

    def _reap(self, process: subprocess.Popen[str]) -> None:
        process.wait(PATIENCE_S)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
