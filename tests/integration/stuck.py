"""A disk that does not answer, by the one lock that a daemon shares with other processes: its index's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from tests.integration.daemon import DaemonProcess


class StuckDisk:
    def __init__(self, transaction: lmdb.Transaction[bytes]) -> None:
        self._transaction = transaction

    def release(self) -> None:
        """The disk answers again. Once is enough."""
        self._transaction.abort()


@contextmanager
def stuck_disk(daemon: DaemonProcess, cache: str) -> Iterator[StuckDisk]:
    """While it lasts every write to the cache's disk tier hangs in the call, as with a device that has gone away."""
    path = daemon.disk_dir / "caches" / cache / "index"
    size = (path / "data.mdb").stat().st_size
    with lmdb.open(str(path), map_size=size, max_dbs=4, create=False, lib_version=0) as env:
        disk = StuckDisk(env.begin(write=True))
        try:
            yield disk
        finally:
            disk.release()
