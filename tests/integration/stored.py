"""What a cache's index says is on disk, read past the daemon."""

from __future__ import annotations

from pathlib import Path

import lmdb

from kvtierd.tiers.disk.journal import decode_journal


def stored_in(directory: Path) -> dict[bytes, bytes]:
    """Records by key, of the first window group of the cache in ``directory``."""
    with lmdb.open(str(directory / "index"), readonly=True, lock=False, max_dbs=5, lib_version=0) as env:
        records, journal = env.open_db(b"records-0", create=False), env.open_db(b"journal-0", create=False)
        with env.begin() as txn:
            stored = dict(list(txn.cursor(records)))
            changed = decode_journal(value for _, value in txn.cursor(journal))
    kept = {key: record for key, record in stored.items() if key not in changed}
    return kept | {bytes(key): record for key, record in changed.items() if record is not None}
