"""A real ``kvtierd`` process on directories of its own, asked on its way out whether all was well."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvtier import Tier
from kvtier.abi.attach import ATTACH_SOCKET, RPC_SOCKET
from tests import devices
from tests.integration.waiting import PATIENCE_S, halt

STOP_S = 40.0
_TROUBLE = ("Traceback", "level=error", "level=critical")


class StartDaemon(Protocol):
    """Lends a daemon with tiers of so many slots for the test; see :class:`tests.integration.pool.DaemonPool`."""

    def __call__(self, *flags: str, device: int = 0, host: int = 0, disk: int = 0) -> DaemonProcess: ...


class DaemonProcess:
    """Runs ``kvtierd`` with state, disk tier and sockets below ``home``, whose path must be short, and
    with the device tier that :mod:`tests.devices` says.

    Start, stop and kill it as often as you like: the directories stay. Blocking, so that plain tests can use it, too.
    """

    def __init__(self, home: Path, sizes: Mapping[Tier, int], flags: Sequence[str] = ()) -> None:
        """``sizes``: bytes by tier; absent = the daemon does not have it. ``flags``: more of the command line."""
        self.home = home
        self.sizes = dict(sizes)
        self.flags = list(flags)
        self.device = devices.NAME
        """What the device tier is on."""
        self.variables: dict[str, str] = {}
        """Of its environment, besides this process's, of which nothing that configures a daemon is passed on."""
        self.program = ["kvtierd.main"]
        """The module that is run, and arguments before all flags."""
        self.within: list[str] = []
        """A command that becomes the daemon, which its last arguments start."""
        self.number: int | None = None
        """Its pid as it sees it itself, where :attr:`within` gives it a pid namespace of its own."""
        self.disturbed = False
        """A test has stopped, killed or paused it, or asked it to end."""
        self._log_from = 0
        self.tcp_address = ""
        """Where it listens, as it said; empty where it does not."""
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
        """What it wrote to standard error since :meth:`forget_log`."""
        if not self._log_file.exists():
            return ""
        return self._log_file.read_bytes()[self._log_from :].decode(errors="replace")

    def forget_log(self) -> None:
        """What it wrote so far belongs to an earlier test."""
        self._log_from = self._log_file.stat().st_size

    def command(self) -> list[str]:
        """What runs it, in the foreground."""
        return [
            *self.within,
            *(sys.executable, "-m", *self.program),
            *("--runtime-dir", self.address),
            *("--state-dir", str(self.state_dir)),
            *("--disk-dir", str(self.disk_dir)),
            *("--default-budget", "100%", "--max-reserved-fraction", "1"),  # so that a test says its sizes once
            *(part for tier, size in self.sizes.items() for part in self._sized(tier, size)),
            *self.flags,
        ]

    def _sized(self, tier: Tier, size: int) -> tuple[str, str]:
        return ("--device", f"{self.device}={size}") if tier is Tier.DEVICE else (f"--{tier}-bytes", str(size))

    def start(self) -> None:
        """Returns once it serves."""
        assert not self.running, "the daemon runs already"
        environment = devices.of_daemon(os.environ)
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, env=environment | self.variables, text=True
            )
        line = self._first_line(self._process)
        said, _, tcp = line.rstrip("\n").partition(" tcp=")
        wanted = f"kvtierd ready pid={self.number or self.pid} address={self.address}"
        if said != wanted:  # what is left of it would be told of as another test's
            self.kill()
        assert said == wanted, f"{line!r}\n{self.log}"
        self.tcp_address = tcp

    def terminate(self) -> None:
        """Asks for a clean stop and does not wait for it."""
        assert self._process is not None
        self.disturbed = True
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, and its end awaited."""
        assert self._process is not None
        self.disturbed = True
        self._process.kill()
        self._reap(self._process)

    def ended(self) -> int:
        """Waits for an end that was asked for; its exit status, negative for a signal."""
        assert self._process is not None
        process = self._process
        try:
            return process.wait(STOP_S)
        finally:
            process.kill()
            self._reap(process)

    def pause(self) -> None:
        """Returns when it has stopped."""
        self.disturbed = True
        halt(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """A clean stop: exit status 0, no error in the log, no socket left behind. Nothing, if it does not run."""
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

    def restart(self) -> None:
        """A clean stop, and a start."""
        self.stop()
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
