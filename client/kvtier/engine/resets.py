"""Resets that the daemon has not carried out yet, kept in a file so that the next engine asks for them again."""

from __future__ import annotations

import logging
import os
import socket
from hashlib import sha256
from pathlib import Path

from kvtier.abi.attach import default_address
from kvtier.cache import Cache

_log = logging.getLogger("kvtier.engine")


class PendingReset:
    """The reset of a cache. While it is due, earlier blocks of the cache must not be used. Any thread may call."""

    def __init__(self, cache: str, address: str | None) -> None:
        where = f"{socket.gethostname()} {address or default_address()}"
        daemon = sha256(where.encode()).hexdigest()[:16]
        self._file: Path | None = None
        self._begun = self._ended = 0
        self._answered = 0, 0
        """The last reset that the daemon has answered, and its generation."""
        try:
            state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
            self._file = Path(state, "kvtier", "resets", daemon, cache)
            self._begun = int(self._file.exists())
        except (OSError, RuntimeError) as error:
            _log.warning("kvtier cannot keep resets for the next engine: %s", error)

    @property
    def due(self) -> bool:
        return self._begun > self._ended

    def begin(self) -> None:
        """Records a new reset in the file. Call before asking the daemon."""
        self._begun += 1
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
            for path in (self._file, self._file.parent):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        except OSError as error:
            _log.warning("kvtier: a reset is forgotten if this engine ends before the daemon hears of it: %s", error)

    async def carry_out(self, cache: Cache) -> bool:
        """Resets the cache, and ends the resets begun before the call if no block is held. Returns whether they ended;
        raises the errors of :meth:`kvtier.Cache.reset`."""
        begun, (answered, generation) = self._begun, self._answered
        report = await cache.reset(force=True, repeats=generation if answered == begun else 0)
        self._answered = begun, report.generation
        if report.kept:
            return False
        self._ended = begun
        if self._file is not None and not self.due:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("kvtier: the next engine resets the cache once more: %s", error)
        return True
