"""``kvtierd --supervise``: a daemon that is killed and upgraded under its supervisor."""

import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

from kvtier import Tier
from tests.integration.daemon import STOP_S, DaemonProcess
from tests.integration.starting import environment
from tests.integration.waiting import PATIENCE_S


class SupervisedDaemon:
    """Below ``home``, as :class:`DaemonProcess`. ``pid`` is the present daemon's, :attr:`supervisor` its parent's."""

    def __init__(self, home: Path, sizes: Mapping[Tier, int], flags: Sequence[str] = ()) -> None:
        self.plain = DaemonProcess(home, sizes, ["--supervise", *flags])
        self.pid = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return self.plain.address

    @property
    def log(self) -> str:
        return self.plain.log

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.plain.home / "kvtierd.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.plain.command(),
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(self.plain.variables),
                text=True,
            )
        self.await_ready()

    def await_ready(self) -> None:
        """Until the next daemon serves."""
        assert self._process is not None and self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S * 3)
        line = self._process.stdout.readline() if readable else ""
        ready = re.fullmatch(r"kvtierd ready pid=(\d+) address=.*\n", line)
        assert ready is not None, f"{line!r}\n{self.log}"
        self.pid = int(ready[1])

    def kill(self) -> None:
        """SIGKILL for the daemon; returns once the next one serves."""
        os.kill(self.pid, signal.SIGKILL)
        self.await_ready()

    def upgrade(self) -> None:
        """A clean stop and a new start; returns once the new one serves."""
        os.kill(self.supervisor, signal.SIGUSR2)
        self.await_ready()

    def stop(self) -> int:
        """Asks the supervisor for its end, and returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        finally:
            self.close()

    def close(self) -> None:
        """Kills the supervisor. Its daemon stops for that, and what is below ``home`` is nobody's when this returns."""
        if self._process is None or self._process.stdout is None or self._process.stdout.closed:
            return
        self._process.kill()
        self._process.wait(PATIENCE_S)
        with self._process.stdout as stdout:  # the daemon's, too: it ends with the last of them
            while stdout.readline() if select.select([stdout], [], [], STOP_S)[0] else self._outlived():
                pass

    def __enter__(self) -> Self:
        """Serves, and ends with status 0 where the block ends well."""
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                assert self.stop() == 0
        finally:
            self.close()

    def _outlived(self) -> NoReturn:
        raise AssertionError(f"the daemon goes on without its supervisor\n{self.log}")
