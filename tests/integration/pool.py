"""Daemons that outlive a test: the next test that asks for the same tiers and flags gets a running one, emptied."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvtier import Client, NotFound, Tier
from tests.integration.daemon import DaemonProcess

MOST_IDLE: Final = 6
"""Running daemons that no test uses. The one that has been idle longest is stopped first."""

_Key = tuple[tuple[tuple[Tier, int], ...], tuple[str, ...]]


class DaemonPool:
    """Starts daemons, keeps those that a test left as it found them, and stops all others."""

    def __init__(self) -> None:
        self._idle: list[tuple[_Key, DaemonProcess]] = []
        self._lent: dict[DaemonProcess, _Key] = {}

    def take(self, sizes: Mapping[Tier, int], flags: Sequence[str] = (), *, fresh: bool = False) -> DaemonProcess:
        """A running daemon without caches and sessions. ``fresh``: it has served nobody before, so that its event ids,
        its directories and its counters begin anew."""
        key = _key(sizes, flags)
        at = next((at for at, (other, _) in enumerate(self._idle) if other == key and not fresh), None)
        if at is not None:
            _, daemon = self._idle.pop(at)
            daemon.forget_log()
        else:
            daemon = DaemonProcess(Path(tempfile.mkdtemp(prefix="kv-")), sizes, flags)
            try:
                daemon.start()
            except BaseException:
                shutil.rmtree(daemon.home)
                raise
        self._lent[daemon] = key
        return daemon

    def give_back(self, daemon: DaemonProcess) -> None:
        """Empties the daemon for the next test, or stops it if the test stopped, killed or reconfigured it.

        Raises:
            AssertionError: it has died, or logged an error.
        """
        key = self._lent.pop(daemon)
        if daemon.disturbed or daemon.variables or key != _key(daemon.sizes, daemon.flags):
            self._stop(daemon)
            return
        try:
            empty = _empty(daemon)
            daemon.assert_healthy_log()
        except BaseException:
            self._stop(daemon)
            raise
        if not empty:
            self._stop(daemon)
            return
        self._idle.append((key, daemon))
        if len(self._idle) > MOST_IDLE:
            self._stop(self._idle.pop(0)[1])

    def close(self) -> None:
        while self._idle:
            self._stop(self._idle.pop()[1])

    def _stop(self, daemon: DaemonProcess) -> None:
        try:
            daemon.stop()
        finally:
            shutil.rmtree(daemon.home)


def _key(sizes: Mapping[Tier, int], flags: Sequence[str]) -> _Key:
    return tuple(sorted(sizes.items())), tuple(flags)


def _empty(daemon: DaemonProcess) -> bool:
    """Whether that could be: slots that a test left mapped and leased are out of use while this process lives."""
    with Client(daemon.address) as client:
        for session in {lease.session_id for lease in client.leases()}:
            with suppress(NotFound):  # it has ended by itself meanwhile
                client.kick(session)
        if client.leases():
            return False
        for cache in client.caches():
            client.remove_cache(cache.name, force=True)
    return True
