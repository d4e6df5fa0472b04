"""An engine's client of the daemon, which logs when the engine runs without its cache and when it has it again; and the
resets that the daemon has not carried out yet."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from kvtier.abi.attach import default_address
from kvtier.cache import Cache
from kvtier.deadline import Backoff
from kvtier.errors import ClientClosed, InvalidArgument, KvtierError
from kvtier.sync import Client
from kvtier.types import CacheInfo, size

_log = logging.getLogger("kvtier.engine")
_LOOK_S: Final = 1.0
OPEN_S: Final = 5.0
"""Seconds that an attempt to open the cache may take, and most seconds until the next attempt."""


def can_pass(error: Exception) -> bool:
    """Whether the error can end while the engine runs. A wrong setting stays wrong until the engine starts again."""
    return not isinstance(error, InvalidArgument | ClientClosed)


class EngineClient:
    """Connects to the daemon and opens an engine's cache, in the background if need be. For any thread."""

    def __init__(self, log: logging.Logger, cache: str, client: Client | Callable[[], Client]) -> None:
        """``client``: the caller's, who closes it, or a function that connects."""
        self._log: Final = log
        self._cache: Final = cache
        self._given: Final = client
        self._lock: Final = threading.Lock()
        self.client: Client | None = None
        """None before the daemon has answered, and after :meth:`close`."""
        self.is_out = False
        """Whether the engine runs without its cache."""
        self.closed: Final = threading.Event()

    @property
    def connected(self) -> bool:
        client = self.client
        return client is not None and client.connected

    def open(self, use: Callable[[Client], None], *, fail: bool = False) -> None:
        """Connects and has ``use`` open the cache. After an error that can pass, a thread tries again. Raises other
        errors, with ``fail`` any error. From then on, a daemon that does not answer is an outage."""
        try:
            self._attempt(use)
        except (KvtierError, OSError) as error:  # OSError: memory or descriptors for the mapping are short
            if fail or not can_pass(error):
                raise
            self.begin(error)
            threading.Thread(target=self._open_later, args=[use], name="kvtier-open", daemon=True).start()

    def begin(self, why: Exception | str) -> None:
        """Logs the reason for an outage, unless the outage lasts already and can still pass."""
        passes = isinstance(why, str) or can_pass(why)
        with self._lock:
            if self.closed.is_set() or (self.is_out and passes):
                return
            self.is_out = True
        then = "kvtier tries again in the background" if passes else "kvtier does not try again"
        self._log.warning("the engine runs without kvtier's cache %s: %s; %s", self._cache, why, then)

    def close(self) -> None:
        """Ends the attempts, and closes the client unless it is lent."""
        with self._lock:
            self.closed.set()
            client, self.client = self.client, None
        if client is not None:
            self._close(client)

    def _attempt(self, use: Callable[[Client], None]) -> None:
        client = self._given if isinstance(self._given, Client) else self._given()
        try:
            with self._lock:
                if self.closed.is_set():
                    raise ClientClosed("the engine has ended", reason="CLOSED")
                self.client = client
            use(client)
        except BaseException:
            self.client = None
            self._close(client)
            raise
        self._end()
        threading.Thread(target=self._watch, args=[client], name="kvtier-outage", daemon=True).start()

    def _close(self, client: Client) -> None:
        if client is not self._given:
            client.close()

    def _open_later(self, use: Callable[[Client], None]) -> None:
        backoff = Backoff(0.1, OPEN_S)
        while not self.closed.wait(backoff.next()):
            try:
                return self._attempt(use)
            except (KvtierError, OSError) as error:
                if not can_pass(error):
                    return self.begin(error)

    def _end(self) -> None:
        with self._lock:
            lasted, self.is_out = self.is_out, False
        if lasted:
            self._log.warning("kvtier's cache %s is back", self._cache)

    def _watch(self, client: Client) -> None:
        while not self.closed.wait(_LOOK_S):
            if client.connected or client.closed:
                self._end()
            else:
                self.begin("the daemon does not answer, so nothing is stored")


class PendingReset:
    """The reset of a cache, kept in a file so that the next engine asks for it again. While it is due, earlier blocks
    of the cache must not be used. Any thread may call."""

    def __init__(self, cache: str, address: str | None) -> None:
        where = f"{socket.gethostname()} {address or default_address()}"
        daemon = sha256(where.encode()).hexdigest()[:16]
        self._file: Path | None = None
        self._begun = self._ended = 0
        self._answered = 0, 0
        """The last reset that the daemon has answered, and its generation, by which the reset is repeated."""
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


class _Below(logging.Handler):
    """Passes records of kvtier's loggers to loggers below the engine's own: ``vllm.kvtier.engine``."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine: Final = engine

    def emit(self, record: logging.LogRecord) -> None:
        record.name = f"{self._engine}.{record.name}"
        log = logging.getLogger(record.name)
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def below(engine: str) -> logging.Logger:
    """Returns the logger ``ENGINE.kvtier``, and sends all lines of this process's kvtier below it."""
    own = logging.getLogger("kvtier")
    if not any(isinstance(handler, _Below) for handler in own.handlers):
        own.addHandler(_Below(engine))
        own.propagate = False
    own.setLevel(logging.DEBUG)  # the engine's loggers decide, which it may configure later
    return logging.getLogger(f"{engine}.kvtier")


def opened(info: CacheInfo, address: str, weights: str) -> str:
    """Returns the line for an open cache. ``weights``: the source of their digest; empty = the cache has none."""
    sizes: dict[str, int] = {}
    for tier in [tier for group in info.groups for tier in group.tiers]:
        sizes[str(tier.tier)] = sizes.get(str(tier.tier), 0) + tier.slots * tier.slot_bytes
    tiers = "".join(f", {size(nbytes)} {tier}" for tier, nbytes in sizes.items())
    return f"kvtier: cache {info.name}{tiers}, daemon at {address}" + (f", weights by {weights}" if weights else "")
