"""What a cache's index says is on disk, read past the daemon."""

from __future__ import annotations

from pathlib import Path

import lmdb


def stored_in(directory: Path) -> dict[bytes, bytes]:
    """Records by key, of the first window group of the cache in ``directory``."""
    with lmdb.open(str(directory / "index"), readonly=True, lock=False, max_dbs=4, lib_version=0) as env:
        records = env.open_db(b"records-0", create=False)
        with env.begin() as txn:
            return dict(list(txn.cursor(records)))
