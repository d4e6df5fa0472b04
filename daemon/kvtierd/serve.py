"""A daemon's life as a process: signals, reloads, and messages to its service manager."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final

from kvtierd import logs
from kvtierd.config import Config, ConfigError, Loaded
from kvtierd.notify import Notifier, PassedFd
from kvtierd.service.daemon import Daemon
from kvtierd.service.server import Watchdog

EXIT_UNCLEAN: Final = 3

_EXTEND_EVERY_S: Final = 5.0
_EXTEND_BY_S: Final = 30.0
_START_LIMIT_S: Final = 3600.0
"""A start (allocating memory, reading indices) may take long, but not forever."""
_STOP_MARGIN_S: Final = 15.0
"""Seconds that a stop may take beyond the time that moves get to end."""

GC_THRESHOLDS: Final = (1_000, 5, 5)
UNFROZEN_MAX: Final = 10_000
"""Most objects that stay unfrozen: a full garbage collection stops the loop for 0.2 to 0.5 µs per object."""

_log = logging.getLogger(__name__)

_ended: Final[list[Daemon]] = []
"""Daemons kept until the process ends: freeing a million blocks singly takes seconds."""


async def serve(
    read_again: Callable[[], Loaded],
    config: Config,
    notifier: Notifier,
    watchdog_s: float | None,
    passed: Sequence[PassedFd],
) -> int:
    """Runs a daemon until a signal asks for its end. Returns the exit status.

    ``read_again``: reads the configuration for a reload; raises :class:`ConfigError`. ``watchdog_s``: seconds within
    which the manager expects a watchdog message; None = no watchdog. ``passed``: the descriptors that it kept."""
    loop = asyncio.get_running_loop()
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)  # before the start: an early SIGHUP would end the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))  # blocked by a supervisor until now
    notifier.status("starting: opening caches")
    async with _beside(_take_long(notifier), "extend"):
        daemon = await Daemon.start(config, notifier, passed)
    _keep_collections_short()
    reloading = loop.create_task(_reload_when_asked(reload, read_again, daemon, notifier), name="reload")
    feeding: AbstractAsyncContextManager[None] = nullcontext()
    if watchdog_s is not None:
        feeding = _beside(Watchdog(notifier, watchdog_s, daemon.stalled_s).run(), "watchdog")
    async with feeding:
        notifier.ready(_serving(daemon))
        tcp = f" tcp={daemon.tcp_address}" if daemon.tcp_address else ""
        _say(f"kvtierd ready pid={os.getpid()} address={daemon.address}{tcp}")
        await stop.wait()
        reloading.cancel()
        _log.info("stopping")
        notifier.stopping("stopping: moves are given time to end")
        notifier.extend(config.shutdown_seconds + _STOP_MARGIN_S)
        clean = await daemon.stop()
        _ended.append(daemon)
    _log.info("stopped clean=%s", clean)
    return 0 if clean else EXIT_UNCLEAN


def _keep_collections_short() -> None:
    """Turns the garbage collector on, so that it never scans all blocks: a million blocks take it a second."""

    def freeze(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and len(gc.get_objects(generation=2)) > UNFROZEN_MAX:
            gc.freeze()  # dropped blocks and removed caches leave no reference cycles

    gc.freeze()
    gc.callbacks.append(freeze)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def _say(line: str) -> None:
    """Prints a line to standard output. The daemon goes on if the reader has left."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("standard output takes nothing: %s", error.strerror)
        with open(os.devnull, "wb") as nowhere:  # Python tries once more when it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs work until the body ends."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _take_long(notifier: Notifier) -> None:
    """Asks the manager for more time, while the loop runs."""
    async with asyncio.timeout(_START_LIMIT_S):
        while True:
            notifier.extend(_EXTEND_BY_S)
            await asyncio.sleep(_EXTEND_EVERY_S)


async def _reload_when_asked(
    asked: asyncio.Event, read_again: Callable[[], Loaded], daemon: Daemon, notifier: Notifier
) -> None:
    """Reloads when asked, until cancelled. Requests during a reload cause a single reload after it."""
    while True:
        await asked.wait()
        asked.clear()
        notifier.reloading()
        try:
            fresh = await asyncio.to_thread(read_again)
        except ConfigError as error:
            daemon.config_problems = tuple(f"configuration: not reloaded: {line}" for line in str(error).splitlines())
        else:
            logs.change(fresh.config.log_level)
            daemon.reload(fresh.config)
        await daemon.look_at_directories()
        for problem in daemon.config_problems:
            _log.warning("%s", problem)
        notifier.ready(_serving(daemon))


def _serving(daemon: Daemon) -> str:
    return "; ".join([f"serving at {daemon.address}", *daemon.config_problems])
