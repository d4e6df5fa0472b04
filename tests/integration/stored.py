"""What a cache's index says is on disk, read past the daemon."""

from pathlib import Path

import lmdb

from kvtierd.core.ids import Key


def flip_in_record(directory: Path, key: bytes, place: int) -> None:
    """Changes a bit at ``place`` of a block's record, of the first window group of the cache in ``directory``."""
    with lmdb.open(str(directory / "index"), max_dbs=4, lib_version=0, map_size=_map_bytes(directory)) as env:
        records = env.open_db(b"records-0", create=False)
        with env.begin(write=True, db=records) as txn:
            value = bytearray(txn.get(key) or b"")
            value[place] ^= 0x04
            txn.put(key, bytes(value))


def _map_bytes(directory: Path) -> int:
    return (directory / "index" / "data.mdb").stat().st_size


def stored_in(directory: Path) -> dict[Key, bytes]:
    """Records by key, of the first window group of the cache in ``directory``."""
    with lmdb.open(str(directory / "index"), readonly=True, lock=False, max_dbs=4, lib_version=0) as env:
        records = env.open_db(b"records-0", create=False)
        with env.begin() as txn:
            return {Key(key): value for key, value in txn.cursor(records)}
