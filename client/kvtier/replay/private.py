"""A private daemon for a test, a measurement or a demonstration."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from kvtier.errors import DaemonUnavailable, KvtierError
from kvtier.replay import keeper
from kvtier.types import Tier

_READY: Final = b"kvtierd ready"
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 40.0
_SHOWN_LOG_LINES: Final = 15


class PrivateDaemon:
    """Runs ``kvtierd`` in a child process: ``async with PrivateDaemon(sizes) as daemon: connect(daemon.address)``.

    The daemon's files are in a temporary directory. With the block, or with this process even by SIGKILL, the daemon
    ends and its files go. Inside the block the daemon can be stopped and started again on the same files.
    """

    def __init__(self, sizes: Mapping[Tier, int], *, device: str = "stand-in") -> None:
        """Prepares the daemon; entering starts it.

        Args:
            sizes: bytes by tier; 0 or absent = the daemon lacks the tier.
            device: the device of the device tier.
        """
        self._sizes = dict(sizes)
        self._device = device
        self._directory: Path | None = None
        self._block: tuple[int, int] = (-1, -1)
        """A pipe without bytes. Its end tells the keeper that the block has ended."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return str(self.home / "run")

    @property
    def pid(self) -> int:
        """The daemon's process id. Raises :class:`DaemonUnavailable` if the daemon is not running."""
        if self._process is None:
            raise DaemonUnavailable("the private daemon is not running", reason="NO_DAEMON")
        return self._process.pid

    async def start(self) -> None:
        """Returns once the daemon serves. Raises :class:`DaemonUnavailable`, with the end of its log, if it fails."""
        log = self.home / "kvtierd.log"
        command = [
            *(sys.executable, "-IS", keeper.__file__, str(self.home)),
            *(sys.executable, "-m", "kvtierd.main"),
            *("--runtime-dir", self.address),
            *("--state-dir", str(self.home / "state")),
            *("--disk-dir", str(self.home / "disk")),
            *("--default-budget", "100%"),  # the only cache gets all, and its only writer may reserve all
            *("--max-reserved-fraction", "1"),
        ]
        for tier, size in self._sizes.items():
            flag = ("--device", f"{self._device}={size}") if tier is Tier.DEVICE else (f"--{tier}-bytes", str(size))
            command += flag if size else ()
        environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("KVTIERD_")}
        with log.open("ab") as stderr:
            self._process = process = await asyncio.create_subprocess_exec(
                *command, stdin=self._block[0], stdout=PIPE, stderr=stderr, env=environment, start_new_session=True
            )
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        except TimeoutError:
            line = b""
        if not line.startswith(_READY):
            await self.stop()
            tail = log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:]
            raise DaemonUnavailable("\n".join(["the private daemon did not start:", *tail]), reason="NO_DAEMON")

    async def stop(self, timeout: float = _STOP_TIMEOUT_S) -> int:
        """Ends the daemon and returns its exit status. Raises TimeoutError if it had to be killed."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.returncode is None:
            process.terminate()
        try:
            return await asyncio.wait_for(process.wait(), timeout)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def __aenter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="kvtier-"))
        self._block = os.pipe()
        try:
            await self.start()
        except BaseException:
            await self._remove()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._remove()

    @property
    def home(self) -> Path:
        """The temporary directory."""
        if self._directory is None:
            raise KvtierError("the private daemon lives only inside its `async with` block", reason="CLOSED")
        return self._directory

    async def _remove(self) -> None:
        try:
            await self.stop()
        finally:
            shutil.rmtree(self.home)
            self._directory = None
            for end in self._block:
                os.close(end)
