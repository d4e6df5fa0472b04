"""A daemon of one's own: started for a test, a measurement or a demonstration, and always stopped again."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvtier.abi import attach
from kvtier.abi.spec import CacheSpec
from kvtier.errors import DaemonUnavailable, KvtierError
from kvtier.types import Tier

_READY: Final = "kvtierd ready"
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 40.0
_SHOWN_LOG_LINES: Final = 15


@dataclass(slots=True, frozen=True)
class TierSlots:
    """Blocks by tier; 0 = the daemon does not have that tier."""

    device: int
    host: int
    disk: int

    def as_bytes(self, spec: CacheSpec) -> dict[Tier, int]:
        """Sizes that hold exactly so many blocks of ``spec``."""
        stride = spec.record_bytes(0)
        return {Tier.DEVICE: self.device * stride, Tier.HOST: self.host * stride, Tier.DISK: self.disk * stride}


class PrivateDaemon:
    """``async with PrivateDaemon(sizes) as daemon`` runs ``kvtierd`` in a child process at :attr:`address`.

    State and disk tier live in ``keep`` and stay there, or in a temporary directory that goes with the daemon. The
    sockets are always in a temporary directory, since their paths must be short. Start and stop it as often as you like
    inside the block: the directories are the same.
    """

    def __init__(
        self, sizes: Mapping[Tier, int], *, keep: Path | None = None, module: Sequence[str] = ("kvtierd.main",)
    ) -> None:
        """``sizes`` in bytes by tier; 0 or absent = none. ``module``: what is run, with its first arguments; one that
        behaves as ``kvtierd.main`` does."""
        self._sizes = dict(sizes)
        self._module = tuple(module)
        self._keep = keep
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[bytes] | None = None

    @property
    def address(self) -> str:
        return str(self._home / "run")

    @property
    def pid(self) -> int:
        """Of the running daemon. Raises :class:`DaemonUnavailable` where there is none."""
        if self._process is None:
            raise DaemonUnavailable("the private daemon is not running", reason="NO_DAEMON")
        return self._process.pid

    async def start(self) -> None:
        """Returns once it serves. Raises :class:`DaemonUnavailable` with the end of its log where it does not."""
        state = self._keep or self._home
        command = [
            *(sys.executable, "-m", *self._module),
            *("--runtime-dir", self.address),
            *("--state-dir", str(state / "state")),
            *("--disk-dir", str(state / "disk")),
        ]
        for tier, size in self._sizes.items():
            command += [f"--{tier}-bytes", str(size)]
        environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("KVTIERD_")}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment, start_new_session=True
            )
        await self._wait_until_ready(self._process)

    async def stop(self, timeout: float = _STOP_TIMEOUT_S) -> int:
        """Asks it to stop, kills it if it does not; returns its exit status, 0 = cleanly.

        Raises TimeoutError where it had to be killed after so many seconds.
        """
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(timeout):
                    await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if self._drain is not None:
            await self._drain
        return process.returncode or 0

    async def __aenter__(self) -> Self:
        self._directory = _make_directory()
        try:
            await self.start()
        except BaseException:
            await self._remove()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._remove()

    @property
    def _home(self) -> Path:
        if self._directory is None:
            raise KvtierError("the private daemon lives only inside its `async with` block", reason="CLOSED")
        return self._directory

    @property
    def _log(self) -> Path:
        return self._home / "kvtierd.log"

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise KvtierError("the private daemon has no standard output", reason="INTERNAL")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line.decode(errors="replace").startswith(_READY):
            await self.stop()
            tail = self._log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:]
            raise DaemonUnavailable("\n".join(["the private daemon did not start:", *tail]), reason="NO_DAEMON")
        self._drain = asyncio.create_task(process.stdout.read())

    async def _remove(self) -> None:
        try:
            await self.stop()
        finally:
            if self._directory is not None:
                shutil.rmtree(self._directory)
                self._directory = None


def _make_directory() -> Path:
    """A new temporary directory whose sockets have short enough paths."""
    directory = Path(tempfile.mkdtemp(prefix="kvtier-"))
    try:
        attach.socket_path(directory / "run", attach.RPC_SOCKET)
    except attach.AddressError:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="kvtier-", dir="/tmp"))
    return directory
