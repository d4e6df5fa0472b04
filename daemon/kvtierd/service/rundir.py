"""The runtime directory: where the daemon's sockets are, and whose they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from kvtier.abi.attach import ATTACH_SOCKET, RPC_SOCKET, AddressError, socket_path
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk.superblock import DirectoryLock, io_errors

LOCK: Final = "kvtierd.lock"
_DIRECTORY_MODE: Final = 0o750
_SOCKET_UMASK: Final = 0o117
"""Sockets are born 0660: there is no moment in which others could connect."""


class RuntimeDir:
    """Held by this process alone. The lock comes before the sockets: binding would silently steal a live daemon's."""

    def __init__(self, path: Path, lock: DirectoryLock, rpc_path: str, attach_path: str) -> None:
        self.path: Final = Path(os.path.abspath(path))
        self.rpc_path: Final = rpc_path
        self.attach_path: Final = attach_path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Creates the directory (0750) if it is missing, and removes sockets that a crash left.

        Raises TierConfigError for a path too long for a socket, LockedDirectory, TierIOError.
        """
        try:
            rpc_path, attach_path = socket_path(path, RPC_SOCKET), socket_path(path, ATTACH_SOCKET)
        except AddressError as error:
            raise TierConfigError("runtime_dir", path, str(error)) from error
        with io_errors(f"cannot use the runtime directory {path}"):
            if not path.is_dir():
                path.mkdir(parents=True)
                path.chmod(_DIRECTORY_MODE)
            lock = DirectoryLock.take(path / LOCK)
        runtime_dir = cls(path, lock, rpc_path, attach_path)
        runtime_dir._remove_sockets()
        return runtime_dir

    @contextmanager
    def creating_sockets(self) -> Iterator[None]:
        """Sockets bound inside get their mode at birth. The umask is the process's: keep it short, start no threads."""
        before = os.umask(_SOCKET_UMASK)
        try:
            yield
        finally:
            os.umask(before)

    def bind_attach(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.bind(self.attach_path)
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Removes the sockets and lets another daemon in."""
        self._remove_sockets()
        self._lock.release()

    def _remove_sockets(self) -> None:
        for path in (self.rpc_path, self.attach_path):
            Path(path).unlink(missing_ok=True)
